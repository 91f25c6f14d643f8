"""Errors of sampled statistics: stratified standard errors with Student's t; NaN if the rows do not suffice.

The variance of an estimated total is the textbook one for rows drawn without replacement in strata:
Σ_h M_h² (1 − m_h/M_h) S_h / m_h, with S_h the sample covariance in stratum h. Variances add over disjoint rows.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnscale.measure.row_sums import RowSums
from attnscale.theory.significance import student_quantile

if TYPE_CHECKING:
    from attnscale.measure.sampling import Sample

NORMAL = 1.96  # standard errors on either side of a 95% interval
# Agresti & Coull (1998): a sampled share of 0 or 1 is still uncertain; the sample may have missed z²/2 rows.
MISSED_ROWS = NORMAL**2 / 2
# Outside these limits, intervals cover less than 90% for some head of benchmarks/coverage.py; the error is then NaN.
LEAST_FREEDOM = 9
HIGHEST_SKEWNESS = 0.17
HIGHEST_CONCENTRATION = 1 / 3
NODES = torch.linspace(-4.0, 7.0, 34, dtype=torch.float64)  # standard deviations; the largest of 10¹² scores is near 7
STEP = 1 / 3
DENSITY = torch.exp(-NODES.square() / 2) / math.sqrt(2 * math.pi) * STEP
RARE = 2  # scores with a lower expected number per head are ignored: the head may not have them
HIGHEST_VARIANCE = 0.25  # largest variance of a quantity between 0 and 1
FEW = "too few positions were sampled to estimate the variance between rows; sample more rows"
SKEWED = "a few rows have a far larger predicted spread than all others, and not all of them were sampled"
CONCENTRATED = "the variance is concentrated in a few positions, where too few rows were sampled"


@dataclass(frozen=True)
class Uncertainty:
    """Covariance of the errors of estimated sums, for every head."""

    covariance: Tensor  # (heads, sums, sums)
    freedom: Tensor  # (heads,) degrees of freedom of the covariance
    step: Tensor  # (heads,) mean contribution of one sampled row to the variance of an estimated count of rows
    # (heads, 3) predicted sampling error: second cumulant, third cumulant, Σ over strata of the squared second cumulant
    foreseen: Tensor

    @classmethod
    def none(cls, sums: Tensor) -> "Uncertainty":
        """Return zero uncertainty, for exact sums (heads, sums)."""
        (heads, width), nothing = sums.shape, sums.new_zeros(len(sums))
        return cls(sums.new_zeros(heads, width, width), nothing, nothing, sums.new_zeros(heads, 3))

    def moved(self, matrix: Tensor) -> "Uncertainty":
        """Return the uncertainty of matrix @ sums, with matrix (heads, sums, sums)."""
        return replace(self, covariance=matrix @ self.covariance @ matrix.mT)

    def __add__(self, other: "Uncertainty") -> "Uncertainty":
        return Uncertainty(
            self.covariance + other.covariance,
            self.freedom + other.freedom,
            torch.maximum(self.step, other.step),  # a feature absent from both samples counts as missed once, not twice
            self.foreseen + other.foreseen,
        )

    def stderr(self, gradient: Tensor) -> Tensor:
        """Return the standard error of a function of the sums with this gradient, (heads, sums); ±1.96 cover 95%."""
        variance = torch.einsum("hi,hij,hj->h", gradient, self.covariance, gradient).clamp(min=0.0)
        return torch.where(self._is_unreliable(), torch.nan, variance.sqrt() * self._student())

    def stderr_of_share(self, gradient: Tensor, share: Tensor, total: Tensor) -> Tensor:
        """Return the standard error of a share of `total` rows; above zero even if the sampled share is 0 or 1."""
        missed = MISSED_ROWS * self.step * (1 - 2 * share).square() / total.square()
        return (self.stderr(gradient).square() + missed).sqrt()

    def doubts(self) -> list[str | None]:
        """Return for each head why its error is NaN, or None."""
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
        """Return the ratio of Student's 95% quantile to the normal one: few rows give an uncertain error."""
        factors = [student_quantile(max(freedom, 1.0), 0.95) / NORMAL for freedom in self.freedom.tolist()]
        return self.freedom.new_tensor(factors)

    def packed(self) -> Tensor:
        """Pack the uncertainty of each head into one row of numbers."""
        alone = torch.stack([self.freedom, self.step], dim=-1)
        return torch.cat([self.covariance.flatten(1), alone, self.foreseen], dim=-1)

    @classmethod
    def unpacked(cls, packed: Tensor, sums: int) -> "Uncertainty":
        """Reverse packed()."""
        covariance, freedom, step, foreseen = packed.split([sums**2, 1, 1, 3], dim=-1)
        return cls(covariance.unflatten(-1, (sums, sums)), freedom.squeeze(-1), step.squeeze(-1), foreseen)


def packed_size(sums: int) -> int:
    """Return the number of values per head in packed()."""
    return sums**2 + 5


def uncertainty_of_totals(sample: "Sample", features: Tensor, least: Tensor, feature: int) -> Uncertainty:
    """Return the uncertainty of the estimated totals of features (heads, rows, features), rows in sample order.

    `least`, (heads, rows), is a theoretical variance of each row for the feature with index `feature`. The larger of
    this and the sampled variance is used.
    """
    stratum, sizes = sample.stratum.to(features.device), sample.sizes.to(features)
    strata, heads = len(sizes), len(features)
    taken = torch.bincount(stratum, minlength=strata).to(features)
    member = (stratum == torch.arange(strata, device=stratum.device).unsqueeze(-1)).to(features)
    means = member @ features / taken[:, None].clamp(min=1)  # a matrix product is deterministic on a GPU too
    residual = features - means[:, stratum]
    # Weight of each row: M² (1 − m/M) / (m (m − 1)), so that one product over all rows sums over strata.
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


def foreseen_error(values: Tensor, stratum: Tensor, sizes: Tensor) -> Tensor:
    """Return cumulants (heads, 3) of the sampling error of the total of `values`, (heads, rows) ordered by stratum.

    They are the second cumulant, the third, and the sum over strata of the squared second cumulant. `stratum` has
    the stratum of each sampled row, and `sizes` the number of rows in each stratum.
    """
    values, numbers = values.double(), sizes.to(torch.float64)
    taken = torch.bincount(stratum, minlength=len(sizes)).double()
    of = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    means = values.new_zeros(len(values), len(sizes)).index_add_(1, of, values) / numbers.clamp(min=1)
    apart = values - means[:, of]
    left = (numbers - taken) / taken.clamp(min=1)
    second = numbers / (numbers - 1).clamp(min=1) * left
    third = numbers**2 * left * (numbers - 2 * taken) / ((numbers - 1) * (numbers - 2)).clamp(min=1)
    third = third / taken.clamp(min=1)
    each = values.new_zeros(len(values), len(sizes)).index_add_(1, of, apart.square() * second[of])
    return torch.stack([each.sum(1), (apart.pow(3) * third[of]).sum(1), each.square().sum(1)], dim=-1)


def chance_of_participation(rows: RowSums, positions: int) -> Tensor:
    """Return the theoretical variance of Σp² over rows, (batch, heads, rows), in a head with this many positions.

    For Gaussian scores, Σp² depends on a few keys in a thousand rows. A sample that misses them all looks precise, so
    the variance is computed from the spread of the scores. One score s among n keys has the weight p = eˢ / (eˢ + A),
    with A = n e^{σ²/2} the sum of the others. It changes Σp² from P to P + c with c = p² (1 + P) − 2 p P, and the
    variance over rows is n Var[c].
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
