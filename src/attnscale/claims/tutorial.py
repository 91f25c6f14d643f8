"""Claims of the tutorial on the mathematics behind √d_k: its statements, after its numbers."""

import math
from functools import partial

import numpy as np

from attnscale.claims.draws import drawn_rows, drawn_spread, enumerated_mean, enumerated_variance, head_spread
from attnscale.claims.evidence import (
    DIM,
    DIMS,
    KEYS,
    SKEWED,
    SPREAD,
    TINY_GAIN,
    enumerated_is_dim,
    layer_norm,
    one_hot,
    products,
    t5_spread,
)
from attnscale.claims.judging import Evidence, Limit, Number, Source, Statement
from attnscale.claims.settings import FULL_SIZE, T5, language_models
from attnscale.claims.trained import HEAD_DIMS, LEARNED, WIDE, final_loss, gradients
from attnscale.claims.worked_numbers import NUMBERS, RAW, SCALED
from attnscale.reference import row_statistics
from attnscale.theory import regime
from attnscale.theory.limits import SATURATED_TOP1

SOURCE = Source("tutorial", "Math behind √dₖ Scaling Factor in Attention", "tutorial")

STARS = 1e11  # in the Milky Way, at least: from here on a ratio is astronomical
HARDLY = 0.1  # a share this small hardly matters
FAR_LARGER = 5
FEW_KEYS = 8


def _full_size_dims() -> Evidence:
    dims = sorted({setting.head_dim for setting in language_models(millions=FULL_SIZE)})
    return Evidence(dims[0] >= 64, f"published: {dims[0]} to {dims[-1]} from {FULL_SIZE} million parameters on")


def _smallest_dims() -> Evidence:
    small = [setting for setting in language_models() if setting.millions < FULL_SIZE and setting.head_dim < 64]
    return Evidence(not small, ", ".join(f"{setting.model} {setting.head_dim}" for setting in small))


def _dot_products_grow() -> Evidence:
    narrow, wide = drawn_spread(4).std, drawn_spread(512).std
    return Evidence(wide > FAR_LARGER * narrow, f"std {narrow:.2f} at d_k = 4, {wide:.1f} at d_k = 512, drawn")


def _wider_is_worse() -> Evidence:
    gains = [float(drawn_rows(dim).gradient_gain.mean()) for dim in (4, *DIMS)]
    shown = f"1 − Σp² from {gains[0]:.2f} at d_k = 4 to {gains[-1]:.2f} at 512, drawn"
    return Evidence(gains == sorted(gains, reverse=True), shown)


def _heights() -> Evidence:
    """Students anywhere between the two heights of each class."""
    low, high = (np.linspace(*ends, 101).var() for ends in ((5.0, 5.5), (3.0, 7.0)))
    return Evidence(bool(low < high), f"{low:.3f} against {high:.2f} where heights fill their range evenly")


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
    shown = (
        f"{enumerated_variance(SKEWED, DIM):g} at d_k = {DIM}, over every pair of two distributions, as at all widths"
    )
    return Evidence(enumerated_is_dim(), shown)


def _exact_anyway() -> Evidence:
    shifted, drawn = drawn_spread(DIM, shift=0.5), head_spread("GPT-2") ** 2
    holds = shifted.is_(DIM) and abs(drawn / DIM - 1) < HARDLY
    shown = f"{shifted.variance:.0f} with means of 0.5, {drawn:.1f} at GPT-2's initialisation, drawn, for {DIM}"
    return Evidence(holds, shown)


def _astronomical() -> Evidence:
    ratio = math.exp(50) / math.exp(10)
    return Evidence(ratio > STARS, f"a factor of {ratio:.2g}")


def _still_learns() -> Evidence:
    row = row_statistics([5, 1, 0.5])
    return Evidence(row.gradient_gain.item() > TINY_GAIN, f"1 − Σp² = {row.gradient_gain.item():.3f}, of at most 0.667")


def _typical_one_hot() -> Evidence:
    top1 = float(np.median(drawn_rows(DIM).top1))
    return Evidence(top1 > SATURATED_TOP1, f"{top1:.2f} in the median row over {KEYS} keys at d_k = {DIM}, drawn")


def _most_receive_little() -> Evidence:
    raw, scaled = gradients("none"), gradients("1/√d_k")
    shown = (
        f"before training at d_k = {WIDE} the half of the queries that receives least has {raw['lower_half']:.1%} of "
        f"the gradient, with the scale {scaled['lower_half']:.0%}"
    )
    return Evidence(raw["lower_half"] < HARDLY * scaled["lower_half"], shown)


