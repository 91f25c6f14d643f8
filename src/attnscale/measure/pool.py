"""The rows of each head -> the sums that statistics are read from."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from attnscale.measure.chance import chance_of_participation
from attnscale.measure.moments import ScoreMoments
from attnscale.measure.row_sums import RowSums
from attnscale.measure.sampling import Sample
from attnscale.measure.stats import SUMS, Merged, Pooled, ScoreStats, merged
from attnscale.measure.uncertainty import Uncertainty
from attnscale.theory.limits import SATURATED_TOP1

ROW_FIELDS = tuple(RowSums.__dataclass_fields__)
POOLED_FIELDS = tuple(name for name in Pooled.__dataclass_fields__ if name != "uncertainty")


class Source(Protocol):
    """Where the rows of a call come from, and those of calls alike: read at once, in as many operations as one."""

    @property
    def kind(self) -> tuple[object, ...]:
        """What calls that can be read at once have in common."""

    def together(self, others: Sequence[Any]) -> "Source":
        """This call and others of its kind, as if their heads were those of one."""

    def rows(self) -> RowSums:
        """What was found."""

    def bound(self) -> Tensor:
        """An upper bound of the largest score of each head."""


@dataclass(frozen=True, eq=False)
class Unpooled:
    """The rows of one call, each by itself: how they are pooled when a statistic is first read."""

    found: Callable[[], RowSums]
    bound: Callable[[], Tensor | None] = lambda: None
    sample: Sample | None = None
    in_shards: bool = False  # what was found is over shards of the keys
    source: Source | None = None  # of both, where alike ones can be read at once

    def rows(self) -> RowSums:
        """(batch, heads, rows), over all keys of the call."""
        return self.found().over_shards() if self.in_shards else self.found()

    def __call__(self) -> Pooled:
        """Pool them, with the uncertainty of what was not looked at."""
        return pool_rows(self.rows(), self.bound(), self.sample)


def pooled_together(many: Sequence[ScoreStats]) -> list[Pooled]:
    """The sums of several statistics, without what standard errors are told from; alike ones are pooled at once.

    A model's layers mostly are alike: pooling all of them takes as many operations as pooling one.
    """
    apart = [stats.pool.parts if isinstance(stats.pool, Merged) else (stats,) for stats in many]
    single = iter(_pooled_together([part for parts in apart for part in parts]))
    pooled = [[next(single) for _ in parts] for parts in apart]
    return [parts[0] if len(parts) == 1 else merged(parts) for parts in pooled]


def _pooled_together(many: Sequence[ScoreStats]) -> list[Pooled]:
    found: dict[int, Pooled] = {}
    alike: dict[tuple[object, ...], list[tuple[int, Unpooled]]] = {}
    for index, stats in enumerate(many):
        if isinstance(stats.pool, Unpooled):
            alike.setdefault(_kind(stats.pool), []).append((index, stats.pool))
        else:
            found[index] = stats.pooled
    for group in alike.values():
        rows, bound = _joined([unpooled for _, unpooled in group])
        first, heads = group[0][1], [many[index].heads for index, _ in group]
        pooled = pool_rows(rows.over_shards() if first.in_shards else rows, bound, first.sample, errors=False)
        parts = {name: getattr(pooled, name).split(heads) for name in POOLED_FIELDS}
        for at, (index, _) in enumerate(group):
            found[index] = Pooled(**{name: each[at] for name, each in parts.items()}, uncertainty=None)
    return [found[index] for index in range(len(many))]


def _kind(unpooled: Unpooled) -> tuple[object, ...]:
    if unpooled.source is not None:
        return unpooled.source.kind
    rows, sample = unpooled.found(), unpooled.sample
    design = None if sample is None else (id(sample.stratum), id(sample.sizes))  # which a design makes once
    return rows.max.device, rows.max.dtype, rows.max.shape[:-2], rows.max.shape[-1], design


def _joined(many: Sequence[Unpooled]) -> tuple[RowSums, Tensor | None]:
    """The rows and bounds of calls of one kind, the heads of all side by side."""
    source, *others = [unpooled.source for unpooled in many]
    if source is not None:
        whole = source.together(others)
        return whole.rows(), whole.bound()
    found = [unpooled.found() for unpooled in many]
    bounds = [unpooled.bound() for unpooled in many]
    known = [bound for bound in bounds if bound is not None]
    rows = RowSums(**{name: torch.cat([getattr(each, name) for each in found], -2) for name in ROW_FIELDS})
    return rows, torch.cat(known) if len(known) == len(bounds) else None


def pool_rows(
    rows: RowSums, bound: Tensor | None = None, sample: Sample | None = None, *, errors: bool = True
) -> Pooled:
    """Pool the rows of each head over batch and position; of sampled rows, estimate what all of them would give.

    Without `errors`, what standard errors are told from is left out: most of the work where rows are few.
    """
    seen = rows.visible > 0
    weight = None if sample is None else sample.weights.to(rows.max.device, non_blocking=True)
    mean = _mean(rows, weight)
    sums, kept = [], []
    for quantity in _quantities(rows, seen, mean):
        sums.append((quantity if weight is None else quantity * weight).sum((0, 2), dtype=torch.float64))
        if sample is not None and errors:
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
        uncertainty=None if sample is None or not errors else _uncertainty(rows, sample, torch.stack(kept, dim=-1)),
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
