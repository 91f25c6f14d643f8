"""Which rows to look at, and what having looked at those alone is worth.

Positions are drawn without replacement in strata of neighbouring positions; each position stands for that row of
every batch entry (a cluster), so that one gather serves the whole batch. The variance of an estimated total is the
textbook one for such a design, Σ_h M_h² (1 − m_h/M_h) S_h / m_h, with S_h the sample covariance within stratum h.
"""

import random
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

ROWS_A_STRATUM = 4  # neighbouring positions are alike; with four of each, three tell how much they differ
LEAST_POSITIONS = 2  # one alone tells nothing about the spread between rows
CERTAIN_SHARE = 4  # where rows see unlike numbers of keys, one row in four goes to the first positions, all of them
# Hall (1988): an interval of ±1.96 standard errors from n rows of skewness γ covers 95% once it is wider by this much
# over n: the first for having estimated the variance, the second, times γ², for the skewness.
STUDENT_EXCESS, SKEWNESS_EXCESS = 1.71, 1.08
DRAW = random.Random(0)  # of its own: measuring a model must not change the random numbers it trains with


@dataclass(frozen=True)
class Sample:
    """Sampled positions in increasing order, the stratum of each, and how many positions each stratum has."""

    positions: Tensor  # (rows,)
    stratum: Tensor  # (rows,)
    sizes: Tensor  # (strata,)

    @property
    def weights(self) -> Tensor:
        """How many positions each sampled one stands for."""
        taken = torch.bincount(self.stratum, minlength=len(self.sizes)).clamp(min=1)
        return (self.sizes / taken)[self.stratum]

    def covariance_of_totals(self, features: Tensor) -> Tensor:
        """Covariance of the estimated totals of features (heads, rows, features), each row summed over the batch."""
        stratum, sizes = self.stratum.to(features.device), self.sizes.to(features)
        strata = len(self.sizes)
        taken = torch.bincount(stratum, minlength=strata).to(features)
        heads, _, width = features.shape
        means = features.new_zeros(heads, strata, width).index_add_(1, stratum, features) / taken[:, None].clamp(min=1)
        # each row's share: M² (1 − m/M) / (m (m − 1)), so that one product over all rows is the sum over strata
        share = sizes * (sizes - taken) / (taken * (taken - 1)).clamp(min=1)
        residual = (features - means[:, stratum]) * share[stratum].sqrt()[:, None]
        residual = residual * _excess(residual, taken[stratum])
        return residual.mT @ residual


def _excess(residual: Tensor, taken: Tensor) -> Tensor:
    """By how much to widen an error so that 1.96 of it cover what they should, though the rows are few and skewed."""
    uncertain = (residual != 0).any(-1, keepdim=True).sum(1, keepdim=True).clamp(min=1)  # rows not taken for certain
    # the third moment about the mean of m rows is (m−1)(m−2)/m² of the true one, the second (m−1)/m
    cubes = residual.pow(3) * (taken**0.5 * (taken - 1) ** 0.5 / (taken - 2).clamp(min=1))[:, None]
    squares = residual.square().sum(1, keepdim=True).clamp(min=torch.finfo(residual.dtype).tiny ** 0.3)
    skewness_of_total = cubes.sum(1, keepdim=True) / squares.pow(1.5)
    return 1 + STUDENT_EXCESS / uncertain + SKEWNESS_EXCESS * skewness_of_total.square()


def sample_positions(rows: int, length: int, batch: int, uneven: bool) -> Sample | None:
    """About `rows` rows a head, spread over position and batch; None where that is every row.

    `uneven`: rows see unlike numbers of keys, mostly few at first; the first are then all taken, and the strata widen
    towards the end.
    """
    wanted = max(LEAST_POSITIONS, -(-rows // max(batch, 1)))
    if wanted >= length:
        return None
    certain = wanted // CERTAIN_SHARE if uneven else 0
    strata = max(1, (wanted - certain) // ROWS_A_STRATUM)
    given = [step * (wanted - certain) // strata for step in range(strata + 1)]
    # every stratum has the positions it gives, and its part of those left over
    left_over = [int((length - wanted) * (step / strata) ** (2 if uneven else 1)) for step in range(strata + 1)]
    edges = [certain + a + b for a, b in zip(given, left_over, strict=True)]
    positions, stratum = list(range(certain)), [0] * certain
    for index, (start, stop) in enumerate(pairwise(edges), start=1):
        taken = given[index] - given[index - 1]
        positions += sorted(DRAW.sample(range(start, stop), taken))
        stratum += [index] * taken
    sizes = [certain, *(stop - start for start, stop in pairwise(edges))]
    return Sample(torch.tensor(positions), torch.tensor(stratum), torch.tensor(sizes))
