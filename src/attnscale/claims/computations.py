"""Computations and judgements that claims share: enumerations, draws, heads of real modules, trained models."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike

from attnscale.claims.judging import Evidence, Limit
from attnscale.claims.settings import T5
from attnscale.lab.experiment import Cell, Setting
from attnscale.lab.experiments import EXPERIMENTS
from attnscale.lab.experiments.divisors import SHAPES, WithoutScale, without_scale
from attnscale.lab.experiments.gradients import MODEL
from attnscale.lab.experiments.initialisation import SCHEMES
from attnscale.lab.experiments.trained import AT_ONCE, BUNDLED, PARTS
from attnscale.lab.outcomes import Band, Outcomes, band
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
MARGINS = 2.0  # tolerance in margins; one draw in 500 exceeds it by chance
ROWS = 1000  # rows of random scores, each with its own keys
SEEDS = 8  # of the lab's cells
SIGN_PAIRS = 8192  # random pairs; averages of their products have an error below 0.05
D_MODEL, HEADS = 768, 12  # shape of GPT-2
MODULES = {"GPT-2": "normal(0.02)", "nn.MultiheadAttention": "Xavier packed"}  # as the lab names their weights
TASK = TASKS["easy recall"]
HEAD_DIMS = (4, 32, 256)
STEPS, RATE, RUNS = 80, 0.005, 8
HOT = 100  # multiple of RATE that is too high
LEARNED = 0.1  # a model has learned if its loss is this many nats below guessing
DEEP, WIDE, DRAWN = 8, 256, 5  # layers, d_k and number of the models for measuring gradients
TEXT = math.log(256)  # loss of guessing a byte, in nats
UNIT = "when q and k have unit variance"
NEGLIGIBLE_GRADIENT = 0.1  # of the gradient with 1/√d_k
SYMBOLS = {"top1": "largest weight", "jacobian_trace": "1 − Σp²", "effective_keys": "effective keys"}
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


@cache
def lab_cells(experiment: str, seeds: int, **settings: Setting) -> Outcomes:
    """Run cells of an experiment of the lab."""
    version = EXPERIMENTS[experiment].version
    cells = [Cell(experiment, version, {**settings, "seed": seed}) for seed in range(seeds)]
    return Outcomes([(cell.settings, run_cell(cell).outcome) for cell in cells])


def drawn_pairs(dim: int, case: str = "normal") -> Outcomes:
    """Draw pairs of q and k with independent components, as `attnscale lab variance` does."""
    return lab_cells("variance", SEEDS, case=case, head_dim=dim)


def drawn_spread(dim: int, divisor: float = 1.0) -> Band:
    """Return the spread of q·k over a divisor, for independent standard normal vectors."""
    return band(math.sqrt(variance) / divisor for variance in drawn_pairs(dim).samples("variance"))


def agrees(found: Band, value: float) -> bool:
    """Return True if a drawn number could have this expectation."""
    return abs(found.mean - value) < MARGINS * found.margin


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


@cache
def gradient_without_scale(dim: int, keys: int) -> WithoutScale:
    """Compare gradients for random q, k, v and output gradients, as `attnscale lab divisors` does."""
    shape: dict[str, Setting] = {"part": SHAPES, "head_dim": dim, "keys": keys}
    cells = [lab_cells("divisors", SEEDS, divisor=divisor, **shape).cells for divisor in ("none", "√d_k")]
    return without_scale(Outcomes([*cells[0], *cells[1]]))


# Heads at the initialisation of real modules


@cache
def heads(initialisation: str) -> tuple[Array, Array]:
    """Return queries and keys of 12 heads of 64, projected from normalised inputs by newly initialised weights."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        x = F.layer_norm(torch.randn(KEYS, D_MODEL), (D_MODEL,))
        query, key = SCHEMES[MODULES.get(initialisation, initialisation)].project(x, HEADS)
        return query.double().numpy(), key.double().numpy()  # (heads, tokens, d_k)


def head_std(initialisation: str) -> Band:
    """Return the standard deviation of a head's query components, over heads."""
    return band(heads(initialisation)[0].std((1, 2)))


@cache
def head_spread(initialisation: str) -> Band:
    """Return the spread of a head's unscaled scores, over heads."""
    return band((query @ key.T).std() for query, key in zip(*heads(initialisation), strict=True))


def t5_spread() -> float:
    """Return the spread of T5's scores at initialisation: its query weights are 1/√d_k times those of muP."""
    return T5.multiplier * head_spread("muP").mean / math.sqrt(DIM)


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


def bundled(scale: str) -> Band:
    """Return the loss of the bundled model, trained with 1/√d_k, on held-out text with one of SCALES."""
    return lab_cells("trained", PARTS, part=BUNDLED).band(f"{scale} {AT_ONCE}")


@cache
def bundled_scores() -> dict[str, float]:
    """Return the spread and the largest score of the bundled model on held-out text."""
    model, _ = load_bundled()
    with one_thread():
        return score_summary(model, Characters(model.context), size=1)


