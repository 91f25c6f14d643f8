"""Scores that lie there as a tensor -> the sums of each row."""

import math

import torch
from torch import Tensor

from attnscale.measure.rows import RowSums


def rows_of(scores: Tensor, visible: Tensor) -> RowSums:
    """The sums of rows whose scores are given, (batch, heads, rows, keys), in float32 at least."""
    count = visible.sum(-1)
    shown = scores.masked_fill(~visible, -math.inf)
    highest = shown.amax(-1) if scores.shape[-1] else scores.new_full(count.shape, -math.inf)
    below = (scores - highest.unsqueeze(-1)).masked_fill(~visible, 0.0)
    # moments about the maximum, which is never far: a large mean does not swallow the variance
    several = count.clamp(min=1).to(below.dtype)
    mean = below.sum(-1) / several
    deviation = torch.where(visible, below - mean.unsqueeze(-1), 0.0).square_().sum(-1)
    weights = torch.exp(below).masked_fill_(~visible, 0.0)
    total = weights.sum(-1)
    return RowSums(
        visible=count,
        max=highest,
        total=total,
        gap=(below * weights).sum(-1).neg_() / total,
        participation=weights.square_().sum(-1) / total.square(),
        mean=mean + highest,
        deviation=deviation,
    )
