"""An attention written out that is known, on new tensors: measured from its scores, and nothing waits for a GPU."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnscale.measure.lengths import mean_lengths
from attnscale.measure.sampling import rows_are_shared
from attnscale.numerics import wide_dtype
from attnscale.visibility import NEVER_A_SCORE
from attnscale.watching.call import Factors, SeenCall
from attnscale.watching.rows import Rows, spread_positions
from attnscale.watching.shards import TAIL
from attnscale.watching.written.layout import KnownWritten, Layout
from attnscale.watching.written.legibility import fit
from attnscale.watching.written.written_call import DISAGREEMENT, NORMED_ROWS, PROBED_ROWS


@dataclass(frozen=True, eq=False)
class WrittenAgain:
    """The input of a softmax, and the two operands of its product."""

    scores: Tensor
    left: Tensor
    right: Tensor
    layout: Layout

    def seen(self, known: KnownWritten, call: SeenCall, rows: int | None) -> SeenCall:
        """A call that was seen before, with the numbers of this time; the scores have to fit what is known."""
        assert call.factors is not None
        scores = self.layout.scores_by_head(self.scores)
        query, key = self.layout.operands(self.left, self.right)
        batch, heads, length, keys = scores.shape
        by_key = scores.amax(-2)  # of every score there is, read once
        hidden = by_key.amax(1) <= NEVER_A_SCORE
        padding = hidden if call.attends_itself and keys == length else None

        def rows_at(positions: Tensor) -> tuple[Tensor, Tensor]:
            chosen = scores.index_select(-2, positions.to(scores.device))
            chosen = chosen.to(wide_dtype(chosen))
            shown = chosen > NEVER_A_SCORE
            kept = None if padding is None else ~padding[:, None, positions.to(padding.device), None]
            return chosen, shown if kept is None else shown & kept

        highest = by_key.amax((0, 2)).double()
        call.stats = Rows(batch, heads, length, keys, known.is_uneven, rows_at).measure(rows, lambda: highest)
        call.batch, call.query_len, call.key_len, call.padding = batch, length, keys, padding
        call.dtype, call.scales = self.left.dtype, _scales(known, call, scores, query, key)
        every = rows is None or rows_are_shared()
        call.query_norm = _norm(query, call.factors[0], padding, every)
        call.key_norm = _norm(key, call.factors[1], hidden, every)
        return call

    def some(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys spread over their positions, and the last queries."""
        query, key = self.layout.operands(self.left, self.right)
        spread = (each[:, :, spread_positions(each.shape[-2], NORMED_ROWS).to(each.device)] for each in (query, key))
        return (*spread, query[:, :, -TAIL:])  # type: ignore[return-value]


def _scales(known: KnownWritten, call: SeenCall, scores: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """What the operations say, or the slope of scores on q·k where that is another: a constant was changed."""
    assert call.factors is not None
    factors = np.abs(call.factors[0]) * np.abs(call.factors[1])
    stated = torch.from_numpy(known.multiplier * factors).to(scores.device, non_blocking=True)
    probe = spread_positions(scores.shape[-2], PROBED_ROWS).to(scores.device)
    of_product = _wide(query[0, :, probe]) @ _wide(key[0]).mT
    of_product = of_product * torch.from_numpy(known.multiplier).to(of_product)[:, None, None]
    found = _wide(scores[0, :, probe])
    shown = found > NEVER_A_SCORE
    if call.softcap is not None:
        found = call.softcap * torch.atanh((found / call.softcap).clamp(-1, 1))
        shown = shown & torch.isfinite(found)
        found = found.masked_fill(~shown, 0.0)
    slope, _ = fit(of_product, found, shown)
    return torch.where((slope - 1).abs() > (DISAGREEMENT if known.is_constant else 0.0), stated * slope, stated)


def _norm(vectors: Tensor, factor: Factors, left_out: Tensor | None, every: bool) -> Tensor:
    at = spread_positions(vectors.shape[-2], vectors.shape[-2] if every else NORMED_ROWS).to(vectors.device)
    norm = mean_lengths(_wide(vectors[:, :, at]), None if left_out is None else left_out[:, at])
    return norm / torch.from_numpy(np.abs(factor)).to(norm.device, non_blocking=True)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(wide_dtype(tensor))