def gradients(scale: str) -> dict[str, Band]:
    """Measure the gradient on W_q of deep models with wide heads before training, as in the lab."""
    found = lab_cells("gradients", DRAWN, part=MODEL, layers=DEEP, head_dim=WIDE, scale=scale)
    return {name: found.band(name) for name in ("first_query", "backwards")}


# Judgements that claims share: each computes numbers, compares them with the claim, and shows them


def ordered(what: str, values: Mapping[str, Band | float], form: str) -> Evidence:
    """Test if each value is below the next one, beyond the error of both."""
    bands = [value if isinstance(value, Band) else Band(value, 0.0, 0) for value in values.values()]
    shown = ", ".join(f"{value:{form}} {name}" for name, value in values.items())
    return Evidence(all(low.high < high.low for low, high in pairwise(bands)), f"{what} {shown}")


def near_one(what: str, values: Mapping[str, Band | float]) -> Evidence:
    """Test if every value is within 0.05 of one."""
    means = [value.mean if isinstance(value, Band) else value for value in values.values()]
    shown = ", ".join(f"{value:.2f} ({name})" for name, value in values.items())
    return Evidence(all(abs(mean - 1) < NEAR_ONE for mean in means), f"{what} {shown}")


def published(found: Iterable[object], holds: bool) -> Evidence:
    """Show the published models that were found."""
    return Evidence(holds, f"published: {', '.join(map(str, found)) or 'none here'}")


def published_some(found: Sequence[object], at_least: int = 1) -> Evidence:
    """Test if enough published models were found."""
    return published(found, len(found) >= at_least)


def published_none(found: Sequence[object]) -> Evidence:
    """Test if no published model was found; a model is shown with its multiplier times √d_k."""
    return published(found, not found)


def row_has(scores: ArrayLike, statistic: str, *, above: float = -math.inf, below: float = math.inf) -> Evidence:
    """Test if a statistic of one row of scores is within limits."""
    value = getattr(row_statistics(scores), statistic).item()
    return Evidence(above < value < below, f"{SYMBOLS[statistic]} {value:#.3g}")


def is_softer(before: ArrayLike, after: ArrayLike) -> Evidence:
    """Test if the weights of the second row of scores are more even than those of the first."""
    keys = {name: row_statistics(row).effective_keys.item() for name, row in (("before", before), ("after", after))}
    return ordered("effective keys", keys, ".2f")


def drawn_spread_is(power: float, *dims: int) -> Evidence:
    """Test if random scores, divided by d_k to a power, have the standard deviation √d_k over the divisor."""
    spreads = {dim: drawn_spread(dim, dim**power) for dim in dims}
    holds = all(agrees(spread, dim ** (0.5 - power)) for dim, spread in spreads.items())
    ends = dict.fromkeys((dims[0], dims[-1]))
    return Evidence(holds, "drawn: spread " + ", ".join(f"{spreads[dim]:#.3g} at d_k = {dim}" for dim in ends))


def mostly_one_hot() -> Evidence:
    """Test if most rows of unscaled scores at d_k = 64 give one key a weight of 0.99."""
    share = saturated_share(DIM, 1.0)
    return Evidence(share.low > 0.5, f"drawn at d_k = {DIM}: {share:.1%} of rows over {KEYS} keys give one key 0.99")


def gpt2_scaled_spread() -> Evidence:
    """Test if GPT-2's scaled scores start with a spread of one."""
    return near_one("spread", {"GPT-2": head_spread("GPT-2").mean / SPREAD})


def layer_norm_centres() -> Evidence:
    """Test if LayerNorm, without gain and bias, gives mean 0 and variance 1."""
    x = np.array(SKEWED) + 1
    normed = (x - x.mean()) / x.std()
    shown = f"mean {abs(normed.mean()):.2f} and std {normed.std():.2f} after LayerNorm"
    return Evidence(np.allclose([normed.mean(), normed.std()], [0, 1]), shown)


def softmax_passes_little() -> Evidence:
    """Test if the gradient on the scores of the median row is small without a scale, at a large d_k."""
    found = gradient_without_scale(512, 64).on_scores
    shown = f"median row at d_k = 512 over 64 keys: {found:.2g} times that with it"
    return Evidence(found.high < NEGLIGIBLE_GRADIENT, shown)


def queries_receive_little() -> Evidence:
    """Test if the gradient on the median query is small without a scale, at the d_k of most models."""
    found = gradient_without_scale(DIM, 64)
    shown = (
        f"median query at d_k = {DIM} over 64 keys: {found.on_query:.2g} times, the lower half of the queries sharing "
        f"{found.lower_half:.1%} instead of {found.lower_half_scaled:.0%}"
    )
    return Evidence(found.on_query.high < NEGLIGIBLE_GRADIENT, shown)


AT_GPT2 = Limit(UNIT, "when weights start from N(0, 0.02²)", gpt2_scaled_spread, is_stated=True)
AT_SOFTMAX = Limit(
    "of the gradient on most rows' scores, where √d_k is much larger than √(2 ln n)",
    "of the gradient on queries, which is larger without a scale but shared less evenly",
    queries_receive_little,
)
