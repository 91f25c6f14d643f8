"""How far estimated sums may be off, and how wide an interval about a ratio of two of them must be.

Kept of the sums' errors are the second and third cumulants, which add over disjoint rows. An interval of ±1.96
standard errors is too narrow where the error itself comes from few rows (Student 1908), and where the rows are skewed
(Johnson 1978, Hall 1988): a sample without the rare large rows has both a low sum and a small error. Both corrections
are formed when an error is read, from what was merged until then, so that they fade as rows add up.
"""

from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations_with_replacement, permutations

import torch
from torch import Tensor

NORMAL = 1.96  # standard errors either side, for 95%
# Student's 95% quantile over the normal one is 1 + the first over the degrees of freedom + the second over their square
# (Abramowitz & Stegun 26.7.5).
STUDENT = (NORMAL**2 + 1) / 4, (5 * NORMAL**4 + 16 * NORMAL**2 + 3) / 96
# Hall (1988): where the sum has skewness γ, ±1.96 standard errors cover 95% once they are wider by the first of these
# times γ². The skewness is estimated too, and too low for the same samples: the second, times |γ| up to the third, is
# what heads of Gaussian scores ask for beyond (benchmarks/coverage.py).
SKEWNESS_EXCESS, UNSEEN_SKEWNESS_EXCESS, UNSEEN_SKEWNESS = 1.08, 0.6, 0.2
# Agresti & Coull (1998): a share of rows of which none, or all, were seen is not certain: z²/2 rows may be missing.
MISSED_ROWS = NORMAL**2 / 2
# Past these an interval covers less than 93% in some head of benchmarks/coverage.py, whatever it is widened by.
LEAST_FREEDOM = 9
HIGHEST_SKEWNESS = 0.25
HIGHEST_CONCENTRATION = 1 / 3
FEW = "too few positions were looked at to tell how much rows differ; look at more rows"
SKEWED = "a few rows should have scores spread far wider than all others, and not all of them were looked at"
CONCENTRATED = "rows change at one place, where too few of them were looked at"


@dataclass(frozen=True)
class Uncertainty:
    """Cumulants of the errors of estimated sums, for every head."""

    covariance: Tensor  # (heads, sums, sums)
    third: Tensor  # (heads, sums, sums, sums)
    freedom: Tensor  # (heads,) degrees of freedom of the covariance
    step: Tensor  # (heads,) variance of a sum for one row more or less that has what the others lack
    # (heads, 3) of the error in a total that is known of all rows: second and third cumulant, Σ (a stratum's second)²
    foreseen: Tensor

    def moved(self, matrix: Tensor) -> "Uncertainty":
        """That of the sums matrix · sums, (heads, sums, sums)."""
        third = self.third
        for _ in range(3):  # one axis at a time, each moved to the end: in one product the sums would be far more
            third = (matrix @ third.flatten(2)).unflatten(2, third.shape[2:]).movedim(1, -1)
        return replace(self, covariance=matrix @ self.covariance @ matrix.mT, third=third)

    def __add__(self, other: "Uncertainty") -> "Uncertainty":
        return Uncertainty(
            self.covariance + other.covariance,
            self.third + other.third,
            self.freedom + other.freedom,
            torch.maximum(self.step, other.step),  # nothing seen here and nothing seen there is nothing seen at all
            self.foreseen + other.foreseen,
        )

    def stderr(self, gradient: Tensor) -> Tensor:
        """Standard error of what moves by gradient (heads, sums) with the sums, so that 1.96 of it cover 95%."""
        variance = torch.einsum("hi,hij,hj->h", gradient, self.covariance, gradient).clamp(min=0.0)
        third = torch.einsum("hi,hj,hk,hijk->h", gradient, gradient, gradient, self.third)
        skewness = third.abs() / torch.where(variance > 0, variance, torch.inf).pow(1.5)
        unseen = UNSEEN_SKEWNESS_EXCESS * skewness.clamp(max=UNSEEN_SKEWNESS)
        known = variance.sqrt() * (self._student() + SKEWNESS_EXCESS * skewness.square() + unseen)
        return torch.where(self._doubted(), torch.nan, known)

    def stderr_of_share(self, gradient: Tensor, share: Tensor, total: Tensor) -> Tensor:
        """The same for a share of `total` rows that something is true of."""
        variance = torch.einsum("hi,hij,hj->h", gradient, self.covariance, gradient).clamp(min=0.0)
        missed = MISSED_ROWS * self.step * (1 - 2 * share).square() / total.square()
        return torch.where(self._doubted(), torch.nan, (variance * self._student().square() + missed).sqrt())

    def doubts(self) -> list[str | None]:
        """Of each head, why its rows do not tell how far it may be off; None where they do."""
        found: list[str | None] = [None] * len(self.freedom)
        for reason, heads in self._reasons().items():
            for head in heads.nonzero().flatten().tolist():
                found[head] = found[head] or reason
        return found

    def _doubted(self) -> Tensor:
        return torch.stack(list(self._reasons().values())).any(0)

    def _reasons(self) -> dict[str, Tensor]:
        """The heads that each reason is true of; sums that are exact give none."""
        second, third, by_stratum = self.foreseen.unbind(-1)
        some = second > 0
        skewness = third.abs() / torch.where(some, second, torch.inf).pow(1.5)
        concentration = by_stratum / torch.where(some, second, torch.inf).square()
        return {
            FEW: (self.freedom > 0) & (self.freedom < LEAST_FREEDOM),
            SKEWED: skewness > HIGHEST_SKEWNESS,
            CONCENTRATED: concentration > HIGHEST_CONCENTRATION,
        }

    def _student(self) -> Tensor:
        freedom = self.freedom.clamp(min=1)
        return 1 + STUDENT[0] / freedom + STUDENT[1] / freedom.square()

    def packed(self) -> Tensor:
        """Everything of a head in one row of numbers."""
        first, second, last = _triples(self.third.shape[-1]).unbind(-1)
        third = self.third[:, first, second, last]
        alone = torch.stack([self.freedom, self.step], dim=-1)
        return torch.cat([self.covariance.flatten(1), third, alone, self.foreseen], dim=-1)

    @classmethod
    def unpacked(cls, packed: Tensor, sums: int) -> "Uncertainty":
        """From what packed() gave."""
        triples = _triples(sums)
        covariance, third, freedom, step, foreseen = packed.split([sums**2, len(triples), 1, 1, 3], dim=-1)
        whole = packed.new_zeros(packed.shape[0], sums, sums, sums)
        for first, second, last in permutations(triples.unbind(-1)):
            whole[:, first, second, last] = third
        return cls(covariance.unflatten(-1, (sums, sums)), whole, freedom.squeeze(-1), step.squeeze(-1), foreseen)

    @classmethod
    def none(cls, sums: Tensor) -> "Uncertainty":
        """That of sums (heads, sums) over every row."""
        heads, width = sums.shape
        nothing = sums.new_zeros(heads)
        square, cube = sums.new_zeros(heads, width, width), sums.new_zeros(heads, width, width, width)
        return cls(square, cube, nothing, nothing, sums.new_zeros(heads, 3))


def merged(parts: list[Uncertainty]) -> Uncertainty | None:
    """That of the sums of all parts; None where there is none."""
    return reduce(Uncertainty.__add__, parts) if parts else None


def packed_size(sums: int) -> int:
    """How many numbers packed() gives a head."""
    return sums**2 + len(_triples(sums)) + 5


def _triples(sums: int) -> Tensor:
    """The third cumulants that tell all others, by symmetry."""
    return torch.tensor(list(combinations_with_replacement(range(sums), 3)))
