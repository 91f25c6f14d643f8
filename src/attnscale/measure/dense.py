"""Scores that lie there as a tensor -> the sums of each row."""

import math

import torch
from torch import Tensor

from attnscale.measure.cpu.room import room_for
from attnscale.measure.row_blocks import BITS, HIDDEN, SUMS, finished, past_float32, reduce_rows
from attnscale.measure.row_sums import RowSums


def rows_of(scores: Tensor, visible: Tensor | None) -> RowSums:
    """Return the sums of rows of scores, (batch, heads, rows, keys), in float32 at least; visible None: all."""
    *shape, keys = scores.shape
    if visible is None:
        count = torch.full((1,), keys, device=scores.device).expand(shape)
    else:
        count, scores = visible.sum(-1), scores.clamp(min=-HIDDEN)  # −∞ times zero is NaN
    sums = _sums(scores, visible)
    sums = _sums(scores.double(), visible) if past_float32(sums) else sums
    return finished(sums, count)


def _sums(scores: Tensor, visible: Tensor | None) -> Tensor:
    *shape, keys = scores.shape
    sums = scores.new_zeros(SUMS, *shape)
    if keys:
        both = room_for(2 * math.prod(scores.shape), scores).view(2, *scores.shape)
        torch.mul(scores, BITS, out=both[1])
        reduce_rows(both, None if visible is None else visible.to(scores.dtype), sums)
    return sums
