"""Errors of sampled statistics: stratified standard errors, with Student's t, and NaN where rows cannot tell them.

The variance of an estimated total is the textbook one for rows drawn without replacement in strata:
Σ_h M_h² (1 − m_h/M_h) S_h / m_h, with S_h the sample covariance in stratum h. Variances add over disjoint rows.
"""

import math
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnscale.measure.row_sums import RowSums
from attnscale.theory.significance import student_quantile

if TYPE_CHECKING:
    from attnscale.measure.sampling import Sample

NORMAL = 1.96  # standard errors either side, for 95%
# Agresti & Coull (1998): a share of rows of which none, or all, were seen is not certain: z²/2 rows may be missing.
MISSED_ROWS = NORMAL**2 / 2
# Past these an interval covers less than 90% in some head of benchmarks/coverage.py, and the error is NaN.
LEAST_FREEDOM = 9
HIGHEST_SKEWNESS = 0.17
HIGHEST_CONCENTRATION = 1 / 3
NODES = torch.linspace(-4.0, 7.0, 34, dtype=torch.float64)  # in standard deviations; the rarest of 10¹² scores is at 7
STEP = 1 / 3
DENSITY = torch.exp(-NODES.square() / 2) / math.sqrt(2 * math.pi) * STEP
RARE = 2  # scores of a head; rarer ones it may well not have
HIGHEST_VARIANCE = 0.25  # of anything between 0 and 1
FEW = "too few positions were looked at to tell how much rows differ; look at more rows"
SKEWED = "a few rows should have scores spread far wider than all others, and not all of them were looked at"
CONCENTRATED = "rows change at one place, where too few of them were looked at"


@dataclass(frozen=True)
class Uncertainty:
    """Covariance of the errors of estimated sums, for every head."""

    covariance: Tensor  # (heads, sums, sums)
    freedom: Tensor  # (heads,) degrees of freedom of the covariance
    step: Tensor  # (heads,) variance of a sum for one row more or less that has what the others lack
    # (heads, 3) of the error in a total that is known of all rows: second and third cumulant, Σ (a stratum's second)²
    foreseen: Tensor

    @classmethod
    def none(cls, sums: Tensor) -> "Uncertainty":
        """Return that of sums (heads, sums) over every row."""
        (heads, width), nothing = sums.shape, sums.new_zeros(len(sums))
        return cls(sums.new_zeros(heads, width, width), nothing, nothing, sums.new_zeros(heads, 3))

    def moved(self, matrix: Tensor) -> "Uncertainty":
        """Return that of the sums matrix · sums, (heads, sums, sums)."""
        return replace(self, covariance=matrix @ self.covariance @ matrix.mT)

    def __add__(self, other: "Uncertainty") -> "Uncertainty":
        return Uncertainty(
            self.covariance + other.covariance,
            self.freedom + other.freedom,
            torch.maximum(self.step, other.step),  # nothing seen here and nothing seen there is nothing seen at all
            self.foreseen + other.foreseen,
        )

    def stderr(self, gradient: Tensor) -> Tensor:
        """Return the standard error of what moves by gradient (heads, sums) with the sums, so that 1.96 cover 95%."""
        variance = torch.einsum("hi,hij,hj->h", gradient, self.covariance, gradient).clamp(min=0.0)
        return torch.where(self._is_unreliable(), torch.nan, variance.sqrt() * self._student())

    def stderr_of_share(self, gradient: Tensor, share: Tensor, total: Tensor) -> Tensor:
        """Return the same for a share of `total` rows that something is true of."""
        missed = MISSED_ROWS * self.step * (1 - 2 * share).square() / total.square()
        return (self.stderr(gradient).square() + missed).sqrt()

    def doubts(self) -> list[str | None]:
        """Return, for each head, why its error is NaN; None where it is not."""
        found: list[str | None] = [None] * len(self.freedom)
        for reason, heads in self._reasons().items():
            for head in heads.nonzero().flatten().tolist():
                found[head] = found[head] or reason
        return found

    def _is_unreliable(self) -> Tensor:
        return torch.stack(list(self._reasons().values())).any(0)

    def _reasons(self) -> dict[str, Tensor]:
        second, third, by_stratum = self.foreseen.unbind(-1)
        known = torch.where(second > 0, second, torch.inf)
        return {
            FEW: (self.freedom > 0) & (self.freedom < LEAST_FREEDOM),
            SKEWED: third.abs() / known.pow(1.5) > HIGHEST_SKEWNESS,
            CONCENTRATED: by_stratum / known.square() > HIGHEST_CONCENTRATION,
        }

    def _student(self) -> Tensor:
        """Return Student's 95% quantile over the normal one (Student 1908): the error itself comes from few rows."""
        factors = [student_quantile(max(freedom, 1.0), 0.95) / NORMAL for freedom in self.freedom.tolist()]
        return self.freedom.new_tensor(factors)

    def packed(self) -> Tensor:
        """Return everything of a head in one row of numbers."""
        alone = torch.stack([self.freedom, self.step], dim=-1)
        return torch.cat([self.covariance.flatten(1), alone, self.foreseen], dim=-1)

    @classmethod
    def unpacked(cls, packed: Tensor, sums: int) -> "Uncertainty":
        """Return that which packed() was called on."""
        covariance, freedom, step, foreseen = packed.split([sums**2, 1, 1, 3], dim=-1)
        return cls(covariance.unflatten(-1, (sums, sums)), freedom.squeeze(-1), step.squeeze(-1), foreseen)


