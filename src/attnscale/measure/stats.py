"""ScoreStats: what the scores of each head do to its softmax, kept so that shards merge into the whole.

Every statistic is a ratio of two sums over rows. Kept are those sums, estimated for all rows where only some were
looked at, and the covariance of the estimates; sums and covariances of disjoint rows add. Scores enter as deviations
from the head's mean, which a merge moves (Chan et al. 1979): n, Σ(s − μ), Σ(s − μ)² of a row become, for a mean lower
by δ, n, Σ(s − μ) + nδ, Σ(s − μ)² + 2δΣ(s − μ) + nδ².
"""

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attnscale.errors import SettingError, ShapeError

# What is summed over rows; the first three are moved by a merge.
SUMS = (
    "scores", "deviations", "squares",
    "rows", "entropy", "rows_of_several", "entropy_ratio", "top1", "saturated", "gradient_gain", "effective_keys",
)  # fmt: skip
PER_ROW = ("entropy", "top1", "saturated", "gradient_gain", "effective_keys")
DENOMINATOR = dict.fromkeys(PER_ROW, "rows") | {
    "entropy_ratio": "rows_of_several",
    "mean": "scores",
    "variance": "scores",
}
SHOWN = (
    "rows", "count", "mean", "variance", "std", "max", "max_bound",
    "entropy", "entropy_ratio", "top1", "saturated", "gradient_gain", "effective_keys",
)  # fmt: skip
NUMERATOR = {"mean": "deviations", "variance": "squares"}


