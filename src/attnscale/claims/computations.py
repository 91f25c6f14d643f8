"""Computations that claims share: enumerations, seeded draws, heads of real modules, and trained models."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnscale.claims.settings import T5
from attnscale.lab.experiment import Cell, Settings
from attnscale.lab.experiments import divisors
from attnscale.lab.experiments.gradients import MODEL
from attnscale.lab.experiments.trained import PARTS, bundled_loss
from attnscale.lab.outcomes import Band, band
from attnscale.lab.sweep import run_cell
from attnscale.lab.tasks import TASKS, Characters
from attnscale.lab.training import SCALES, Schedule, one_thread, score_summary, seeded_model, trained
from attnscale.models import load_bundled
from attnscale.reference import Array, RowStatistics, row_statistics
from attnscale.theory import saturation_point
from attnscale.theory.limits import SATURATED_TOP1

DIM = 64  # head dimension in the articles' examples, and in GPT-2
KEYS = 1024  # context of GPT-2
DIMS = (16, 32, 64, 128, 256, 512)
SPREAD = math.sqrt(DIM)  # spread of unscaled scores
TINY_GAIN = 1 - SATURATED_TOP1**2  # largest possible 1 − Σp² when one weight is 0.99
NEAR_ONE = 0.05  # a spread within this of one counts as one
PAIRS = 2**14  # random pairs of q and k; the variance has an error of about 2%
ERRORS = 4.0  # tolerance in standard errors; one sample in 16,000 exceeds it by chance
ROWS = 1000  # rows of random scores, each with its own keys
SEEDS = 8  # seeds for comparing gradients
SIGN_PAIRS = 8192  # random pairs; averages of their products have an error below 0.05
D_MODEL, HEADS = 768, 12  # shape of GPT-2
TASK = TASKS["easy recall"]
HEAD_DIMS = (4, 32, 256)
STEPS, RATE, RUNS = 80, 0.005, 8
HOT = 100  # multiple of RATE that is too high
LEARNED = 0.1  # a model has learned if its loss is this many nats below guessing
DEEP, WIDE, DRAWN = 8, 256, 5  # layers, d_k and number of the models for measuring gradients
TEXT = math.log(256)  # loss of guessing a byte, in nats
# Two distributions of mean 0 and variance 1, as lists of equally likely values.
SIGNS = (-1.0, 1.0)
SKEWED = (2.0, -0.5, -0.5, -0.5, -0.5)


# Exact enumerations


@cache
def _score_distribution(values: Sequence[float], dim: int) -> tuple[Array, Array]:
    """Return the possible values of q·k for components from `values`, and their probabilities.

    Products are multiples of a quarter, so the distribution of their sum is a repeated convolution.
    """
    products = np.rint(4 * np.multiply.outer(values, values)).astype(int).ravel()
    low = int(products.min())
    one = np.bincount(products - low) / products.size
    chances = np.ones(1)
    for _ in range(dim):
        chances = np.convolve(chances, one)
    return (np.arange(chances.size) + dim * low) / 4, chances


def enumerated_mean(values: Sequence[float], dim: int) -> float:
    """Return E[q·k] over every pair of vectors."""
    scores, chances = _score_distribution(tuple(values), dim)
    return float(chances @ scores)


def enumerated_variance(values: Sequence[float], dim: int) -> float:
    """Return Var(q·k) over every pair of vectors."""
    scores, chances = _score_distribution(tuple(values), dim)
    return float(chances @ scores**2 - (chances @ scores) ** 2)


def enumerated_is_dim() -> bool:
    """Return True if the exact Var(q·k) is d_k at every width, for both distributions."""
    cases = ((values, dim) for values in (SIGNS, SKEWED) for dim in DIMS)
    return all(math.isclose(enumerated_variance(values, dim), dim, rel_tol=1e-9) for values, dim in cases)


def products(values: Sequence[float], dim: int) -> Array:
    """Return the products q_i k_i for all pairs of vectors with components from `values`: (pairs, dim)."""
    vectors = np.array(list(itertools.product(values, repeat=dim)))
    return np.asarray((vectors[:, None] * vectors[None]).reshape(-1, dim))


def average_terms(dim: int) -> Array:
    """Return the average of each of the dim² terms of (q·k)², over every pair of ±1 vectors: (dim, dim)."""
    terms = products(SIGNS, dim)
    return np.asarray(terms.T @ terms / len(terms))


@cache
def sampled_terms(dim: int) -> Array:
    """Return the averages of average_terms() over random pairs, if there are too many pairs to enumerate."""
    query, key = np.random.default_rng(0).choice(SIGNS, (2, SIGN_PAIRS, dim))
    return np.asarray((query * key).T @ (query * key) / SIGN_PAIRS)


# Random scores


@dataclass(frozen=True)
class Spread:
    """Variance of random scores, with its standard error."""

    variance: float
    error: float

    @property
    def std(self) -> float:
        """Standard deviation."""
        return math.sqrt(self.variance)

    def __format__(self, form: str) -> str:
        """Format the standard deviation, followed by its 95% margin."""
        return f"{self.std:{form}} ± {1.96 * self.error / (2 * self.std):.1g}"

    def agrees_with(self, variance: float) -> bool:
        """Return True if the sample could come from a distribution of this variance."""
        return abs(self.variance - variance) < ERRORS * self.error

    def over(self, divisor: float) -> "Spread":
        """Return the spread of the scores divided by `divisor`."""
        return Spread(self.variance / divisor**2, self.error / divisor**2)


@cache
def drawn_spread(dim: int, shift: float = 0.0) -> Spread:
    """Return the spread of q·k for independent standard normal vectors with `shift` added to each component."""
    rng, scores, parts = np.random.default_rng(dim), [], max(1, PAIRS * dim // 2**21)  # parts that fit into the cache
    for _ in range(parts):
        query, key = rng.standard_normal((2, PAIRS // parts, dim), dtype=np.float32) + np.float32(shift)
        scores.append(np.einsum("ij,ij->i", query, key, dtype=np.float64))
    every = np.concatenate(scores)
    squares = (every - every.mean()) ** 2
    return Spread(float(squares.mean()), float(squares.std(ddof=1) / math.sqrt(squares.size)))


@cache
def drawn_scores(dim: int) -> Array:
    """Return rows of unscaled scores: a query's scores over standard normal keys are normal, with the spread ‖q‖."""
    rng = np.random.default_rng(1000 + dim)
    return np.asarray(np.sqrt(rng.chisquare(dim, (ROWS, 1))) * rng.standard_normal((ROWS, KEYS)))


