"""What is drawn, not derived: scores of random vectors, and of heads as real modules initialise them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import nn

from attnscale.reference import Array, RowStatistics, row_statistics

PAIRS = 2**14  # of q and k, for a variance within about 2%
ERRORS = 4.0  # standard errors either side: one sample in 16,000 lies outside
QUERIES, KEYS = 256, 1024  # of a table of scores; GPT-2's context
D_MODEL, HEADS = 768, 12  # GPT-2's


@dataclass(frozen=True)
class Spread:
    """The variance of drawn scores, with its error."""

    variance: float
    error: float

    @property
    def std(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.variance)

    def is_(self, variance: float) -> bool:
        """Whether the sample could have this variance."""
        return abs(self.variance - variance) < ERRORS * self.error

    def over(self, divisor: float) -> "Spread":
        """Of the same scores, divided."""
        return Spread(self.variance / divisor**2, self.error / divisor**2)


@cache
def drawn_spread(dim: int, shift: float = 0.0) -> Spread:
    """Of q·k over independent pairs of standard normal vectors, each component moved by `shift`."""
    rng, scores = np.random.default_rng(dim), []
    for _ in range(max(1, PAIRS * dim // 2**21)):  # in parts that fit a cache
        count = PAIRS // max(1, PAIRS * dim // 2**21)
        query, key = rng.standard_normal((2, count, dim), dtype=np.float32) + np.float32(shift)
        scores.append(np.einsum("ij,ij->i", query, key, dtype=np.float64))
    return spread_of(np.concatenate(scores))


def spread_of(scores: Array) -> Spread:
    """The variance of a sample; its error by the fourth moment."""
    squares = (scores - scores.mean()) ** 2
    return Spread(float(squares.mean()), float(squares.std(ddof=1) / math.sqrt(squares.size)))


@cache
def drawn_scores(dim: int) -> Array:
    """A table of unscaled scores of standard normal queries and keys."""
    rng = np.random.default_rng(1000 + dim)
    return np.asarray(rng.standard_normal((QUERIES, dim)) @ rng.standard_normal((KEYS, dim)).T)


@cache
def drawn_rows(dim: int, divisor: float = 1.0, keys: int = KEYS) -> RowStatistics:
    """What softmax makes of those scores, divided by this, over the first so many keys."""
    return row_statistics(drawn_scores(dim)[:, :keys] / divisor)


@cache
def score_distribution(values: Sequence[float], dim: int) -> tuple[Array, Array]:
    """q·k over every pair of vectors with components from `values`: what it can be, and how often.

    Products lie on a grid of quarters; the sum of dim of them is their distribution folded dim times.
    """
    products = np.rint(4 * np.multiply.outer(values, values)).astype(int).ravel()
    low = int(products.min())
    one = np.bincount(products - low) / products.size
    chances = np.ones(1)
    for _ in range(dim):
        chances = np.convolve(chances, one)
    return (np.arange(chances.size) + dim * low) / 4, chances


def enumerated_variance(values: Sequence[float], dim: int) -> float:
    """Var(q·k) over every such pair."""
    scores, chances = score_distribution(tuple(values), dim)
    return float(chances @ scores**2 - (chances @ scores) ** 2)


def enumerated_mean(values: Sequence[float], dim: int) -> float:
    """E[q·k] over every such pair."""
    scores, chances = score_distribution(tuple(values), dim)
    return float(chances @ scores)


@cache
def head(initialisation: str) -> tuple[Array, Array]:
    """Queries and keys of one head of 64, from normalised inputs, as a module's own initialisation projects them."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        x = nn.functional.layer_norm(torch.randn(KEYS, D_MODEL), (D_MODEL,))
        query, key = WEIGHTS[initialisation]()
        width = D_MODEL // HEADS
        return (x @ query.T)[:, :width].double().numpy(), (x @ key.T)[:, :width].double().numpy()


def _gpt2() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(D_MODEL, D_MODEL) * 0.02, torch.randn(D_MODEL, D_MODEL) * 0.02


def _t5() -> tuple[torch.Tensor, torch.Tensor]:
    """T5 draws query weights of variance 1/(d_model · d_kv) and key weights of 1/d_model."""
    query, key = (torch.randn(D_MODEL, D_MODEL) * D_MODEL**-0.5 for _ in range(2))
    return query * (D_MODEL // HEADS) ** -0.5, key


def _linear() -> tuple[torch.Tensor, torch.Tensor]:
    return nn.Linear(D_MODEL, D_MODEL).weight, nn.Linear(D_MODEL, D_MODEL).weight


def _packed() -> tuple[torch.Tensor, torch.Tensor]:
    query, key, _ = nn.MultiheadAttention(D_MODEL, HEADS).in_proj_weight.chunk(3)
    return query, key


def _xavier() -> tuple[torch.Tensor, torch.Tensor]:
    query, key = (nn.init.xavier_uniform_(torch.empty(D_MODEL, D_MODEL)) for _ in range(2))
    return query, key


WEIGHTS = {"GPT-2": _gpt2, "T5": _t5, "nn.Linear": _linear, "nn.MultiheadAttention": _packed, "Xavier": _xavier}


def head_std(initialisation: str) -> float:
    """The spread of a head's query components as initialised."""
    return float(head(initialisation)[0].std())


def head_spread(initialisation: str) -> float:
    """The spread of its unscaled scores."""
    query, key = head(initialisation)
    return float((query @ key.T).std())
