"""The rows of each head -> the sums that statistics are read from."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnscale.measure.pooled import SUMS, Pooled, Table, merged
from attnscale.measure.row_sums import ROW_FIELDS, RowSums
from attnscale.measure.sampling import Sample
from attnscale.measure.stats import Merged, ScoreStats, merged_when_read
from attnscale.measure.uncertainty import Uncertainty, chance_of_participation, uncertainty_of_totals
from attnscale.theory.limits import SATURATED_TOP1

POOLED_FIELDS = tuple(name for name in Pooled.__dataclass_fields__ if name not in ("errors", "finished"))


@dataclass(frozen=True, eq=False)
class Unpooled:
    """The rows of one call, each by itself: how they are pooled when a statistic is first read, if not before."""

    found: Callable[[], RowSums]
    bound: Callable[[], Tensor | None] = lambda: None
    sample: Sample | None = None
    in_shards: bool = False  # what was found is over shards of the keys
    known: Table | None = None  # where a kernel has pooled them
    sinks: Tensor | None = None  # learned logits, (heads,), that join the denominator of each row

    def rows(self) -> RowSums:
        """(batch, heads, rows), over all keys of the call."""
        return self.found().over_shards() if self.in_shards else self.found()

    def __call__(self) -> Pooled:
        """Pool them, with the uncertainty of what was not looked at."""
        if self.known is not None:
            return self.known()
        rows = self.rows() if self.sinks is None else self.rows().with_sinks(self.sinks)
        return pool_rows(rows, self.bound(), self.sample)


def with_sinks(stats: ScoreStats, sinks: Tensor | None) -> ScoreStats:
    """Let a learned logit of each head, (heads,), join the denominator of every row that one call measured."""
    if sinks is None:
        return stats
    if isinstance(stats.pool, Merged):
        return merged_when_read([with_sinks(part, sinks) for part in stats.pool.parts])
    assert isinstance(stats.pool, Unpooled), "rows that are pooled already have lost what a sink changes"
    return replace(stats, pool=replace(stats.pool, known=None, sinks=sinks.detach().double().clone()))


def pooled_together(many: Sequence[ScoreStats]) -> list[Pooled]:
    """The sums of several statistics, without what standard errors are told from; alike ones are pooled at once.

    A model's layers mostly are alike: pooling all of them takes as many operations as pooling one.
    """
    apart = [stats.pool.parts if isinstance(stats.pool, Merged) else (stats,) for stats in many]
    single = iter(_pooled_together([part for parts in apart for part in parts]))
    return _merged_together([[next(single) for _ in parts] for parts in apart])


def _merged_together(many: Sequence[Sequence[Pooled]]) -> list[Pooled]:
    """Each of these as one: those of as many parts at once, as micro-batches make them."""
    found = {index: parts[0] for index, parts in enumerate(many) if len(parts) == 1}
    alike: dict[tuple[int, torch.device], list[int]] = {}
    for index, parts in enumerate(many):
        if index not in found:
            alike.setdefault((len(parts), parts[0].mean.device), []).append(index)
    for (count, _), group in alike.items():
        together = merged([_side_by_side([many[index][part] for index in group]) for part in range(count)])
        found |= dict(zip(group, _apart(together, [len(many[index][0].mean) for index in group]), strict=True))
    return [found[index] for index in range(len(many))]


def _side_by_side(parts: Sequence[Pooled]) -> Pooled:
    """The heads of all, without their errors."""
    columns: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in POOLED_FIELDS}
    return Pooled(**columns)


def _apart(pooled: Pooled, heads: list[int]) -> list[Pooled]:
    """So many heads each, one behind the other, without their errors."""
    columns: dict[str, Any] = {name: getattr(pooled, name).split(heads) for name in POOLED_FIELDS}
    return [Pooled(**{name: parts[at] for name, parts in columns.items()}) for at in range(len(heads))]


def _pooled_together(many: Sequence[ScoreStats]) -> list[Pooled]:
    found: dict[int, Pooled] = {}
    alike: dict[tuple[object, ...], list[tuple[int, Unpooled]]] = {}
    for index, stats in enumerate(many):
        if isinstance(stats.pool, Unpooled) and stats.pool.known is None and stats.pool.sinks is None:
            alike.setdefault(_kind(stats.pool), []).append((index, stats.pool))
        else:
            found[index] = stats.pooled
    for group in alike.values():
        rows, bound = _joined([unpooled for _, unpooled in group])
        first, heads = group[0][1], [many[index].heads for index, _ in group]
        pooled = pool_rows(rows.over_shards() if first.in_shards else rows, bound, first.sample, errors=False)
        found |= dict(zip((index for index, _ in group), _apart(pooled, heads), strict=True))
    return [found[index] for index in range(len(many))]


def _kind(unpooled: Unpooled) -> tuple[object, ...]:
    rows, sample = unpooled.found(), unpooled.sample
    design = None if sample is None else (id(sample.stratum), id(sample.sizes))  # which a design makes once
    return rows.max.device, rows.max.dtype, rows.max.shape[:-2], rows.max.shape[-1], design


def _joined(many: Sequence[Unpooled]) -> tuple[RowSums, Tensor | None]:
    """The rows and bounds of calls of one kind, the heads of all side by side."""
    found = [unpooled.found() for unpooled in many]
    bounds = [unpooled.bound() for unpooled in many]
    known = [bound for bound in bounds if bound is not None]
    rows = RowSums(**{name: torch.cat([getattr(each, name) for each in found], -2) for name in ROW_FIELDS})
    return rows, torch.cat(known) if len(known) == len(bounds) else None


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
    """How far the sums of sampled rows about this mean may be off: most of the work where rows are few."""
    kept = [sample.by_stratum(quantity) for quantity in _quantities(rows, rows.visible > 0, mean)]
    least = sample.by_stratum(chance_of_participation(rows, sample.length))
    features = torch.stack(kept, dim=-1)
    return uncertainty_of_totals(sample.of_all_entries(), features, least, SUMS.index("jacobian_trace"))


def _mean(rows: RowSums, weight: Tensor | None) -> Tensor:
    scores = rows.visible.double() if weight is None else rows.visible * weight
    totals = (torch.where(rows.visible > 0, rows.mean.double(), 0.0) * scores).sum((0, 2))
    return totals / scores.sum((0, 2)).clamp(min=1)


def _highest(values: Tensor, seen: Tensor) -> Tensor:
    """The largest of each head over its rows, (batch, heads, rows); −∞ where it has none."""
    if not seen.numel():
        return torch.full(seen.shape[1:2], -math.inf, dtype=torch.float64, device=seen.device)
    return torch.where(seen, values, -math.inf).amax((0, 2)).double()


def _quantities(rows: RowSums, seen: Tensor, mean: Tensor) -> Iterator[Tensor]:
    """What is summed over rows, in the order of SUMS, one at a time: (batch, heads, rows) in float64."""
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
