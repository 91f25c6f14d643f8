"""Sums over the rows of each head. Every statistic is computed from them, and sums of disjoint rows merge.

If rows were sampled, the sums are estimates for all rows, and their uncertainties merge too. Scores enter as deviations
from the mean μ of the head. A merge changes that mean (Chan et al. 1979): if it becomes lower by δ, then n, Σ(s − μ)
and Σ(s − μ)² of a row become n, Σ(s − μ) + nδ and Σ(s − μ)² + 2δΣ(s − μ) + nδ².
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from operator import add

import torch
from torch import Tensor

from attnscale.measure.row_sums import RowSums
from attnscale.measure.sampling import Sample
from attnscale.measure.uncertainty import (
    Uncertainty,
    chance_of_participation,
    uncertainty_of_totals,
)
from attnscale.theory.limits import SATURATED_TOP1
from attnscale.torch_internals import in_transform

# Quantities summed over rows. A merge shifts the first three; `within` is relative to the mean of each row.
SUMS = (
    "scores", "deviations", "squares", "within",
    "rows", "entropy", "rows_of_several", "entropy_ratio", "top1", "saturated", "jacobian_trace", "effective_keys",
    "sink", "learned_sink",
)  # fmt: skip
NUMBERS = ("rows", "count", "mean", "max", "max_bound", "max_above_mean")
FINISHED = (  # quotients of sums, and roots of quotients
    "variance", "std", "variance_within_rows", "std_within_rows",
    "entropy", "entropy_ratio", "top1", "saturated", "jacobian_trace", "effective_keys", "sink", "learned_sink",
)  # fmt: skip
DENOMINATOR = {"mean": "scores", "variance": "scores", "variance_within_rows": "scores", "entropy": "rows"} | {
    "entropy_ratio": "rows_of_several",
    **dict.fromkeys(("top1", "saturated", "jacobian_trace", "effective_keys", "sink"), "rows"),
}
NUMERATOR = {"mean": "deviations", "variance": "squares", "variance_within_rows": "within"}
ROOT_OF = {"std": "variance", "std_within_rows": "variance_within_rows"}
TABLE = len(NUMBERS) + len(SUMS) + len(FINISHED) + 2


@dataclass(frozen=True)
class Pooled:
    """Sums over the rows of every head, from which ScoreStats computes its statistics."""

    rows: Tensor  # number of measured rows with at least one visible key
    count: Tensor  # number of measured scores
    mean: Tensor  # mean score
    max: Tensor
    max_bound: Tensor
    max_above_mean: Tensor  # largest score above the mean of its row
    sums: Tensor  # (heads, len(SUMS)), float64
    errors: Uncertainty | Callable[[], Uncertainty] | None = None  # uncertainty of the sums; None if exact
    quotients: Mapping[str, Tensor] | None = None  # `finished`, if a kernel has computed it

    @cached_property
    def uncertainty(self) -> Uncertainty | None:
        """Uncertainty of the sums, computed when first read."""
        return self.errors() if callable(self.errors) else self.errors

    @property
    def finished(self) -> Mapping[str, Tensor]:
        """Statistics of each head: the mean and FINISHED; NaN for a head without rows."""
        return self._divided if self.quotients is None else self.quotients

    @cached_property
    def _divided(self) -> Mapping[str, Tensor]:
        sums = dict(zip(SUMS, self.sums.unbind(-1), strict=True))
        above = torch.stack([sums[NUMERATOR.get(name, name)] for name in DENOMINATOR])
        below = torch.stack([sums[name] for name in DENOMINATOR.values()])
        found = dict(zip(DENOMINATOR, above / torch.where(below > 0, below, torch.nan), strict=True))
        found |= {root: found[square].sqrt() for root, square in ROOT_OF.items()}
        found["mean"] = torch.where(sums["scores"] > 0, self.mean, torch.nan)
        found["learned_sink"] = torch.where(sums["learned_sink"] > 0, sums["learned_sink"] / sums["rows"], torch.nan)
        return found


@dataclass(frozen=True, eq=False)  # a hash of its fields fails in a graph of torch 2.11
class Table:
    """Table of the heads, float64 (heads, TABLE): NUMBERS, SUMS, FINISHED, and rows and count as int64."""

    columns: Tensor
    errors: Callable[[], Uncertainty] | None = None

    def __call__(self) -> Pooled:
        """Return views of the table: they launch no kernel, and show the values that a replayed CUDA graph wrote."""
        numbers, sums, shown = self.columns.split([len(NUMBERS), len(SUMS), len(FINISHED) + 2], dim=-1)
        looked_rows, looked_scores, mean, largest, bound, above = numbers.unbind(-1)
        *columns, rows, count = shown.unbind(-1)
        if not torch.compiler.is_compiling() and in_transform():  # torch.func has no such view in torch 2.11
            rows, count = looked_rows.long(), looked_scores.long()
        else:
            rows, count = rows.view(torch.int64), count.view(torch.int64)
        finished = dict(zip(FINISHED, columns, strict=True)) | {"mean": mean}
        return Pooled(rows, count, mean, largest, bound, above, sums, self.errors, finished)


def pack(pooled: Pooled, *, errors: bool = True) -> Tensor:
    """Return the columns of a Table and, in further columns, the uncertainty of each head's sums."""
    numbers = torch.stack([getattr(pooled, name).double() for name in NUMBERS], dim=-1)
    finished = torch.stack([pooled.finished[name] for name in FINISHED], dim=-1)
    whole = torch.stack([pooled.rows, pooled.count], dim=-1).long().view(torch.float64)
    uncertainty = (pooled.uncertainty or Uncertainty.none(pooled.sums)).packed() if errors else finished[:, :0]
    return torch.cat([numbers, pooled.sums, finished, whole, uncertainty], dim=-1)