def _less_in_sum() -> Evidence:
    times = gradients("none")["on_queries"] / gradients("1/√d_k")["on_queries"]
    return Evidence(times < 1, f"in root mean square {times:.0f} times as much arrives")


def _quotient() -> Evidence:
    scores = products(SKEWED, 3).sum(-1)
    holds = all(math.isclose((scores / c).var(), scores.var() / c**2) for c in (2, 3, 8))
    return Evidence(holds, f"{scores.var():g} becomes {(scores / 2).var():g} for c = 2")


def _divisor() -> Evidence:
    """The divisor that brings drawn scores to unit spread is their spread: is it √d_k at every width?"""
    found = {dim: drawn_spread(dim) for dim in DIMS}
    holds = all(spread.over(math.sqrt(dim)).is_(1.0) for dim, spread in found.items())
    return Evidence(holds, f"c = {found[DIM].std:.2f} brings drawn scores of d_k = {DIM} to unit variance")


def _divisor_for_gpt2() -> Evidence:
    needed = head_spread("GPT-2")
    return Evidence(math.isclose(needed, SPREAD, rel_tol=HARDLY), f"c = {needed:.2f} at GPT-2's initialisation, drawn")


def _paper() -> Evidence:
    holds = enumerated_is_dim() and all(abs(enumerated_mean(SKEWED, dim)) < 1e-9 for dim in DIMS)
    return Evidence(holds, "published: its footnote 4 derives mean 0 and variance d_k, as found over every pair here")


def _skipping(keys: int) -> Evidence:
    scaled, raw = (float(drawn_rows(4, divisor, keys).gradient_gain.mean()) for divisor in (2.0, 1.0))
    return Evidence(scaled - raw < HARDLY * scaled, f"1 − Σp² {scaled:.2f} scaled, {raw:.2f} not, over {keys} keys")


def _more_even() -> Evidence:
    raw, scaled = row_statistics(RAW).entropy_ratio.item(), row_statistics(SCALED).entropy_ratio.item()
    return Evidence(scaled > raw, f"H/ln n {raw:.2f} before, {scaled:.2f} after")


def _struggles() -> Evidence:
    losses = {dim: (final_loss(dim, "none"), final_loss(dim)) for dim in (HEAD_DIMS[0], HEAD_DIMS[-1])}
    (narrow, narrow_scaled), (wide, wide_scaled) = losses.values()
    holds = wide - wide_scaled > max(LEARNED, narrow - narrow_scaled)
    shown = ", ".join(f"{raw:.2f} against {scaled:.2f} at d_k = {dim}" for dim, (raw, scaled) in losses.items())
    return Evidence(holds, f"small models end at a loss of {shown}")


def _t5_struggles() -> Evidence:
    spread = t5_spread()
    return Evidence(
        regime(spread, KEYS) != "healthy", f"{T5.model} multiplies by {T5.multiplier:g}, starts at spread {spread:.2f}"
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
        "Heights of students from 3.0 to 7.0 feet vary more than heights from 5.0 to 5.5.",
        "high against low variance",
        _heights,
        remark="An illustration, judged as one.",
    ),
    Statement(
        "inputs-normalised",
        "Inputs are typically normalised to mean 0 and variance 1.",
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
        Limit("for independent components of mean 0 and variance 1", "for others", _exact_anyway, is_stated=True),
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
        Limit("for the example's scores", "of a typical row at d_k = 64", _typical_one_hot),
    ),
    Statement(
        "unscaled-stops-learning",
        "Without scaling gradients become extremely small, almost zero, and learning stops.",
        "almost zero",
        _most_receive_little,
        Limit("of what most queries receive", "in sum", _less_in_sum),
        remark="The gradient is uneven, not gone: most queries pass little, a few pass much.",
    ),
    Statement("variance-of-quotient", "Dividing by c divides the variance by c².", "Var/c²", _quotient),
    Statement("divisor-from-variance", "d_k/c² = 1 is solved by c = √d_k.", "√d_k", _divisor),
    Statement(
        "correct-factor",
        "√d_k is mathematically the correct divisor.",
        "√d_k",
        _divisor,
        Limit(
            "when q and k have unit variance", "when weights start from N(0, 0.02²)", _divisor_for_gpt2, is_stated=True
        ),
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
        "Without the division a Transformer would struggle to learn, especially with larger d_k.",
        "needed, more so when wide",
        _struggles,
        Limit("when q and k have unit variance", "when the factor is folded into the query's weights", _t5_struggles),
    ),
)

CLAIMS: tuple[Number | Statement, ...] = (*NUMBERS, *STATEMENTS)
