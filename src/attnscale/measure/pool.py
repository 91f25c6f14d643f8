"""The rows of each head -> the sums that statistics are read from."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attnscale.measure.chance import chance_of_participation
from attnscale.measure.moments import ScoreMoments
from attnscale.measure.rows import RowSums
from attnscale.measure.sampling import Sample
from attnscale.measure.stats import SUMS, Pooled
from attnscale.measure.uncertainty import Uncertainty
from attnscale.theory.limits import SATURATED_TOP1


def pool_rows(rows: RowSums, bound: Tensor | None = None, sample: Sample | None = None) -> Pooled:
    """Pool the rows of each head over batch and position; of sampled rows, estimate what all of them would give."""
    seen = rows.visible > 0
    weight = None if sample is None else sample.weights.to(rows.max.device)
    mean = _mean(rows, weight)
    sums, kept = [], []
    for quantity in _quantities(rows, seen, mean):
        sums.append((quantity if weight is None else quantity * weight).sum((0, 2), dtype=torch.float64))
        if sample is not None:
            kept.append(quantity.sum(0))
    pooled = torch.stack(sums, dim=-1)
    pooled[:, SUMS.index("deviations")] = 0.0  # by construction; what is left is rounding
    highest = torch.where(seen, rows.max, -math.inf).amax((0, 2)).double() if seen.numel() else mean - math.inf
    return Pooled(
        rows=seen.sum((0, 2)),
        count=rows.visible.sum((0, 2)),
        mean=mean,
        max=highest,
        max_bound=highest if bound is None else torch.maximum(bound.double(), highest),
        sums=pooled,
        uncertainty=None if sample is None else _uncertainty(rows, sample, torch.stack(kept, dim=-1)),
    )


def _uncertainty(rows: RowSums, sample: Sample, features: Tensor) -> Uncertainty:
    least = torch.zeros_like(features)
    least[..., SUMS.index("gradient_gain")] = chance_of_participation(rows, sample.length).sum(0)
    return sample.uncertainty_of_totals(features, least)


def _mean(rows: RowSums, weight: Tensor | None) -> Tensor:
    scores = rows.visible.double() if weight is None else rows.visible * weight
    totals = (torch.where(rows.visible > 0, rows.mean.double(), 0.0) * scores).sum((0, 2))
    return totals / scores.sum((0, 2)).clamp(min=1)


def _quantities(rows: RowSums, seen: Tensor, mean: Tensor) -> Iterator[Tensor]:
    """What is summed over rows, in the order of SUMS, one at a time: (batch, heads, rows) in float64."""
    nothing = torch.zeros((), dtype=torch.float64, device=rows.max.device)
    yield rows.visible.double()
    away = torch.where(seen, rows.mean.double() - mean[:, None], nothing)
    yield rows.visible * away
    yield torch.where(seen, rows.deviation.double(), nothing) + rows.visible * away**2
    del away
    yield seen.double()
    entropy = torch.where(seen, rows.entropy, nothing)
    yield entropy
    several = rows.visible > 1
    yield several.double()
    yield torch.where(several, entropy / rows.visible.clamp(min=2).double().log(), nothing)
    del entropy
    top1 = torch.where(seen, rows.top1, nothing)
    yield top1
    yield (top1 > SATURATED_TOP1).double()
    del top1
    participation = torch.where(seen, rows.participation.double(), 1.0)
    yield (1.0 - participation).clamp(min=0.0)
    yield torch.where(seen, 1.0 / participation, nothing)


def with_moments(pooled: Pooled, moments: ScoreMoments) -> Pooled:
    """The same rows with the moments of their scores, which the pass over them did not take."""
    sums = pooled.sums.clone()
    sums[:, SUMS.index("squares")] = moments.variance * moments.count
    return replace(pooled, count=moments.count, mean=moments.mean, sums=sums)