def unpack(packed: Tensor) -> Table:
    """Reverse pack()."""
    columns, errors = packed[:, :TABLE], packed[:, TABLE:]
    return Table(columns, partial(Uncertainty.unpacked, errors, len(SUMS)) if errors.shape[1] else None)


def pool_rows(rows: RowSums, bound: Tensor | None = None, sample: Sample | None = None) -> Pooled:
    """Pool the rows of each head over batch and position; from sampled rows, estimate the sums over all rows."""
    seen = rows.visible > 0
    weight = None if sample is None else sample.weights.to(rows.max.device, non_blocking=True)
    mean = _mean(rows, weight)
    sums = [
        (quantity if weight is None else quantity * weight).sum((0, 2), dtype=torch.float64)
        for quantity in _quantities(rows, seen, mean)
    ]
    pooled = torch.stack(sums, dim=-1)
    pooled[:, SUMS.index("deviations")] = 0.0  # zero by construction, except for rounding
    highest, above = _highest(rows.max, seen), _highest(rows.max.double() - rows.mean.double(), seen)
    return Pooled(
        rows=seen.sum((0, 2)),
        count=rows.visible.sum((0, 2)),
        mean=mean,
        max=highest,
        max_bound=highest if bound is None else torch.maximum(bound.double(), highest),
        max_above_mean=above,
        sums=pooled,
        errors=None if sample is None else partial(uncertainty_of, rows, sample, mean),
    )


def uncertainty_of(rows: RowSums, sample: Sample, mean: Tensor) -> Uncertainty:
    """Return the uncertainty of the sums of sampled rows, with deviations from this mean."""
    kept = [sample.by_stratum(quantity) for quantity in _quantities(rows, rows.visible > 0, mean)]
    least = sample.by_stratum(chance_of_participation(rows, sample.length))
    features = torch.stack(kept, dim=-1)
    return uncertainty_of_totals(sample.of_all_entries(), features, least, SUMS.index("jacobian_trace"))


def _mean(rows: RowSums, weight: Tensor | None) -> Tensor:
    scores = rows.visible.double() if weight is None else rows.visible * weight
    totals = (torch.where(rows.visible > 0, rows.mean.double(), 0.0) * scores).sum((0, 2))
    return totals / scores.sum((0, 2)).clamp(min=1)