@cache
def drawn_rows(dim: int, divisor: float = 1.0, keys: int = KEYS) -> RowStatistics:
    """Return the statistics of softmax over the first `keys` drawn scores, divided by `divisor`."""
    return row_statistics(drawn_scores(dim)[:, :keys] / divisor)


def drawn(statistic: str, dim: int, divisor: float = 1.0, keys: int = KEYS) -> Band:
    """Return a statistic of drawn rows: its mean, with its interval."""
    return band(getattr(drawn_rows(dim, divisor, keys), statistic))


def saturated_share(dim: int, divisor: float) -> Band:
    """Return the share of drawn rows that give one key a weight of 0.99."""
    return band(drawn_rows(dim, divisor).top1 > SATURATED_TOP1)


def leading_scores(keys: int) -> list[float]:
    """Return scores that give the first key a weight of 0.99, and the others equal ones."""
    return [saturation_point(keys)] + [0.0] * (keys - 1)


@dataclass(frozen=True)
class WithoutScale:
    """Ratio of gradients without a scale to those with 1/√d_k, and the gradient share of the lower half of queries."""

    on_scores: Band  # median row
    on_query: Band  # median query
    lower_half: Band
    lower_half_scaled: Band


@cache
def gradient_without_scale(dim: int, keys: int) -> WithoutScale:
    """Compare gradients for random q, k, v and output gradients, as `attnscale lab divisors` does."""
    settings: Settings = {"part": divisors.SHAPES, "head_dim": dim, "keys": keys}
    cells = {
        divisor: [run_cell(Cell("divisors", 2, {**settings, "divisor": divisor, "seed": seed})).outcome
                  for seed in range(SEEDS)]
        for divisor in ("none", "√d_k")
    }  # fmt: skip
    return WithoutScale(*map(band, divisors.without_over_with(cells).values()))


