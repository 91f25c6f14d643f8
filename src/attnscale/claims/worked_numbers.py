"""The numbers that the tutorial computes on the way: its proof, its exponentials, its examples."""

import math
from collections.abc import Sequence

import numpy as np

from attnscale.claims.computations import (
    DIM,
    SIGNS,
    average_terms,
    enumerated_mean,
    enumerated_variance,
    products,
    sampled_terms,
)
from attnscale.claims.judging import Source
from attnscale.reference import Array, softmax

SOURCE = Source("tutorial", "Math behind √dₖ Scaling Factor in Attention", "tutorial")

NEAR = 0.1  # for an average of many draws that is 0 or 1
PROOF_DIM = 3  # the proof expands (q·k)² for this d_k, then for DIM

TRIPLE, HALVED = np.array([2.0, 4.0, 6.0]), np.array([1.0, 2.0, 3.0])
QUERY, KEY = np.array([1.0, 0.0, 1.0, 0.0]), np.array([0.0, 1.0, 1.0, 1.0])
RAW = np.array([14.0, 10.0, 12.0])
SCALED = RAW / math.sqrt(DIM)


def _squares(values: Array) -> Array:
    return np.asarray((values - values.mean()) ** 2)


def _counted(dim: int, average: float) -> int:
    """Count the terms of (q·k)² that have this average over every pair."""
    return _counted_in(average_terms(dim), average)


def _counted_in(terms: Array, average: float) -> int:
    return int((abs(terms - average) < NEAR).sum())


def _summed(scores: Sequence[float] | Array) -> float:
    return float(np.exp(scores).sum())


# The proof

SOURCE.section("Proving It Step by Step")


SOURCE.number("product-mean", "Mean of one product q_i·k_i.", "0", lambda: products(SIGNS, 1).mean())
SOURCE.number("product-variance", "Variance of one product q_i·k_i.", "1", lambda: products(SIGNS, 1).var())
SOURCE.number("score-mean", "Mean of q·k when components have mean 0.", "0", lambda: enumerated_mean(SIGNS, DIM))
SOURCE.number(
    "average-square", "Average square of a component of mean 0 and variance 1.", "1",
    lambda: np.square(SIGNS).mean(),
)  # fmt: skip
SOURCE.number("terms-3", "Terms of the squared dot product at d_k = 3.", "9", lambda: average_terms(PROOF_DIM).size)
SOURCE.number("own-terms-3", "Of the terms at d_k = 3, squares of one product.", "3", lambda: _counted(PROOF_DIM, 1.0))
SOURCE.number(
    "own-average", "Average of the square of one product.", "1 1 1",
    lambda: np.diag(average_terms(PROOF_DIM)),
)  # fmt: skip
SOURCE.number("cross-terms-3", "Of the terms at d_k = 3, mixed ones.", "6", lambda: _counted(PROOF_DIM, 0.0))
SOURCE.number(
    "cross-average", "Average of each mixed term at d_k = 3.", "0 0 0 0 0 0",
    lambda: average_terms(PROOF_DIM)[~np.eye(PROOF_DIM, dtype=bool)],
)  # fmt: skip
SOURCE.number(
    "variance-3", "Variance of q·k at d_k = 3, as the sum of all terms.", "3",
    lambda: average_terms(PROOF_DIM).sum(),
)  # fmt: skip
SOURCE.number("terms-64", "Terms of the squared dot product at d_k = 64.", "4096", lambda: sampled_terms(DIM).size)
SOURCE.number(
    "own-terms-64", "Of the terms at d_k = 64, squares of one product.", "64",
    lambda: _counted_in(sampled_terms(DIM), 1.0),
)  # fmt: skip
SOURCE.number(
    "cross-terms-64", "Of the terms at d_k = 64, mixed ones.", "4032",
    lambda: _counted_in(sampled_terms(DIM), 0.0),
)  # fmt: skip
SOURCE.number("variance-64", "Variance of q·k at d_k = 64.", "64", lambda: enumerated_variance(SIGNS, DIM))

# Exponentials

SOURCE.section("What Large Dot Products Do to Softmax")