def _highest(values: Tensor, seen: Tensor) -> Tensor:
    """Return the largest value of each head over its rows, (batch, heads, rows); −∞ for a head without rows."""
    if not seen.numel():
        return torch.full(seen.shape[1:2], -math.inf, dtype=torch.float64, device=seen.device)
    return torch.where(seen, values, -math.inf).amax((0, 2)).double()


def _quantities(rows: RowSums, seen: Tensor, mean: Tensor) -> Iterator[Tensor]:
    """Yield the quantities of SUMS in order, float64 (batch, heads, rows)."""
    nothing = torch.zeros((), dtype=torch.float64, device=rows.max.device)
    yield rows.visible.double()
    away = torch.where(seen, rows.mean.double() - mean[:, None], nothing)
    yield rows.visible * away
    within = torch.where(seen, rows.deviation.double(), nothing)
    yield within + rows.visible * away**2
    yield within
    yield seen.double()
    entropy = torch.where(seen, rows.entropy, nothing)
    yield entropy
    several = seen & (rows.outcomes > 1)
    yield several.double()
    yield torch.where(several, entropy / rows.outcomes.clamp(min=2).double().log(), nothing)
    top1 = torch.where(seen, rows.top1, nothing)
    yield top1
    yield (top1 > SATURATED_TOP1).double()
    participation = torch.where(seen, rows.participation.double(), 1.0)
    yield (1.0 - participation).clamp(min=0.0)
    yield torch.where(seen, 1.0 / participation, nothing)
    yield torch.where(seen, rows.sink, nothing)
    yield torch.where(seen, nothing if rows.learned_sink is None else rows.learned_sink.double(), nothing)


def merged(parts: list[Pooled]) -> Pooled:
    """Merge the rows of all parts; their order changes the result only by float64 rounding."""
    scores = [part.sums[:, SUMS.index("scores")] for part in parts]
    total = torch.stack(scores).sum(0)
    weighted = [own * part.mean for own, part in zip(scores, parts, strict=True)]
    mean = torch.stack(weighted).sum(0) / torch.where(total > 0, total, 1.0)
    pooled = torch.stack([_shift_mean(part.sums, part.mean - mean) for part in parts]).sum(0)
    pooled[:, SUMS.index("deviations")] = 0.0
    uncertain = [(part.mean - mean, part.uncertainty) for part in parts]
    errors = [uncertainty.moved(_shift_matrix(delta)) for delta, uncertainty in uncertain if uncertainty is not None]
    return Pooled(
        rows=torch.stack([part.rows for part in parts]).sum(0),
        count=torch.stack([part.count for part in parts]).sum(0),
        mean=mean,
        max=torch.stack([part.max for part in parts]).amax(0),
        max_bound=torch.stack([part.max_bound for part in parts]).amax(0),
        max_above_mean=torch.stack([part.max_above_mean for part in parts]).amax(0),
        sums=pooled,
        errors=reduce(add, errors) if errors else None,
    )


def _shift_mean(sums: Tensor, delta: Tensor) -> Tensor:
    """Convert sums of deviations from a mean to deviations from a mean lower by delta."""
    scores, deviations, squares = sums[:, :3].unbind(-1)
    about = scores, deviations + delta * scores, squares + 2 * delta * deviations + delta**2 * scores
    return torch.cat([torch.stack(about, dim=-1), sums[:, 3:]], dim=-1)


def _shift_matrix(delta: Tensor) -> Tensor:
    """Return _shift_mean() as a matrix, (heads, sums, sums)."""
    matrix = torch.eye(len(SUMS), dtype=delta.dtype, device=delta.device).repeat(delta.shape[0], 1, 1)
    matrix[:, 1, 0] = delta
    matrix[:, 2, 0] = delta**2
    matrix[:, 2, 1] = 2 * delta
    return matrix
