"""Computations that several sources' claims share: exact enumerations, expectations, one seeded sample."""

import itertools
import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from attnscale.claims.draws import drawn_spread, enumerated_variance, head_spread
from attnscale.claims.judging import Evidence
from attnscale.claims.settings import GROWN, T5
from attnscale.reference import Array, RowStatistics, row_statistics
from attnscale.theory import regime, saturation_point
from attnscale.theory.limits import SATURATED_TOP1

DIM = 64  # the head dimension of the sources' examples, and of GPT-2
KEYS = 1024  # GPT-2's context
DIMS = (16, 32, 64, 128, 256, 512)
SPREAD = math.sqrt(DIM)  # of unscaled scores
TINY_GAIN = 1 - SATURATED_TOP1**2  # the most that 1 − Σp² can be once one weight has reached 0.99
NEAR_ONE = 0.05  # a spread this close to one counts as one
SAMPLED_ROWS = 2000
DRAWN_PAIRS = 8192  # averages of products of signs are then within 0.05 of what they are
CONFIDENCE = 1.96  # standard errors either side, for 95%

# Two distributions of mean 0 and variance 1, as lists of equally likely values.
SIGNS = (-1.0, 1.0)
SKEWED = (2.0, -0.5, -0.5, -0.5, -0.5)


def products(values: Sequence[float], dim: int) -> Array:
    """Every q_i k_i of every pair of vectors with components from `values`: (pairs, dim)."""
    vectors = np.array(list(itertools.product(values, repeat=dim)))
    return np.asarray((vectors[:, None] * vectors[None]).reshape(-1, dim))


def average_terms(dim: int) -> Array:
    """The average of each of the dim² terms of (q·k)², over every pair of ±1 vectors: (dim, dim)."""
    terms = products(SIGNS, dim)
    return np.asarray(terms.T @ terms / len(terms))


@cache
def sampled_terms(dim: int) -> Array:
    """The same over drawn pairs, where there are too many to go through: (dim, dim)."""
    query, key = np.random.default_rng(0).choice(SIGNS, (2, DRAWN_PAIRS, dim))
    return np.asarray((query * key).T @ (query * key) / DRAWN_PAIRS)


def layer_norm(x: Array) -> Array:
    """LayerNorm without gain and bias."""
    return np.asarray((x - x.mean()) / x.std())


def normal_product_moment(power: int) -> float:
    """E[(XY)^power] for independent standard normal X and Y, by Gauss–Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    weights = weights / weights.sum()
    return float(weights @ np.outer(nodes, nodes) ** power @ weights)


def below(x: float) -> float:
    """The standard normal distribution function."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


def t5_spread() -> float:
    """Spread of T5's scores as initialised, with what it multiplies by."""
    return T5.multiplier * head_spread("T5")


def leading_row(keys: int) -> RowStatistics:
    """A row whose first key has just reached a weight of 0.99, the others sharing the rest evenly."""
    return row_statistics([saturation_point(keys)] + [0.0] * (keys - 1))


@cache
def sampled_rows(spread: float) -> RowStatistics:
    """Statistics of seeded rows of independent N(0, spread²) scores over 1024 keys."""
    return row_statistics(spread * np.random.default_rng(0).standard_normal((SAMPLED_ROWS, KEYS)))


def interval(sample: Array) -> tuple[float, float]:
    """The mean of a sample, and half the width of its confidence interval."""
    return float(sample.mean()), float(CONFIDENCE * sample.std(ddof=1) / math.sqrt(sample.size))


def one_hot(scores: Sequence[int]) -> Evidence:
    """Whether the largest of these scores takes a weight of 0.99."""
    top1 = row_statistics(scores).top1.item()
    return Evidence(top1 > SATURATED_TOP1, f"top weight {top1:.2f} for {scores}")


def mostly_one_hot() -> Evidence:
    """Whether most rows of unscaled scores at d_k = 64 give one key a weight of 0.99."""
    share, margin = interval((sampled_rows(SPREAD).top1 > SATURATED_TOP1).astype(np.float64))
    return Evidence(share - margin > 0.5, f"{share:.1%} ± {margin:.1%} of rows over {KEYS} keys give one key 0.99")


def unit_spread_at_start() -> Evidence:
    """Whether scores of drawn vectors, divided by √d_k, have a unit spread, healthy for softmax, at every width."""
    spreads = {dim: drawn_spread(dim).over(math.sqrt(dim)) for dim in DIMS}
    holds = all(found.is_(1.0) and regime(found.std, KEYS) == "healthy" for found in spreads.values())
    stds = [found.std for found in spreads.values()]
    return Evidence(holds, f"spread {min(stds):.2f} to {max(stds):.2f} for d_k from {DIMS[0]} to {DIMS[-1]}, drawn")


def gpt2_scaled_spread() -> Evidence:
    """Whether GPT-2's scaled scores start with unit spread."""
    spread = head_spread("GPT-2") / SPREAD
    return Evidence(abs(spread - 1) < NEAR_ONE, f"spread {spread:.2f} at GPT-2's initialisation, drawn")


def enumerated_is_dim() -> bool:
    """Whether Var(q·k) over every pair of vectors of two distributions is d_k, at every width."""
    cases = ((values, dim) for values in (SIGNS, SKEWED) for dim in DIMS)
    return all(math.isclose(enumerated_variance(values, dim), dim, rel_tol=1e-9) for values, dim in cases)


def grown_past_clipping() -> str:
    """What a published run with 1/√d_k came to."""
    return f"published: the largest score of {GROWN.name} passed {GROWN.max_score:,.0f}"
