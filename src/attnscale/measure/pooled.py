"""Pooled: the rows of every head in one, as they are kept, merged, packed for a collective, or written by a kernel.

Kept are sums over rows, estimated for all of them where only some were looked at, and the uncertainty of the
estimates; both add over disjoint rows. Scores enter as deviations from the head's mean, which a merge moves (Chan
et al. 1979): n, Σ(s − μ), Σ(s − μ)² of a row become, for a mean lower by δ, n, Σ(s − μ) + nδ and
Σ(s − μ)² + 2δΣ(s − μ) + nδ².
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from attnscale.measure.uncertainty import Uncertainty, packed_size
from attnscale.measure.uncertainty import merged as merged_uncertainty
from attnscale.torch_internals import in_transform

# What is summed over rows; the first three are moved by a merge, `within` is about each row's own mean.
SUMS = (
    "scores", "deviations", "squares", "within",
    "rows", "entropy", "rows_of_several", "entropy_ratio", "top1", "saturated", "jacobian_trace", "effective_keys",
    "sink", "learned_sink",
)  # fmt: skip
NUMBERS = ("rows", "count", "mean", "max", "max_bound", "max_above_mean")
FINISHED = (  # what is divided when it is shown, or by a kernel
    "variance", "std", "variance_within_rows", "std_within_rows",
    "entropy", "entropy_ratio", "top1", "saturated", "jacobian_trace", "effective_keys", "sink", "learned_sink",
)  # fmt: skip
TABLE = len(NUMBERS) + len(SUMS) + len(FINISHED) + 2


@dataclass(frozen=True)
class Pooled:
    """The rows of every head in one: what ScoreStats reads its statistics from."""

    rows: Tensor  # looked at, with at least one visible key
    count: Tensor  # scores looked at
    mean: Tensor  # of the scores
    max: Tensor
    max_bound: Tensor
    max_above_mean: Tensor  # of its row
    sums: Tensor  # (heads, len(SUMS)), float64
    errors: Uncertainty | Callable[[], Uncertainty] | None = None  # of the sums, or how to tell them; None where exact
    finished: Mapping[str, Tensor] = field(default_factory=dict)  # statistics that a kernel has divided already

    @property
    def uncertainty(self) -> Uncertainty | None:
        """Uncertainty of the sums, formed when it is asked for."""
        return self.errors() if callable(self.errors) else self.errors


@dataclass(frozen=True, eq=False)  # a hash of its fields fails in a graph of torch 2.11
class Table:
    """Heads that a kernel has pooled: NUMBERS, SUMS, FINISHED and, as int64, rows and count; float64 (heads, TABLE)."""

    columns: Tensor
    errors: Callable[[], Uncertainty] | None = None

    def __call__(self) -> Pooled:
        """Return views of it: reading launches nothing, and reads what a replayed graph has written."""
        return self._formed() if torch.compiler.is_compiling() else self._pooled  # a graph takes no lock

    @cached_property
    def _pooled(self) -> Pooled:
        return self._formed()

    def _formed(self) -> Pooled:
        numbers, sums, shown = self.columns.split([len(NUMBERS), len(SUMS), len(FINISHED) + 2], dim=-1)
        looked_rows, looked_scores, mean, largest, bound, above = numbers.unbind(-1)
        *columns, rows, count = shown.unbind(-1)
        if not torch.compiler.is_compiling() and in_transform():  # torch.vmap over torch 2.11 has no such view
            rows, count = looked_rows.long(), looked_scores.long()
        else:
            rows, count = rows.view(torch.int64), count.view(torch.int64)
        finished = dict(zip(FINISHED, columns, strict=True))
        return Pooled(rows, count, mean, largest, bound, above, sums, self.errors, finished | {"mean": mean})


@dataclass(frozen=True, eq=False)
class Known:
    """Rows that are pooled already."""

    pooled: Pooled

    def __call__(self) -> Pooled:
        """Return them."""
        return self.pooled


FINAL = (Known, Table)  # formed once by themselves


def merged(parts: list[Pooled]) -> Pooled:
    """Merge the rows of all parts, in whatever order, up to float64 rounding."""
    scores = [part.sums[:, SUMS.index("scores")] for part in parts]
    total = torch.stack(scores).sum(0)
    weighted = [own * part.mean for own, part in zip(scores, parts, strict=True)]
    mean = torch.stack(weighted).sum(0) / torch.where(total > 0, total, 1.0)
    pooled = torch.stack([_moved(part.sums, part.mean - mean) for part in parts]).sum(0)
    pooled[:, SUMS.index("deviations")] = 0.0
    known = [(_move(part.mean - mean), part.uncertainty) for part in parts if part.errors is not None]
    uncertainties = [uncertainty.moved(move) for move, uncertainty in known if uncertainty is not None]
    return Pooled(
        rows=torch.stack([part.rows for part in parts]).sum(0),
        count=torch.stack([part.count for part in parts]).sum(0),
        mean=mean,
        max=torch.stack([part.max for part in parts]).amax(0),
        max_bound=torch.stack([part.max_bound for part in parts]).amax(0),
        max_above_mean=torch.stack([part.max_above_mean for part in parts]).amax(0),
        sums=pooled,
        errors=merged_uncertainty(uncertainties),
    )


def _moved(sums: Tensor, delta: Tensor) -> Tensor:
    """Return sums about a mean as sums about a mean that is lower by delta."""
    scores, deviations, squares = sums[:, :3].unbind(-1)
    about = scores, deviations + delta * scores, squares + 2 * delta * deviations + delta**2 * scores
    return torch.cat([torch.stack(about, dim=-1), sums[:, 3:]], dim=-1)


def _move(delta: Tensor) -> Tensor:
    """Return the matrix that turns sums about a mean into sums about a mean lower by delta, (heads, sums, sums)."""
    matrix = torch.eye(len(SUMS), dtype=delta.dtype, device=delta.device).repeat(delta.shape[0], 1, 1)
    matrix[:, 1, 0] = delta
    matrix[:, 2, 0] = delta**2
    matrix[:, 2, 1] = 2 * delta
    return matrix


def pack(pooled: Pooled) -> Tensor:
    """Return everything of every head in one float64 row: numbers, sums, their uncertainty."""
    numbers = torch.stack([getattr(pooled, name).double() for name in NUMBERS], dim=-1)
    uncertainty = Uncertainty.none(pooled.sums) if pooled.errors is None else pooled.uncertainty
    assert uncertainty is not None
    return torch.cat([numbers, pooled.sums, uncertainty.packed()], dim=-1)


def unpack(packed: Tensor) -> Pooled:
    """Return what pack() was called on."""
    numbers, sums, rest = packed.split([len(NUMBERS), len(SUMS), packed_size(len(SUMS))], dim=-1)
    rows, count, mean, largest, bound, above = numbers.unbind(-1)
    return Pooled(
        rows=rows.to(torch.int64),
        count=count.to(torch.int64),
        mean=mean,
        max=largest,
        max_bound=bound,
        max_above_mean=above,
        sums=sums,
        errors=Uncertainty.unpacked(rest, len(SUMS)),
    )
