"""Claims of the tutorial on the mathematics behind √d_k: its statements, after its numbers."""

import math
from functools import partial

import numpy as np

from attnscale.claims.evidence import (
    DIM,
    DIMS,
    KEYS,
    SIGNS,
    SKEWED,
    SPREAD,
    TINY_GAIN,
    gpt2,
    layer_norm,
    leading_row,
    one_hot,
    products,
    t5_spread,
)
from attnscale.claims.judging import Evidence, Limit, Number, Source, Statement
from attnscale.claims.settings import FULL_SIZE, T5, language_models
from attnscale.claims.worked_numbers import NUMBERS, RAW, SCALED
from attnscale.reference import row_statistics
from attnscale.theory import (
    expected_softmax,
    regime,
    score_mean,
    score_variance,
    unit_variance_scale,
)
from attnscale.theory.limits import SATURATED_TOP1

SOURCE = Source("001_1ca645f500d1eeea.txt", "Math behind √dₖ Scaling Factor in Attention", "tutorial")

STARS = 1e11  # in the Milky Way, at least: from here on a ratio is astronomical
HARDLY = 0.1  # a share of the gradient gain this small hardly matters
FEW_KEYS = 8


def _full_size_dims() -> Evidence:
    dims = sorted({setting.head_dim for setting in language_models(millions=FULL_SIZE)})
    return Evidence(dims[0] >= 64, f"published: {dims[0]} to {dims[-1]} from {FULL_SIZE} million parameters on")


def _smallest_dims() -> Evidence:
    small = [setting for setting in language_models() if setting.millions < FULL_SIZE and setting.head_dim < 64]
    return Evidence(not small, ", ".join(f"{setting.model} {setting.head_dim}" for setting in small))


def _dot_products_grow() -> Evidence:
    narrow, wide = math.sqrt(score_variance(4)), math.sqrt(score_variance(512))
    return Evidence(narrow < wide, f"std {narrow:g} at d_k = 4, {wide:.1f} at d_k = 512")


def _wider_is_worse() -> Evidence:
    gains = [expected_softmax(math.sqrt(dim), KEYS).gradient_gain for dim in (4, *DIMS)]
    return Evidence(
        gains == sorted(gains, reverse=True), f"1 − Σp² from {gains[0]:.2f} at d_k = 4 to {gains[-1]:.2f} at 512"
    )


def _even_heights() -> Evidence:
    low, high = np.linspace(5.0, 5.5, 101).var(), np.linspace(3.0, 7.0, 101).var()
    return Evidence(bool(low < high), f"{low:.3f} against {high:.2f}")


def _crowded_heights() -> Evidence:
    low, high = np.linspace(5.0, 5.5, 101).var(), np.array([3.0, 7.0] + [5.0] * 998).var()
    return Evidence(bool(low < high), f"{low:.3f} against {high:.3f}")


def _layer_norm_centres() -> Evidence:
    normed = layer_norm(np.array(SKEWED) + 1)
    return Evidence(abs(normed.mean()) < 1e-12, f"mean {abs(normed.mean()):.2f} after LayerNorm")


def _rms_norm_centres() -> Evidence:
    x = np.array(SKEWED) + 1
    normed = x / np.sqrt((x**2).mean())
    return Evidence(abs(normed.mean()) < 1e-12, f"mean {normed.mean():.2f} after RMSNorm, as in LLaMA")


def _mean_square() -> Evidence:
    scores = products(SKEWED, 2).sum(-1)
    return Evidence(np.isclose(scores.var(), (scores**2).mean()).item(), f"{scores.var():g} and {(scores**2).mean():g}")


def _always_exact() -> Evidence:
    variances = {(values, dim): products(values, dim).sum(-1).var() for values in (SIGNS, SKEWED) for dim in (1, 2, 3)}
    holds = all(math.isclose(variance, dim) for (_, dim), variance in variances.items())
    return Evidence(holds, "d_k at d_k = 1, 2, 3, enumerated for two distributions")


def _exact_anyway() -> Evidence:
    shifted = score_variance(DIM, query_mean=0.5, key_mean=0.5)
    drawn = gpt2().score_std ** 2
    return Evidence(
        shifted == DIM == drawn, f"{shifted:g} with means of 0.5, {drawn:.2f} at GPT-2's initialisation, for {DIM}"
    )


def _astronomical() -> Evidence:
    ratio = math.exp(50) / math.exp(10)
    return Evidence(ratio > STARS, f"a factor of {ratio:.2g}")


def _still_learns() -> Evidence:
    row = row_statistics([5, 1, 0.5])
    return Evidence(row.gradient_gain.item() > TINY_GAIN, f"1 − Σp² = {row.gradient_gain.item():.3f}, of at most 0.667")


def _expected_one_hot() -> Evidence:
    top1 = expected_softmax(SPREAD, KEYS).top1
    return Evidence(top1 > SATURATED_TOP1, f"{top1:.2f} expected over {KEYS} keys at d_k = {DIM}")


def _saturated_gain() -> Evidence:
    gains = [leading_row(n).gradient_gain.item() for n in (2, 4, KEYS)]
    return Evidence(max(gains) <= TINY_GAIN * (1 + 1e-9), f"1 − Σp² at most {max(gains):.3f} at weight 0.99")


def _expected_gain() -> Evidence:
    gain = expected_softmax(SPREAD, KEYS).gradient_gain
    return Evidence(gain <= TINY_GAIN, f"{gain:.2f} expected over {KEYS} keys at d_k = {DIM}")


def _quotient() -> Evidence:
    scores = products(SKEWED, 3).sum(-1)
    holds = all(math.isclose((scores / c).var(), scores.var() / c**2) for c in (2, 3, 8))
    return Evidence(holds, f"{scores.var():g} becomes {(scores / 2).var():g} for c = 2")


