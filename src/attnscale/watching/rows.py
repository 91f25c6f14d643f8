"""Scores that can be asked for by row, and what some of them tell."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from attnscale.measure.dense import look_at_scores, rows_of
from attnscale.measure.pool import Unpooled
from attnscale.measure.row_sums import RowSums
from attnscale.measure.sampling import sample_positions
from attnscale.measure.stats import ScoreStats
from attnscale.watching.written.axes import Axes

BLOCK_SCORES = 2**22  # scores gathered at a time when every row is looked at


@dataclass(frozen=True)
class Rows:
    """`at(positions)` gives scores, and which of them are visible (None: all), (batch, heads, rows, keys)."""

    batch: int
    heads: int
    length: int
    keys: int
    uneven: bool
    at: Callable[[Tensor], tuple[Tensor, Tensor | None]]

    def keys_nobody_sees(self, probe: Tensor) -> Tensor | None:
        """Which keys are hidden from every query of every head, (batch, keys); None where rows at `probe` see all."""
        _, visible = self.at(probe)
        if visible is None or not bool((seen := visible.flatten(1, -2).any(1)).logical_not().any()):
            return None
        for some in torch.arange(self.length).split(self._block):
            _, visible = self.at(some)
            seen = torch.ones_like(seen) if visible is None else seen | visible.flatten(1, -2).any(1)
        return ~seen

    def without(self, left_out: Tensor | None) -> "Rows":
        """The same, of which some rows, (batch, length), see nothing."""
        if left_out is None:
            return self

        def at(positions: Tensor) -> tuple[Tensor, Tensor | None]:
            scores, visible = self.at(positions)
            kept = ~left_out[:, None, positions.to(left_out.device), None]
            return scores, kept.expand_as(scores) if visible is None else visible & kept

        return replace(self, at=at, uneven=True)

    def measure(self, rows: int | None, bound: Callable[[], Tensor]) -> ScoreStats:
        """Statistics over every row, or over about so many a head; `bound` is asked for where not all are looked at."""
        sample = None if rows is None else sample_positions(rows, self.length, self.batch, self.uneven)
        if sample is None:
            every = _joined([rows_of(*self.at(some)) for some in torch.arange(self.length).split(self._block)])
            return ScoreStats(self.heads, exact=True, pool=Unpooled(lambda: every))
        scores, visible = self.at(sample.positions)
        found = look_at_scores(scores, visible)
        if scores.device.type != "cpu":
            found()  # while its stream is the one the scores are on
        highest = bound()  # now, while the scores are there
        return ScoreStats(self.heads, exact=False, pool=Unpooled(found, lambda: highest, sample))

    @property
    def _block(self) -> int:
        return max(1, BLOCK_SCORES // max(1, self.batch * self.heads * self.keys))


@dataclass(frozen=True)
class ScoreRows:
    """Scores as a model wrote them, in the shape of its axes."""

    axes: Axes
    scores: Tensor

    def at(self, positions: Tensor) -> Tensor:
        """The scores of these rows, (batch, heads, rows, keys)."""
        chosen = self._last.index_select(-2, positions.to(self.scores.device))
        return self._by_head(chosen.reshape(-1, *chosen.shape[-2:]))

    def highest(self) -> Tensor:
        """The largest there is, a value a head."""
        return self._by_head(self._last.amax((-2, -1)).reshape(-1)).amax(0).double()

    @cached_property
    def _last(self) -> Tensor:
        """A view of them: (…other axes…, queries, keys)."""
        axes = self.axes
        moving = (*axes.other_axes, *axes.query_axes, axes.key_axis)
        single = [axis for axis in range(len(axes.shape)) if axis not in moving]
        view = self.scores.permute(*single, *moving)
        return view.flatten(-1 - len(axes.query_axes), -2) if axes.query_axes else view.unsqueeze(-2)

    def _by_head(self, each: Tensor) -> Tensor:
        """What there is of each combination of the other axes, (batch, heads, …); a view where they are in order."""
        groups = self.axes.groups
        if groups.size == len(each) and (np.diff(groups.ravel()) == 1).all():
            return each.view(*groups.shape, *each.shape[1:])
        return each[torch.from_numpy(groups).to(each.device)]


def _joined(parts: list[RowSums]) -> RowSums:
    if len(parts) == 1:
        return parts[0]
    names = RowSums.__dataclass_fields__
    return RowSums(**{name: torch.cat([getattr(part, name) for part in parts], dim=-1) for name in names})


@lru_cache(maxsize=16)
def spread_positions(length: int, most: int) -> Tensor:
    """At most so many positions, from the first to the last; not to be written to.

    >>> spread_positions(100, 4).tolist()
    [0, 33, 66, 99]
    """
    with torch.inference_mode(False):  # they may be used outside it
        return torch.from_numpy(np.linspace(0, length - 1, min(most, length)).round().astype(np.int64))


def looks_causal(visible: Tensor | None, positions: Tensor, length: int) -> bool:
    """Whether rows (…, rows, keys) see their prefix and no more, at some of these positions at least less than all.

    The last row is the last key, or, where a cache has room for more, the first is the first.
    """
    if visible is None or length < 2 or visible.shape[-1] < 2:
        return False
    offsets = {max(visible.shape[-1] - length, 0), 0}
    return any(_sees_its_prefix(visible, (positions + offset).to(visible.device)) for offset in offsets)


def _sees_its_prefix(visible: Tensor, last: Tensor) -> bool:
    """Whether no row sees a key past its `last`, and one at least sees that."""
    keys = visible.shape[-1]
    future = torch.arange(keys, device=visible.device) > last[:, None]
    if not bool(future.any()):
        return False
    own = visible.flatten(0, -3).any(0).gather(-1, last.clamp(0, keys - 1)[:, None])
    return not bool((visible & future).any()) and bool(own.any())
