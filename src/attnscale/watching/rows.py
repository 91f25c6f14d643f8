"""Rows of scores: which keys each row sees, and which biases are added to its scores."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from attnscale.measure.pooled import pool_rows
from attnscale.measure.row_blocks import rows_of
from attnscale.measure.row_sums import joined_rows
from attnscale.measure.sampling import sample_positions
from attnscale.measure.stats import ScoreStats
from attnscale.visibility import NEVER_A_SCORE, shown_by

BLOCK_SCORES = 2**22  # scores per block when every row is measured


@dataclass(frozen=True)
class Rows:
    """Rows of scores: `at(positions)` returns scores and visibility (None: all), (batch, heads, rows, keys)."""

    batch: int
    heads: int
    length: int
    keys: int
    uneven: bool
    at: Callable[[Tensor], tuple[Tensor, Tensor | None]]

    def keys_nobody_sees(self, probe: Tensor) -> Tensor | None:
        """Return True for keys hidden from every query and head, (batch, keys); None if rows at `probe` see all."""
        _, visible = self.at(probe)
        if visible is None or not bool((seen := visible.flatten(1, -2).any(1)).logical_not().any()):
            return None
        for some in torch.arange(self.length).split(self._block):
            _, visible = self.at(some)
            seen = torch.ones_like(seen) if visible is None else seen | visible.flatten(1, -2).any(1)
        return ~seen

    def without(self, left_out: Tensor | None) -> "Rows":
        """Hide all keys from the rows in `left_out`, (batch, length)."""
        if left_out is None:
            return self

        def at(positions: Tensor) -> tuple[Tensor, Tensor | None]:
            scores, visible = self.at(positions)
            kept = ~left_out[:, None, positions.to(left_out.device), None]
            return scores, kept.expand_as(scores) if visible is None else visible & kept

        return replace(self, at=at, uneven=True)

    def measure(self, rows: int | None, bound: Callable[[], Tensor]) -> ScoreStats:
        """Return statistics over every row, or over a sample per head with `bound` as upper bound on its scores."""
        sample = None if rows is None else sample_positions(rows, self.length, self.batch, self.uneven)
        positions = torch.arange(self.length) if sample is None else sample.positions
        found = joined_rows([rows_of(*self.at(some)) for some in positions.split(self._block)])
        highest = None if sample is None else bound()
        return ScoreStats(self.heads, exact=sample is None, pool=partial(pool_rows, found, highest, sample))

    @property
    def _block(self) -> int:
        return max(1, BLOCK_SCORES // max(1, self.batch * self.heads * self.keys))


def spread_positions(length: int, most: int) -> Tensor:
    """Return at most `most` evenly spaced positions, including the first and last.

    >>> spread_positions(100, 4).tolist()
    [0, 33, 66, 99]
    """
    with torch.inference_mode(False):  # positions may be used outside inference mode
        return torch.from_numpy(np.linspace(0, length - 1, min(most, length)).round().astype(np.int64))


def looks_causal(visible: Tensor | None, positions: Tensor, length: int) -> bool:
    """Return True if each row of (…, rows, keys) sees only its prefix, and some rows not all keys.

    Rows are aligned to the last key or, with a partly filled cache, to the first.
    """
    if visible is None or length < 2 or visible.shape[-1] < 2:
        return False
    offsets = {max(visible.shape[-1] - length, 0), 0}
    return any(_sees_its_prefix(visible, (positions + offset).to(visible.device)) for offset in offsets)


def _sees_its_prefix(visible: Tensor, last: Tensor) -> bool:
    """Return True if no row sees a key after its `last`, and at least one sees its `last`."""
    keys = visible.shape[-1]
    future = torch.arange(keys, device=visible.device) > last[:, None]
    if not bool(future.any()):
        return False
    own = visible.flatten(0, -3).any(0).gather(-1, last.clamp(0, keys - 1)[:, None])
    return not bool((visible & future).any()) and bool(own.any())


def hiding_gap(mask: Tensor) -> float | None:
    """Return the gap between a mask's visible and hidden values; None if it hides nothing, like a bias."""
    if not mask.numel():
        return None
    highest, hidden = mask.amax(), mask.masked_fill(shown_by(mask), -math.inf).amax()
    gap = float(highest) - float(hidden)
    return gap if bool((~shown_by(mask)).any()) and not math.isnan(gap) else None


def hidden_by(bias: Tensor, gap: float, highest: float) -> Tensor:
    """Return True for elements about `gap` below the largest of their row, or of the mask if it hides a row."""
    return bias < bias.amax(-1, keepdim=True).clamp(min=highest) - 0.5 * min(gap, -NEVER_A_SCORE)


def keys_nobody_sees(mask: Tensor | None) -> Tensor | None:
    """Return True for keys that a mask (…, queries or 1, keys) hides from all queries, (batch or 1, keys)."""
    if mask is None or mask.dim() < 2:
        return None
    shown = shown_by(mask).any(-2)
    return ~(shown.any(-2) if shown.dim() > 2 else shown if shown.dim() == 2 else shown.unsqueeze(0))


def is_bias(tensor: Tensor) -> bool:
    """Return True if an added operand is a bias: not a mask, and not zeros."""
    return bool((tensor != 0).any()) and hiding_gap(tensor) is None


def flags_added(bias: Tensor | None) -> float | None:
    """Return the nonzero value of a mask of zeros and ±ones that is added to scores; None for other tensors.

    Such a mask is a triangle, or covers the same keys at one end for every query.
    """
    if bias is None or not bias.is_floating_point() or not bias.numel():
        return None
    ends = (float(bias.amin()), float(bias.amax()))
    if ends not in ((0.0, 1.0), (-1.0, 0.0)) or not bool(((bias == ends[0]) | (bias == ends[1])).all()):
        return None
    flags = (bias != 0).reshape(-1, *bias.shape[-2:]) if bias.dim() > 1 else (bias != 0)[None, None]
    return ends[0] or ends[1] if _is_triangle(flags) or _is_padding(flags) else None


def _is_triangle(flags: Tensor) -> bool:
    queries, keys = flags.shape[-2:]
    if queries < 2:
        return False
    past = flags.new_ones(queries, keys)
    offsets = {0, keys - queries}
    shapes = [past.tril(at) for at in offsets] + [past.triu(at + 1) for at in offsets]
    return any(bool((flags == shape).all()) for shape in shapes)


def _is_padding(flags: Tensor) -> bool:
    steps = flags[:, 0].int().diff(dim=-1)
    return bool((flags == flags[:, :1]).all()) and bool((steps.abs().sum(-1) <= 1).all())


def highest_added(bias: Tensor | None) -> float | None:
    """Return the largest value that a float mask adds to visible scores; None if it adds none."""
    if bias is None:
        return None
    shown = bias.masked_fill(~shown_by(bias), -math.inf)
    return float(shown.max()) if bool(((shown != 0) & (shown != -math.inf)).any()) else None
