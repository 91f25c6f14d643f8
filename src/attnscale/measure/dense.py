"""Scores that lie there as a tensor -> the sums of each row."""

import torch
from torch import Tensor

from attnscale.measure.row_blocks import BITS, HIDDEN, finished, past_float32, reduce_rows
from attnscale.measure.row_sums import RowSums


def rows_of(scores: Tensor, visible: Tensor | None) -> RowSums:
    """The sums of rows whose scores are given, (batch, heads, rows, keys), in float32 at least; None: all visible."""
    *shape, keys = scores.shape
    if visible is None:
        count = torch.full(shape, keys, device=scores.device)
    else:
        count, scores = visible.sum(-1), scores.clamp(min=-HIDDEN)  # −∞ times zero is NaN
    sums = _sums(scores, visible)
    return finished(_sums(scores.double(), visible) if past_float32(sums) else sums, count)


def _sums(scores: Tensor, visible: Tensor | None) -> Tensor:
    *shape, keys = scores.shape
    sums = scores.new_zeros(6, *shape)
    if keys:
        both = scores.new_empty(2, *scores.shape)
        torch.mul(scores, BITS, out=both[1])
        reduce_rows(both, None if visible is None else visible.to(scores.dtype), sums)
    return sums
