"""Scores that lie there as a tensor -> the sums of each row."""

import torch
from torch import Tensor

from attnscale.measure.row_blocks import HIDDEN, finished, reduce_rows
from attnscale.measure.row_sums import RowSums


def rows_of(scores: Tensor, visible: Tensor | None) -> RowSums:
    """The sums of rows whose scores are given, (batch, heads, rows, keys), in float32 at least; None: all visible."""
    *shape, keys = scores.shape
    if visible is None:
        count = torch.full(shape, keys, device=scores.device)
    else:
        count, scores = visible.sum(-1), scores.clamp(min=-HIDDEN)  # −∞ times zero is NaN
    sums = scores.new_zeros(6, *shape)
    if keys:
        both = scores.new_empty(2, *scores.shape)
        both[1] = scores
        reduce_rows(both, None if visible is None else visible.to(scores.dtype), sums)
    return finished(sums, count)