def packed_size(sums: int) -> int:
    """Return how many numbers packed() gives a head."""
    return sums**2 + 5


def merged(parts: list[Uncertainty]) -> Uncertainty | None:
    """Return that of the sums of all parts; None where there is none."""
    return reduce(Uncertainty.__add__, parts) if parts else None


def uncertainty_of_totals(sample: "Sample", features: Tensor, least: Tensor, feature: int) -> Uncertainty:
    """Return that of the estimated totals of features (heads, rows, features), rows in the order of the sample.

    `least`, (heads, rows), is a variance of each row that is known besides for one feature; the larger one counts.
    """
    stratum, sizes = sample.stratum.to(features.device), sample.sizes.to(features)
    strata, heads = len(sizes), len(features)
    taken = torch.bincount(stratum, minlength=strata).to(features)
    member = (stratum == torch.arange(strata, device=stratum.device).unsqueeze(-1)).to(features)
    means = member @ features / taken[:, None].clamp(min=1)  # in one order, on a GPU too
    residual = features - means[:, stratum]
    # each row's share: M² (1 − m/M) / (m (m − 1)), so that one product over all rows is the sum over strata
    share = sizes * (sizes - taken) / (taken * (taken - 1)).clamp(min=1)
    covariance = (residual * share[stratum, None]).mT @ residual
    alone = sizes * (sizes - taken) / taken.square().clamp(min=1)
    known = (least * alone[stratum]).sum(1)
    covariance[:, feature, feature] = torch.maximum(covariance[:, feature, feature], known)
    drawn = (sizes > taken).to(features) * taken
    return Uncertainty(
        covariance=covariance,
        freedom=((sizes > taken) * (taken - 1)).sum().expand(heads),
        step=((sizes * (sizes - taken) / taken.clamp(min=1)).sum() / drawn.sum().clamp(min=1)).expand(heads),
        foreseen=features.new_zeros(heads, 3) if sample.foreseen is None else sample.foreseen().to(features),
    )


def chance_of_participation(rows: RowSums, positions: int) -> Tensor:
    """Return the variance of Σp² that chance gives such rows, (batch, heads, rows), in a head of so many positions.

    Where scores are Gaussian, Σp² hangs on a few keys in a thousand rows, and a sample that misses them all looks
    precise; the spread of its scores tells better. One score s among n weighs p = eˢ / (eˢ + A), A = n e^{σ²/2} being
    the sum of the others, and takes Σp² from P to P + c, c = p² (1 + P) − 2 p P; the variance over rows is n Var[c].
    """
    keys = rows.visible.double()
    variance = rows.deviation.double() / keys.clamp(min=1)
    nodes, density = NODES.to(keys.device), DENSITY.to(keys.device)
    others = (keys - 1).clamp(min=1).log() + variance / 2
    weight = torch.sigmoid(variance.sqrt().unsqueeze(-1) * nodes - others.unsqueeze(-1))
    scores = keys * positions * rows.visible.shape[0]
    rarest = -torch.special.ndtri(RARE / scores.clamp(min=2 * RARE))
    density = density * ((rarest.unsqueeze(-1) - nodes) / STEP + 0.5).clamp(0, 1)
    usual = (keys * (density * weight.square()).sum(-1)).clamp(max=1).unsqueeze(-1)
    change = weight.square() * (1 + usual) - 2 * weight * usual
    chance = keys * ((density * change.square()).sum(-1) - (density * change).sum(-1).square())
    return torch.where(keys > 1, chance.clamp(0, HIGHEST_VARIANCE), 0.0)
