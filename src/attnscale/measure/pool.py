"""The rows of each head -> the sums that statistics are read from."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from attnscale.measure.pooled import SUMS, Pooled
from attnscale.measure.row_sums import RowSums
from attnscale.measure.sampling import Sample
from attnscale.measure.stats import Merged, ScoreStats, merged_when_read
from attnscale.measure.uncertainty import Uncertainty, chance_of_participation, uncertainty_of_totals
from attnscale.theory.limits import SATURATED_TOP1


@dataclass(frozen=True, eq=False)
class Unpooled:
    """The rows of one call, each by itself: how they are pooled when a statistic is first read, if not before."""

    found: Callable[[], RowSums]
    bound: Callable[[], Tensor | None] = lambda: None
    sample: Sample | None = None
    sinks: Tensor | None = None  # learned logits, (heads,), that join the denominator of each row

    def __call__(self) -> Pooled:
        """Pool them, with the uncertainty of what was not looked at."""
        rows = self.found() if self.sinks is None else self.found().with_sinks(self.sinks)
        return pool_rows(rows, self.bound(), self.sample)


def with_sinks(stats: ScoreStats, sinks: Tensor | None) -> ScoreStats:
    """Let a learned logit of each head, (heads,), join the denominator of every row that one call measured."""
    if sinks is None:
        return stats
    if isinstance(stats.pool, Merged):
        return merged_when_read([with_sinks(part, sinks) for part in stats.pool.parts])
    assert isinstance(stats.pool, Unpooled), "rows that are pooled already have lost what a sink changes"
    return replace(stats, pool=replace(stats.pool, sinks=sinks.detach().double().clone()))


def pool_rows(
    rows: RowSums, bound: Tensor | None = None, sample: Sample | None = None, *, errors: bool = True
) -> Pooled:
    """Pool the rows of each head over batch and position; of sampled rows, estimate what all of them would give.

    Without `errors`, the rows are not kept, from which standard errors are told.
    """
    seen = rows.visible > 0
    weight = None if sample is None else sample.weights.to(rows.max.device, non_blocking=True)
    mean = _mean(rows, weight)
    sums = [
        (quantity if weight is None else quantity * weight).sum((0, 2), dtype=torch.float64)
        for quantity in _quantities(rows, seen, mean)
    ]
    pooled = torch.stack(sums, dim=-1)
    pooled[:, SUMS.index("deviations")] = 0.0  # by construction; what is left is rounding
    highest, above = _highest(rows.max, seen), _highest(rows.max.double() - rows.mean.double(), seen)
    return Pooled(
        rows=seen.sum((0, 2)),
        count=rows.visible.sum((0, 2)),
        mean=mean,
        max=highest,
        max_bound=highest if bound is None else torch.maximum(bound.double(), highest),
        max_above_mean=above,
        sums=pooled,
        errors=None if sample is None or not errors else partial(uncertainty_of, rows, sample, mean),
    )


def uncertainty_of(rows: RowSums, sample: Sample, mean: Tensor) -> Uncertainty:
    """Return the uncertainty of the sums of sampled rows about this mean: most of the work where rows are few."""
    kept = [sample.by_stratum(quantity) for quantity in _quantities(rows, rows.visible > 0, mean)]
    least = sample.by_stratum(chance_of_participation(rows, sample.length))
    features = torch.stack(kept, dim=-1)
    return uncertainty_of_totals(sample.of_all_entries(), features, least, SUMS.index("jacobian_trace"))


def _mean(rows: RowSums, weight: Tensor | None) -> Tensor:
    scores = rows.visible.double() if weight is None else rows.visible * weight
    totals = (torch.where(rows.visible > 0, rows.mean.double(), 0.0) * scores).sum((0, 2))
    return totals / scores.sum((0, 2)).clamp(min=1)


def _highest(values: Tensor, seen: Tensor) -> Tensor:
    """Return the largest of each head over its rows, (batch, heads, rows); −∞ where it has none."""
    if not seen.numel():
        return torch.full(seen.shape[1:2], -math.inf, dtype=torch.float64, device=seen.device)
    return torch.where(seen, values, -math.inf).amax((0, 2)).double()


def _quantities(rows: RowSums, seen: Tensor, mean: Tensor) -> Iterator[Tensor]:
    """Yield what is summed over rows, in the order of SUMS, one at a time: (batch, heads, rows) in float64."""
    nothing = torch.zeros((), dtype=torch.float64, device=rows.max.device)
    yield rows.visible.double()
    away = torch.where(seen, rows.mean.double() - mean[:, None], nothing)
    yield rows.visible * away
    within = torch.where(seen, rows.deviation.double(), nothing)
    yield within + rows.visible * away**2
    del away
    yield within
    del within
    yield seen.double()
    entropy = torch.where(seen, rows.entropy, nothing)
    yield entropy
    several = seen & (rows.outcomes > 1)
    yield several.double()
    yield torch.where(several, entropy / rows.outcomes.clamp(min=2).double().log(), nothing)
    del entropy
    top1 = torch.where(seen, rows.top1, nothing)
    yield top1
    yield (top1 > SATURATED_TOP1).double()
    del top1
    participation = torch.where(seen, rows.participation.double(), 1.0)
    yield (1.0 - participation).clamp(min=0.0)
    yield torch.where(seen, 1.0 / participation, nothing)
    yield torch.where(seen, rows.sink, nothing)
    yield torch.where(seen, nothing if rows.learned_sink is None else rows.learned_sink.double(), nothing)