def _divisor() -> Evidence:
    holds = all(math.isclose(unit_variance_scale(score_variance(dim)), 1 / math.sqrt(dim)) for dim in DIMS)
    return Evidence(holds, f"c = {1 / unit_variance_scale(score_variance(DIM)):g} at d_k = {DIM}")


def _divisor_for_gpt2() -> Evidence:
    needed = 1 / gpt2()["calibrated"].scale
    return Evidence(math.isclose(needed, SPREAD, rel_tol=0.01), f"c = {needed:.2f} at GPT-2's initialisation")


def _paper() -> Evidence:
    holds = all(score_mean(dim) == 0 and score_variance(dim) == dim for dim in DIMS)
    return Evidence(holds, "published: its footnote 4 derives mean 0 and variance d_k, as recomputed here")


def _skipping(keys: int) -> Evidence:
    scaled, raw = (expected_softmax(spread, keys).gradient_gain for spread in (1.0, 2.0))
    return Evidence(scaled - raw < HARDLY * scaled, f"1 − Σp² {scaled:.2f} scaled, {raw:.2f} not, over {keys} keys")


def _more_even() -> Evidence:
    raw, scaled = row_statistics(RAW).entropy_ratio.item(), row_statistics(SCALED).entropy_ratio.item()
    return Evidence(scaled > raw, f"H/ln n {raw:.2f} before, {scaled:.2f} after")


def _struggles() -> Evidence:
    regimes = {dim: regime(math.sqrt(dim), KEYS) for dim in DIMS}
    holds = all(regime == "saturated" for regime in regimes.values())
    return Evidence(holds, f"{regimes[DIM]} at every d_k from {DIMS[0]} to {DIMS[-1]}")


def _t5_struggles() -> Evidence:
    spread = t5_spread()
    return Evidence(
        regime(spread, KEYS) != "healthy", f"{T5.model} multiplies by {T5.multiplier:g}, starts at spread {spread:g}"
    )


STATEMENTS = (
    Statement(
        "real-head-dims",
        "Real Transformers have heads of 64, 128 or more dimensions.",
        "64 or more",
        _full_size_dims,
        Limit("for full-size language models", "for small ones", _smallest_dims),
    ),
    Statement(
        "dot-products-grow", "At d_k = 512 dot products are far larger than at 4.", "grows with d_k", _dot_products_grow
    ),
    Statement(
        "wider-is-worse", "The wider the head, the worse an unscaled softmax fares.", "worse with d_k", _wider_is_worse
    ),
    Statement(
        "height-ranges",
        "Heights from 3.0 to 7.0 feet vary more than heights from 5.0 to 5.5.",
        "high against low variance",
        _even_heights,
        Limit("for heights spread evenly over the range", "when nearly all are alike", _crowded_heights),
    ),
    Statement(
        "inputs-normalised",
        "Inputs are usually normalised to mean 0 and variance 1.",
        "mean 0",
        _layer_norm_centres,
        Limit("after LayerNorm", "after RMSNorm, which does not centre", _rms_norm_centres),
    ),
    Statement("mean-square", "At mean zero the variance is the average square.", "equal", _mean_square),
    Statement(
        "variance-always-exact",
        "The variance of q·k is d_k always and exactly, not approximately.",
        "always d_k",
        _always_exact,
        Limit("for independent components of mean 0 and variance 1", "for others", _exact_anyway),
    ),
    Statement("exp-gap", "From e¹⁰ to e⁵⁰ is an astronomical distance.", "astronomical", _astronomical),
    Statement(
        "still-learns", "With scores [5, 1, 0.5] every position can still be learned from.", "not zero", _still_learns
    ),
    Statement(
        "unscaled-one-hot",
        "Unscaled scores of wide heads make softmax almost one-hot.",
        "one weight near 1",
        partial(one_hot, [50, 10, 5]),
        Limit("for the example's scores", "of a typical row at d_k = 64", _expected_one_hot),
    ),
    Statement(
        "unscaled-stops-learning",
        "An unscaled model receives no gradient and does not learn.",
        "almost zero",
        _saturated_gain,
        Limit("of rows with a weight of 0.99", "of a typical row at d_k = 64", _expected_gain),
    ),
    Statement("variance-of-quotient", "Dividing by c divides the variance by c².", "Var/c²", _quotient),
    Statement("divisor-from-variance", "d_k/c² = 1 is solved by c = √d_k.", "√d_k", _divisor),
    Statement(
        "correct-factor",
        "√d_k is mathematically the one correct divisor.",
        "√d_k",
        _divisor,
        Limit("when q and k have unit variance", "when weights start from N(0, 0.02²)", _divisor_for_gpt2),
    ),
    Statement(
        "paper-reason",
        "The Transformer's authors chose √d_k for its effect on the variance.",
        "variance d_k",
        _paper,
        remark="The paper (section 3.2.1) says it suspects, not shows, that softmax suffers.",
    ),
    Statement(
        "small-dim-hardly-matters",
        "At d_k = 4 scaling hardly matters.",
        "little difference",
        lambda: _skipping(KEYS),
        Limit("over many keys", "over few", lambda: _skipping(FEW_KEYS)),
    ),
    Statement("scaled-more-even", "Scaling [14, 10, 12] by 1/8 evens attention out.", "more even", _more_even),
    Statement(
        "struggles-without",
        "Without the division a Transformer would struggle to learn.",
        "needed",
        _struggles,
        Limit("when q and k have unit variance", "when the factor is folded into the query's weights", _t5_struggles),
    ),
)

CLAIMS: tuple[Number | Statement, ...] = (*NUMBERS, *STATEMENTS)
