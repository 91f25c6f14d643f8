"""Scores that lie there as a tensor -> the sums of each row."""

import math
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from attnscale.measure.cpu.room import room_for
from attnscale.measure.row_blocks import BITS, HIDDEN, finished, past_float32, reduce_rows
from attnscale.measure.row_sums import RowSums


def rows_of(scores: Tensor, visible: Tensor | None) -> RowSums:
    """The sums of rows whose scores are given, (batch, heads, rows, keys), in float32 at least; None: all visible."""
    return look_at_scores(scores, visible)()


def look_at_scores(scores: Tensor, visible: Tensor | None) -> Callable[[], RowSums]:
    """The same, but for what is left to do when all scores were seen: it is done when it is first asked for."""
    *shape, keys = scores.shape
    if visible is None:
        count = torch.full((1,), keys, device=scores.device).expand(shape)
    else:
        count, scores = visible.sum(-1), scores.clamp(min=-HIDDEN)  # −∞ times zero is NaN
    sums = _sums(scores, visible)
    sums = _sums(scores.double(), visible) if past_float32(sums) else sums
    return cache(partial(finished, sums, count))


def _sums(scores: Tensor, visible: Tensor | None) -> Tensor:
    *shape, keys = scores.shape
    sums = scores.new_zeros(6, *shape)
    if keys:
        both = room_for(2 * math.prod(scores.shape), scores).view(2, *scores.shape)
        torch.mul(scores, BITS, out=both[1])
        reduce_rows(both, None if visible is None else visible.to(scores.dtype), sums)
    return sums
