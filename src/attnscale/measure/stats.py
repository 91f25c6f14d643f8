"""ScoreStats: statistics of the scores of each head, which merge over shards.

Every statistic is a ratio of two sums over rows (pooled.py), computed when it is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attnscale.errors import SettingError, ShapeError
from attnscale.measure.pooled import DENOMINATOR, NUMBERS, NUMERATOR, ROOT_OF, SUMS, Pooled, merged, pack, unpack
from attnscale.measure.statistics import of_scores
from attnscale.plain import plain
from attnscale.results import Result


@dataclass(frozen=True, repr=False)
class ScoreStats(Result):
    """Statistics of the visible scores, one value per query head; `a + b` merges disjoint rows, batches or ranks.

    ScoreStats does not keep the caller's tensors. Each replay of a CUDA graph updates the statistics that it captured,
    which are then marked `refreshed`, and their values are read again.
    """

    heads: int
    exact: bool  # True if every row was measured
    pool: Pooled | Callable[[], Pooled] = field(repr=False)
    refreshed: bool = field(default=False, repr=False)  # True if each replay of a CUDA graph updates them

    @property
    def pooled(self) -> Pooled:
        """Sums over rows, computed once; the rows are then freed, unless a CUDA graph may refresh them."""
        if isinstance(self.pool, Pooled):
            return self.pool
        pooled = self.pool()
        if not self.refreshed and not torch.compiler.is_compiling():
            object.__setattr__(self, "pool", pooled)
        return pooled

    @property
    def rows(self) -> Tensor:
        """Number of measured rows with at least one visible key."""
        return self.pooled.rows.long()

    @property
    def count(self) -> Tensor:
        """Number of measured scores."""
        return self.pooled.count.long()

    @property
    def keys(self) -> Tensor:
        """Mean number of visible keys of a row, estimated for all rows if they were sampled."""
        rows = self._sum("rows")
        return self._sum("scores") / torch.where(rows > 0, rows, torch.nan)

    @property
    def mean(self) -> Tensor:
        """Mean of the scores."""
        return self.pooled.finished["mean"]

    @property
    def max(self) -> Tensor:
        """Largest measured score; if rows were sampled, a lower bound of the largest score."""
        return self.pooled.max

    @property
    def max_bound(self) -> Tensor:
        """Upper bound of the largest score; equal to it if every row was measured."""
        return self.pooled.max_bound

    @property
    def max_above_mean(self) -> Tensor:
        """Largest score above the mean of its row; a lower bound if rows were sampled."""
        return self.pooled.max_above_mean

    @property
    def variance(self) -> Tensor:
        """Variance of all scores: variance within rows plus variance of the row means."""
        return self.pooled.finished["variance"]

    @property
    def std(self) -> Tensor:
        """Total spread: standard deviation of all scores, including shifts of whole rows."""
        return self.pooled.finished["std"]

    @property
    def variance_within_rows(self) -> Tensor:
        """Mean squared difference between a score and the mean of its row."""
        return self.pooled.finished["variance_within_rows"]

    @property
    def std_within_rows(self) -> Tensor:
        """Spread within rows, the one that matters to softmax, which ignores a shift of a whole row."""
        return self.pooled.finished["std_within_rows"]

    @property
    def entropy(self) -> Tensor:
        """Mean entropy of a row, nats."""
        return self.pooled.finished["entropy"]

    @property
    def entropy_ratio(self) -> Tensor:
        """Mean of H / ln n over the rows with several visible keys."""
        return self.pooled.finished["entropy_ratio"]

    @property
    def top1(self) -> Tensor:
        """Mean of the largest weight of a row."""
        return self.pooled.finished["top1"]

    @property
    def saturated(self) -> Tensor:
        """Share of rows that give one key more than 0.99 of their weight."""
        return self.pooled.finished["saturated"]

    @property
    def jacobian_trace(self) -> Tensor:
        """Mean of 1 − Σp², the trace of a row's softmax Jacobian."""
        return self.pooled.finished["jacobian_trace"]

    @property
    def effective_keys(self) -> Tensor:
        """Mean of 1/Σp², the number of keys a row attends to."""
        return self.pooled.finished["effective_keys"]

    @property
    def sink(self) -> Tensor:
        """Mean weight on the first visible key of a row; in packed batches, on the first key of its sequence."""
        return self.pooled.finished["sink"]

    @property
    def learned_sink(self) -> Tensor:
        """Mean weight of the learned sink; NaN if there is none."""
        return self.pooled.finished["learned_sink"]

    def stderr(self, name: str) -> Tensor:
        """Return the standard error of a statistic from sampled rows; zero if every row was measured.

        The error is widened so that ±1.96 standard errors cover about 95% even for few, skewed rows: see decision 4.
        It is NaN if the sampled rows do not suffice: `doubts()` says why.
        """
        if name in ROOT_OF:
            root = getattr(self, name)
            return torch.where(root == 0, 0.0, self.stderr(ROOT_OF[name]) / (2 * root))
        if name not in DENOMINATOR:
            known = ", ".join(sorted([*DENOMINATOR, *ROOT_OF]))
            bracket = " The maximum has a bracket instead: max and max_bound." if name.startswith("max") else ""
            raise SettingError(f"Expected one of {known} to have a standard error, got {name!r}.{bracket}")
        uncertainty = self.pooled.uncertainty
        if uncertainty is None:
            return torch.zeros_like(self.pooled.mean)
        # Delta method: the ratio r = a/b changes by (da − r db)/b. For the mean, r = 0: deviations sum to zero.
        below = self._sum(DENOMINATOR[name])
        ratio = torch.zeros_like(below) if name == "mean" else self.pooled.finished[name]
        gradient = torch.zeros_like(self.pooled.sums)
        gradient[:, SUMS.index(NUMERATOR.get(name, name))] = 1.0
        gradient[:, SUMS.index(DENOMINATOR[name])] -= ratio
        gradient = gradient / below.unsqueeze(-1)
        if name == "saturated":
            return uncertainty.stderr_of_share(gradient, ratio, below)
        return uncertainty.stderr(gradient)

    def doubts(self) -> list[str | None]:
        """Return for each head why `stderr` is NaN, or None."""
        uncertainty = self.pooled.uncertainty
        return [None] * self.heads if uncertainty is None else uncertainty.doubts()

    def __add__(self, other: "ScoreStats") -> "ScoreStats":
        if self.heads != other.heads:
            raise ShapeError(f"Expected the same number of heads to merge, got {self.heads} and {other.heads}.")
        pooled = merged([self.pooled, other.pooled])
        return ScoreStats(self.heads, self.exact and other.exact, pooled)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> "ScoreStats":
        """Merge the statistics of all ranks of the group, which measured disjoint rows, in one collective."""
        world = dist.get_world_size(group)
        packed = pack(self.pooled)
        gathered = packed.new_empty(world * packed.shape[0], *packed.shape[1:])
        dist.all_gather_into_tensor(gathered, packed, group=group)
        pooled = merged([unpack(part)() for part in gathered.chunk(world)])
        assert pooled.uncertainty is not None  # every rank has sent its uncertainty
        return ScoreStats(self.heads, not pooled.uncertainty.freedom.any(), pooled)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, one list per statistic; None if a head has no rows for it.

        If rows were sampled, `stderr` has the standard errors of the statistics that support them.
        """
        numbers = {name: plain(getattr(self, name).tolist()) for name in of_scores()}
        found = {"heads": self.heads, "exact": self.exact} | numbers
        if self.exact:
            return found
        known = (name for name, entry in of_scores().items() if entry.has_error)
        return found | {"stderr": {name: plain(self.stderr(name).tolist()) for name in known}}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, with copies of the sums: a view would pickle the whole tensor behind it."""
        pooled = self.pooled
        kept = {name: getattr(pooled, name).clone() for name in (*NUMBERS, "sums")}
        return {"heads": self.heads, "exact": self.exact, "pooled": Pooled(**kept, errors=pooled.uncertainty)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        found = {"heads": state["heads"], "exact": state["exact"], "pool": state["pooled"], "refreshed": False}
        self.__dict__.update(found)

    def _sum(self, name: str) -> Tensor:
        return self.pooled.sums[:, SUMS.index(name)]


def merged_when_read(parts: Sequence[ScoreStats]) -> ScoreStats:
    """Return the merged statistics; they are merged when first read."""
    if len(parts) == 1:
        return parts[0]
    return ScoreStats(
        parts[0].heads,
        exact=all(part.exact for part in parts),
        pool=lambda: merged([part.pooled for part in parts]),
        refreshed=any(part.refreshed for part in parts),
    )