# Heads at the initialisation of real modules


WEIGHTS: dict[str, Callable[[], Sequence[Tensor]]] = {  # query and key weights by initialisation
    "GPT-2": lambda: [torch.randn(D_MODEL, D_MODEL) * 0.02 for _ in range(2)],
    # query weights of variance 1/(d_model · d_kv), key weights of 1/d_model
    "T5": lambda: [torch.randn(D_MODEL, D_MODEL) * (D_MODEL * size) ** -0.5 for size in (D_MODEL // HEADS, 1)],
    "nn.Linear": lambda: [nn.Linear(D_MODEL, D_MODEL).weight for _ in range(2)],
    "nn.MultiheadAttention": lambda: nn.MultiheadAttention(D_MODEL, HEADS).in_proj_weight.chunk(3)[:2],
    "Xavier": lambda: [nn.init.xavier_uniform_(torch.empty(D_MODEL, D_MODEL)) for _ in range(2)],
}


@cache
def heads(initialisation: str) -> tuple[Array, Array]:
    """Return queries and keys of 12 heads of 64, projected from normalised inputs by newly initialised weights."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        x = F.layer_norm(torch.randn(KEYS, D_MODEL), (D_MODEL,))
        query, key = WEIGHTS[initialisation]()
        query, key = ((x @ weight.T).unflatten(-1, (HEADS, -1)).transpose(0, 1) for weight in (query, key))
        return query.double().numpy(), key.double().numpy()  # (heads, tokens, d_k)


def head_std(initialisation: str) -> Band:
    """Return the standard deviation of a head's query components, over heads."""
    return band(heads(initialisation)[0].std((1, 2)))


@cache
def head_spread(initialisation: str) -> Band:
    """Return the spread of a head's unscaled scores, over heads."""
    return band((query @ key.T).std() for query, key in zip(*heads(initialisation), strict=True))


def t5_spread() -> float:
    """Return the spread of T5's scores at initialisation, with T5's multiplier."""
    return T5.multiplier * head_spread("T5").mean


# Trained models: small ones at several head sizes, the bundled one, and a deep one before training


@cache
def final_losses(head_dim: int, scale: str, rate: float, steps: int) -> list[float]:
    """Train small models to recall pairs, with one of SCALES; return the validation loss for each seed."""
    losses = []
    for seed in range(RUNS):
        model = seeded_model(TASK.vocabulary, seed, d_model=32, heads=1, head_dim=head_dim, scale=SCALES[scale])
        with one_thread():
            losses.append(trained(model, TASK, Schedule(steps, rate, seed)).end)
    return losses


def final_loss(head_dim: int, scale: str = "1/√d_k", rate: float = RATE) -> Band:
    """Return the validation loss of small models over seeds."""
    return band(final_losses(head_dim, scale, rate, STEPS))


def extra_loss(head_dim: int, scale: str) -> Band:
    """Return the loss of a scale minus that of 1/√d_k after twice the steps, paired by seed."""
    pairs = zip(*(final_losses(head_dim, each, RATE, 2 * STEPS) for each in (scale, "1/√d_k")), strict=True)
    return band(own - root for own, root in pairs)


def has_learned(loss: Band) -> bool:
    """Return True if a loss is finite and clearly below that of guessing."""
    return loss.high < TASK.chance - LEARNED


@cache
def bundled(scale: str) -> Band:
    """Return the loss of the bundled model, trained with 1/√d_k, on held-out text with one of SCALES."""
    with one_thread():
        return band(bundled_loss(scale, part) for part in range(PARTS))


@cache
def bundled_scores() -> dict[str, float]:
    """Return the spread and the largest score of the bundled model on held-out text."""
    model, _ = load_bundled()
    with one_thread():
        return score_summary(model, Characters(model.context), size=1)


@cache
def gradients(scale: str) -> dict[str, Band]:
    """Measure the gradient on W_q of deep models with wide heads before training, as in the lab."""
    settings: Settings = {"part": MODEL, "layers": DEEP, "head_dim": WIDE, "scale": scale}
    found = [run_cell(Cell("gradients", 5, {**settings, "seed": seed})).outcome for seed in range(DRAWN)]
    return {name: band(each[name] for each in found) for name in ("first_query", "backwards")}
