"""An attention that is written out, on the tensors of one step: measured from its scores, without waiting for a GPU."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnscale.measure.lengths import mean_lengths
from attnscale.measure.sampling import rows_are_shared
from attnscale.numerics import constant_on, wide_dtype
from attnscale.visibility import NEVER_A_SCORE
from attnscale.watching.call import TAIL, Factors, SeenCall
from attnscale.watching.plan import PlannedCall
from attnscale.watching.rows import Rows, spread_positions
from attnscale.watching.written.layout import Layout, WrittenPlan
from attnscale.watching.written.written_call import DISAGREEMENT, NORMED_ROWS, PROBED_ROWS, fit


@dataclass(frozen=True, eq=False)
class WrittenOperands:
    """The input of a softmax, and the two operands of its product."""

    scores: Tensor
    left: Tensor
    right: Tensor
    layout: Layout

    def fits(self, layout: Layout) -> bool:
        """Return True if these tensors have this layout."""
        return self.layout == layout and layout.fits(self.scores, self.left, self.right)

    def seen(self, planned: PlannedCall, rows: int | None) -> SeenCall:
        """Return the planned call with the numbers of these tensors."""
        assert planned.written is not None
        known, call = planned.written, planned.seen()
        scores = self.layout.scores_by_head(self.scores)
        query, key = self.layout.operands(self.left, self.right)
        batch, heads, length, keys = scores.shape
        by_key = scores.amax(-2)  # of every score there is, read once
        hidden = by_key.amax(1) <= NEVER_A_SCORE
        padding = hidden if call.attends_itself and keys == length else None

        def rows_at(positions: Tensor) -> tuple[Tensor, Tensor]:
            chosen = scores.index_select(-2, positions.to(scores.device, non_blocking=True))
            chosen = chosen.to(wide_dtype(chosen))
            shown = chosen > NEVER_A_SCORE
            kept = None if padding is None else ~padding[:, None, positions.to(padding.device, non_blocking=True), None]
            return chosen, shown if kept is None else shown & kept

        highest = by_key.amax((0, 2)).double()
        call.stats = Rows(batch, heads, length, keys, known.is_uneven, rows_at).measure(rows, lambda: highest)
        call.batch, call.query_len, call.key_len, call.padding = batch, length, keys, padding
        call.dtype, call.scales = self.left.dtype, _scales(known, call, scores, query, key)
        every = rows is None or rows_are_shared()
        call.query_norm = _norm(query, planned.factors[0], padding, every)
        call.key_norm = _norm(key, planned.factors[1], hidden, every)
        return call

    def some(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys spread over their positions, and the last queries."""
        query, key = self.layout.operands(self.left, self.right)
        spread = (each[:, :, _spread(each, NORMED_ROWS)] for each in (query, key))
        return (*spread, query[:, :, -TAIL:])  # type: ignore[return-value]


def _scales(known: WrittenPlan, call: SeenCall, scores: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """What the operations say, or the slope of scores on q·k where that is another: a constant was changed."""
    assert call.factors is not None
    factors = np.abs(call.factors[0]) * np.abs(call.factors[1])
    stated = constant_on(scores.device, known.multiplier * factors)
    probe = _spread(scores, PROBED_ROWS)
    of_product = _wide(query[0, :, probe]) @ _wide(key[0]).mT
    of_product = of_product * constant_on(of_product.device, known.multiplier).to(of_product.dtype)[:, None, None]
    found = _wide(scores[0, :, probe])
    shown = found > NEVER_A_SCORE
    if call.softcap is not None:
        found = call.softcap * torch.atanh((found / call.softcap).clamp(-1, 1))
        shown = shown & torch.isfinite(found)
        found = found.masked_fill(~shown, 0.0)
    slope, _ = fit(of_product, found, shown)
    return torch.where((slope - 1).abs() > (DISAGREEMENT if known.is_constant else 0.0), stated * slope, stated)


def _norm(vectors: Tensor, factor: Factors, left_out: Tensor | None, every: bool) -> Tensor:
    at = _spread(vectors, vectors.shape[-2] if every else NORMED_ROWS)
    norm = mean_lengths(_wide(vectors[:, :, at]), None if left_out is None else left_out[:, at])
    return norm / constant_on(norm.device, np.abs(factor))


def _spread(vectors: Tensor, most: int) -> Tensor:
    """Positions spread over the queries, or keys, on their device."""
    return constant_on(vectors.device, spread_positions(vectors.shape[-2], most).numpy())


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(wide_dtype(tensor))