@dataclass(frozen=True)
class ScoreStats:
    """Statistics of the visible scores, one value a query head; `a + b` merges disjoint rows, batches or ranks.

    `max` is the largest score seen. Where only some rows were looked at, the true maximum lies between `max` and
    `max_bound`, and `stderr(name)` is the standard error of a statistic.
    """

    rows: Tensor  # looked at, with at least one visible key
    count: Tensor  # scores looked at
    mean: Tensor
    max: Tensor
    max_bound: Tensor
    exact: bool
    method: str  # how the moments were found, and what stood in the way of linear time
    sums: Tensor = field(repr=False)  # (heads, len(SUMS)), float64
    covariance: Tensor | None = field(repr=False)  # (heads, len(SUMS), len(SUMS)) of the sums; None where exact

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.rows.shape[0]

    @property
    def variance(self) -> Tensor:
        """Variance of the scores."""
        return self._ratio("variance")

    @property
    def std(self) -> Tensor:
        """The spread: standard deviation of the scores."""
        return self.variance.sqrt()

    @property
    def entropy(self) -> Tensor:
        """Mean entropy of a row, nats."""
        return self._ratio("entropy")

    @property
    def entropy_ratio(self) -> Tensor:
        """Mean of H / ln n over the rows that see several keys."""
        return self._ratio("entropy_ratio")

    @property
    def top1(self) -> Tensor:
        """Mean of the largest weight of a row."""
        return self._ratio("top1")

    @property
    def saturated(self) -> Tensor:
        """Share of rows that give one key more than 0.99."""
        return self._ratio("saturated")

    @property
    def gradient_gain(self) -> Tensor:
        """Mean of 1 − Σp², the trace of a row's softmax Jacobian."""
        return self._ratio("gradient_gain")

    @property
    def effective_keys(self) -> Tensor:
        """Mean of 1/Σp², the number of keys a row attends to."""
        return self._ratio("effective_keys")

    def stderr(self, name: str) -> Tensor:
        """Standard error of a statistic from having looked at some rows only; zero where exact."""
        if name == "std":
            return self.stderr("variance") / (2 * self.std)
        if name not in DENOMINATOR:
            known = ", ".join(sorted([*DENOMINATOR, "std"]))
            bracket = " The maximum has a bracket instead: max and max_bound." if name.startswith("max") else ""
            raise SettingError(f"Expected one of {known} to have a standard error, got {name!r}.{bracket}")
        if self.covariance is None:
            return torch.zeros_like(self.mean)
        # delta method: the ratio a/b moves by (da − r db)/b; the mean is r = 0 by construction of the deviations
        below = self._sum(DENOMINATOR[name])
        ratio = torch.zeros_like(below) if name == "mean" else self._ratio(name)
        gradient = torch.zeros_like(self.sums)
        gradient[:, SUMS.index(NUMERATOR.get(name, name))] = 1.0
        gradient[:, SUMS.index(DENOMINATOR[name])] -= ratio
        gradient = gradient / below.unsqueeze(-1)
        variance = torch.einsum("hi,hij,hj->h", gradient, self.covariance, gradient)
        return variance.clamp(min=0.0).sqrt()

    def __add__(self, other: "ScoreStats") -> "ScoreStats":
        if self.heads != other.heads:
            raise ShapeError(f"Expected the same number of heads to merge, got {self.heads} and {other.heads}.")
        return merged([self, other])

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> "ScoreStats":
        """Merge the statistics of every rank of the group, each with rows of its own, in one collective."""
        world = dist.get_world_size(group)
        packed = _pack(self)
        gathered = packed.new_empty(world * packed.shape[0], *packed.shape[1:])
        dist.all_gather_into_tensor(gathered, packed, group=group)
        return merged([_unpack(part, self.method) for part in gathered.chunk(world)])

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, one list a statistic; None where a head has no rows to tell it from."""
        plain = {name: _plain(getattr(self, name)) for name in SHOWN}
        return {"heads": self.heads, "exact": self.exact, "method": self.method, **plain}

    def _sum(self, name: str) -> Tensor:
        return self.sums[:, SUMS.index(name)]

    def _ratio(self, name: str) -> Tensor:
        below = self._sum(DENOMINATOR[name])
        return self._sum(NUMERATOR.get(name, name)) / torch.where(below > 0, below, torch.nan)


def merged(parts: list[ScoreStats]) -> ScoreStats:
    """The statistics of all parts together; in whatever order, up to float64 rounding."""
    total = torch.stack([part._sum("scores") for part in parts]).sum(0)
    mean = torch.stack([part._sum("scores") * part.mean for part in parts]).sum(0) / total.clamp(min=1e-300)
    moves = [_move(part.mean - mean) for part in parts]
    covariances = [
        move @ part.covariance @ move.mT for move, part in zip(moves, parts, strict=True) if part.covariance is not None
    ]
    sums = [(move @ part.sums.unsqueeze(-1)).squeeze(-1) for move, part in zip(moves, parts, strict=True)]
    pooled = torch.stack(sums).sum(0)
    pooled[:, SUMS.index("deviations")] = 0.0
    methods = list(dict.fromkeys(part.method for part in parts))
    return ScoreStats(
        rows=torch.stack([part.rows for part in parts]).sum(0),
        count=torch.stack([part.count for part in parts]).sum(0),
        mean=mean,
        max=torch.stack([part.max for part in parts]).amax(0),
        max_bound=torch.stack([part.max_bound for part in parts]).amax(0),
        exact=all(part.exact for part in parts),
        method="; ".join(methods),
        sums=pooled,
        covariance=torch.stack(covariances).sum(0) if covariances else None,
    )


def _move(delta: Tensor) -> Tensor:
    """The matrix that turns sums about a mean into sums about a mean lower by delta, (heads, sums, sums)."""
    matrix = torch.eye(len(SUMS), dtype=delta.dtype, device=delta.device).repeat(delta.shape[0], 1, 1)
    matrix[:, 1, 0] = delta
    matrix[:, 2, 0] = delta**2
    matrix[:, 2, 1] = 2 * delta
    return matrix


PACKED = tuple(
    entry.name for entry in fields(ScoreStats) if entry.name in ("rows", "count", "mean", "max", "max_bound")
)


def _pack(stats: ScoreStats) -> Tensor:
    """Everything of every head in one float64 row: numbers, sums, covariance, and whether they are exact."""
    numbers = torch.stack([getattr(stats, name).double() for name in PACKED], dim=-1)
    covariance = torch.zeros_like(_move(stats.mean)) if stats.covariance is None else stats.covariance
    exact = torch.full_like(numbers[:, :1], float(stats.exact))
    return torch.cat([exact, numbers, stats.sums, covariance.flatten(1)], dim=-1)


def _unpack(packed: Tensor, method: str) -> ScoreStats:
    exact, numbers, sums, covariance = packed.split([1, len(PACKED), len(SUMS), len(SUMS) ** 2], dim=-1)
    named = dict(zip(PACKED, numbers.unbind(-1), strict=True))
    return ScoreStats(
        rows=named["rows"].to(torch.int64),
        count=named["count"].to(torch.int64),
        mean=named["mean"],
        max=named["max"],
        max_bound=named["max_bound"],
        exact=bool(exact.all()),
        method=method,
        sums=sums,
        covariance=covariance.unflatten(-1, (len(SUMS), len(SUMS))),
    )


def _plain(values: Tensor) -> list[float | int | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