SOURCE.number("euler", "The constant e.", "2.718", lambda: math.e)
SOURCE.number("exp-1", "e to the 1.", "2.718", lambda: math.exp(1))
SOURCE.number("exp-5", "e to the 5.", "148.4", lambda: math.exp(5))
SOURCE.number("exp-10", "e to the 10.", "22,026", lambda: math.exp(10))
SOURCE.number("exp-20", "e to the 20.", "485,165,195", lambda: math.exp(20))
SOURCE.number(
    "exp-50", "e to the 50.", "5,184,705,528,587,072,045",
    lambda: math.exp(50),
    "The printed digits are those of the float64 result without the last three.",
)  # fmt: skip
SOURCE.number("exp-5-whole", "e to the 5, to a whole number.", "148", lambda: math.exp(5))
SOURCE.number("softmax-50-10-5", "Softmax of [50, 10, 5].", "1.0 0.0 0.0", lambda: softmax([50, 10, 5]))
SOURCE.number("exp-half", "e to the ½.", "1.649", lambda: math.exp(0.5))
SOURCE.number("sum-5-1-half", "Sum of the exponentials of [5, 1, 0.5].", "152.780", lambda: _summed([5, 1, 0.5]))
SOURCE.number("softmax-5-1-half", "Softmax of [5, 1, 0.5].", "0.971 0.018 0.011", lambda: softmax([5, 1, 0.5]))

# Variances

SOURCE.section("Why √dₖ is the Right Scaling Factor")


SOURCE.number("mean-2-4-6", "Mean of [2, 4, 6].", "4", TRIPLE.mean)
SOURCE.number("differences-2-4-6", "Distances of [2, 4, 6] from their mean.", "-2 0 2", lambda: TRIPLE - TRIPLE.mean())
SOURCE.number("squares-2-4-6", "Squared distances of [2, 4, 6] from their mean.", "4 0 4", lambda: _squares(TRIPLE))
SOURCE.number("variance-2-4-6", "Variance of [2, 4, 6].", "2.67", TRIPLE.var)
SOURCE.number("halved-2-4-6", "[2, 4, 6] divided by 2.", "1 2 3", lambda: TRIPLE / 2)
SOURCE.number("mean-1-2-3", "Mean of [1, 2, 3].", "2", HALVED.mean)
SOURCE.number("differences-1-2-3", "Distances of [1, 2, 3] from their mean.", "-1 0 1", lambda: HALVED - HALVED.mean())
SOURCE.number("squares-1-2-3", "Squared distances of [1, 2, 3] from their mean.", "1 0 1", lambda: _squares(HALVED))
SOURCE.number("variance-1-2-3", "Variance of [1, 2, 3].", "0.67", HALVED.var)
SOURCE.number(
    "variance-ratio", "Factor by which halving the values divides their variance.", "4",
    lambda: TRIPLE.var() / HALVED.var(),
)  # fmt: skip

# Examples

SOURCE.section("Seeing It with Real Numbers")


SOURCE.number("dot-4", "Dot product of [1, 0, 1, 0] and [0, 1, 1, 1].", "1", lambda: QUERY @ KEY)
SOURCE.number("root-4", "The square root of d_k = 4.", "2", lambda: math.sqrt(QUERY.size))
SOURCE.number("scaled-dot-4", "Dot product 1, divided by √4.", "0.5", lambda: QUERY @ KEY / math.sqrt(QUERY.size))
SOURCE.number("exp-14", "e to the 14.", "1,202,604", lambda: math.exp(14))
SOURCE.number("exp-12", "e to the 12.", "162,755", lambda: math.exp(12))
SOURCE.number("sum-14-10-12", "Sum of the exponentials of [14, 10, 12].", "1,387,386", lambda: _summed(RAW))
SOURCE.number("softmax-14-10-12", "Softmax of [14, 10, 12].", "0.867 0.016 0.117", lambda: softmax(RAW))
SOURCE.number(
    "percent-14-10-12", "Per cent for the first two of [14, 10, 12].", "86.7 1.6",
    lambda: 100 * softmax(RAW)[:2],
)  # fmt: skip
SOURCE.number("root-64", "The square root of d_k = 64.", "8", lambda: math.sqrt(DIM))
SOURCE.number("scaled-14-10-12", "[14, 10, 12] divided by 8.", "1.75 1.25 1.5", lambda: SCALED)
SOURCE.number("exp-1.75", "e to the 1.75.", "5.755", lambda: math.exp(1.75))
SOURCE.number("exp-1.25", "e to the 1.25.", "3.490", lambda: math.exp(1.25))
SOURCE.number("exp-1.5", "e to the 1.5.", "4.482", lambda: math.exp(1.5))
SOURCE.number("sum-scaled-14-10-12", "Sum of the exponentials of [1.75, 1.25, 1.5].", "13.727", lambda: _summed(SCALED))
SOURCE.number("softmax-scaled-14-10-12", "Softmax of [1.75, 1.25, 1.5].", "0.419 0.254 0.326", lambda: softmax(SCALED))
SOURCE.number(
    "percent-scaled-14-10-12", "Per cent for [1.75, 1.25, 1.5].", "41.9 25.4 32.6",
    lambda: 100 * softmax(SCALED),
)  # fmt: skip
