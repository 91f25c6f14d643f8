"""Claims of the tutorial on the mathematics behind √d_k: its statements, then its numbers."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from attnscale.claims import computations as compute
from attnscale.claims.computations import (
    AT_SOFTMAX,
    DIM,
    DIMS,
    KEYS,
    SIGNS,
    SKEWED,
    SPREAD,
    TINY_GAIN,
    average_terms,
    final_loss,
    products,
)
from attnscale.claims.judging import Evidence, Limit, Source
from attnscale.claims.settings import FULL_SIZE, T5, language_models
from attnscale.lab.outcomes import band
from attnscale.reference import Array, row_statistics, softmax
from attnscale.theory import regime
from attnscale.theory.limits import SATURATED_TOP1

SOURCE = Source("tutorial", "Math behind √dₖ Scaling Factor in Attention", "tutorial")

STARS = 1e11  # stars in the Milky Way; a larger ratio is astronomical
LITTLE = 0.1  # a smaller share hardly matters
FAR_LARGER = 5
FEW_KEYS = 8
NEAR = 0.1  # tolerance for averages of random draws with an exact value of 0 or 1
PROOF_DIM = 3  # the proof expands (q·k)² for this d_k, then for DIM

TRIPLE, HALVED = np.array([2.0, 4.0, 6.0]), np.array([1.0, 2.0, 3.0])
QUERY, KEY = np.array([1.0, 0.0, 1.0, 0.0]), np.array([0.0, 1.0, 1.0, 1.0])
RAW = np.array([14.0, 10.0, 12.0])
SCALED = RAW / math.sqrt(DIM)


def _smallest_dims() -> Evidence:
    small = [setting for setting in language_models() if setting.millions < FULL_SIZE and setting.head_dim < 64]
    return Evidence(not small, ", ".join(f"{setting.model} {setting.head_dim}" for setting in small))


SOURCE.section("What Happens Without Scaling?")


@SOURCE.claim(
    "real-head-dims", "Real Transformers have heads of 64, 128 or more dimensions.", "64 or more",
    limit=Limit("for full-size language models", "for small ones", _smallest_dims),
)  # fmt: skip
def _full_size_dims() -> Evidence:
    dims = sorted({setting.head_dim for setting in language_models(millions=FULL_SIZE)})
    return Evidence(dims[0] >= 64, f"published: {dims[0]} to {dims[-1]} from {FULL_SIZE} million parameters on")


SOURCE.section("Why Do Dot Products Grow with dₖ?")


@SOURCE.claim("dot-products-grow", "At d_k = 512 dot products are far larger than at 4.", "grows with d_k")
def _dot_products_grow() -> Evidence:
    narrow, wide = compute.drawn_spread(4), compute.drawn_spread(512)
    return Evidence(wide.std > FAR_LARGER * narrow.std, f"drawn: std {narrow:.2f} at d_k = 4, {wide:.1f} at d_k = 512")


@SOURCE.claim("wider-is-worse", "The wider the head, the worse an unscaled softmax fares.", "worse with d_k")
def _wider_is_worse() -> Evidence:
    traces = [band(compute.drawn_rows(dim).jacobian_trace) for dim in (4, *DIMS)]
    shown = f"drawn: 1 − Σp² from {traces[0]:.2f} at d_k = 4 to {traces[-1]:.2f} at 512"
    return Evidence(all(wider.high < narrower.low for narrower, wider in pairwise(traces)), shown)


SOURCE.section("Understanding Variance of the Dot Product")


@SOURCE.claim(
    "height-ranges", "Heights of students from 3.0 to 7.0 feet vary more than heights from 5.0 to 5.5.",
    "high against low variance", remark="An illustration, judged as one.",
)  # fmt: skip
def _heights() -> Evidence:
    low, high = (np.linspace(*ends, 101).var() for ends in ((5.0, 5.5), (3.0, 7.0)))
    return Evidence(bool(low < high), f"{low:.3f} against {high:.2f} for heights spread evenly over their range")


def _rms_norm_centres() -> Evidence:
    x = np.array(SKEWED) + 1
    normed = x / np.sqrt((x**2).mean())
    return Evidence(abs(normed.mean()) < 1e-12, f"mean {normed.mean():.2f} after RMSNorm, as in LLaMA")


@SOURCE.claim(
    "inputs-normalised", "Inputs are typically normalised to mean 0 and variance 1.", "mean 0",
    limit=Limit("after LayerNorm", "after RMSNorm, which does not subtract the mean", _rms_norm_centres),
)  # fmt: skip
def _layer_norm_centres() -> Evidence:
    normed = compute.layer_norm(np.array(SKEWED) + 1)
    return Evidence(abs(normed.mean()) < 1e-12, f"mean {abs(normed.mean()):.2f} after LayerNorm")


SOURCE.section("Proving It Step by Step")


@SOURCE.claim("mean-square", "At mean zero the variance is the average square.", "equal")
def _mean_square() -> Evidence:
    scores = compute.products(SKEWED, 2).sum(-1)
    return Evidence(np.isclose(scores.var(), (scores**2).mean()).item(), f"{scores.var():g} and {(scores**2).mean():g}")


def _exact_anyway() -> Evidence:
    shifted, drawn = compute.drawn_spread(DIM, shift=0.5), compute.head_spread("GPT-2").mean ** 2
    holds = shifted.agrees_with(DIM) and abs(drawn / DIM - 1) < LITTLE
    margin = 1.96 * shifted.error
    shown = f"{shifted.variance:.0f} ± {margin:.1g} with means of 0.5; {drawn:.1f} at GPT-2's initialisation"
    return Evidence(holds, shown)


@SOURCE.claim(
    "variance-always-exact", "The variance of q·k is d_k always and exactly, not approximately.", "always d_k",
    limit=Limit("for independent components of mean 0 and variance 1", "for others", _exact_anyway, is_stated=True),
)  # fmt: skip
def _always_exact() -> Evidence:
    shown = (
        f"{compute.enumerated_variance(SKEWED, DIM):g} at d_k = {DIM} over every pair of vectors of two distributions"
    )
    return Evidence(compute.enumerated_is_dim(), shown)


SOURCE.section("What Large Dot Products Do to Softmax")


@SOURCE.claim("exp-gap", "From e¹⁰ to e⁵⁰ is an astronomical distance.", "astronomical")
def _astronomical() -> Evidence:
    ratio = math.exp(50) / math.exp(10)
    return Evidence(ratio > STARS, f"a factor of {ratio:.2g}")


@SOURCE.claim("still-learns", "With scores [5, 1, 0.5] every position can still be learned from.", "not zero")
def _still_learns() -> Evidence:
    gain = row_statistics([5, 1, 0.5]).jacobian_trace.item()
    return Evidence(gain > TINY_GAIN, f"1 − Σp² = {gain:.3f}, of at most 0.667")


def _typical_one_hot() -> Evidence:
    top1 = band(compute.drawn_rows(DIM).top1)
    return Evidence(top1.mean > SATURATED_TOP1, f"drawn: {top1:.2f} on average over {KEYS} keys at d_k = {DIM}")


@SOURCE.claim(
    "unscaled-one-hot", "Unscaled scores of wide heads make softmax almost one-hot.", "one weight near 1",
    limit=Limit("for the example's scores", "for a typical row at d_k = 64", _typical_one_hot),
)  # fmt: skip
def _example_one_hot() -> Evidence:
    top1 = row_statistics([50, 10, 5]).top1.item()
    return Evidence(top1 > SATURATED_TOP1, f"largest weight {top1:.2f} for [50, 10, 5]")


SOURCE.claim(
    "unscaled-stops-learning",
    "Without scaling gradients become extremely small, almost zero, and learning stops.", "almost zero",
    limit=AT_SOFTMAX, remark="Gradient without a scale over gradient with it, for random q, k and v.",
)(compute.softmax_passes_little)  # fmt: skip


SOURCE.section("Why √dₖ is the Right Scaling Factor")


@SOURCE.claim("variance-of-quotient", "Dividing by c divides the variance by c².", "Var/c²")
def _quotient() -> Evidence:
    scores = compute.products(SKEWED, 3).sum(-1)
    holds = all(math.isclose((scores / c).var(), scores.var() / c**2) for c in (2, 3, 8))
    return Evidence(holds, f"{scores.var():g} becomes {(scores / 2).var():g} for c = 2")


@SOURCE.claim("divisor-from-variance", "d_k/c² = 1 is solved by c = √d_k.", "√d_k")
def _divisor() -> Evidence:
    found = {dim: compute.drawn_spread(dim) for dim in DIMS}
    holds = all(spread.over(math.sqrt(dim)).agrees_with(1.0) for dim, spread in found.items())
    return Evidence(holds, f"c = {found[DIM]:.2f} brings drawn scores of d_k = {DIM} to unit variance")


def _divisor_for_gpt2() -> Evidence:
    needed = compute.head_spread("GPT-2")
    return Evidence(math.isclose(needed.mean, SPREAD, rel_tol=LITTLE), f"c = {needed:.2f} at GPT-2's initialisation")


SOURCE.claim(
    "correct-factor", "√d_k is mathematically the correct divisor.", "√d_k",
    limit=Limit("when q and k have unit variance", "when weights start from N(0, 0.02²)", _divisor_for_gpt2,
                is_stated=True),
)(_divisor)  # fmt: skip


@SOURCE.claim(
    "paper-reason", "The Transformer's authors chose √d_k for its effect on the variance.", "variance d_k",
    remark="The paper (section 3.2.1) says that it suspects, not shows, that softmax suffers.",
)  # fmt: skip
def _paper() -> Evidence:
    holds = compute.enumerated_is_dim() and all(abs(compute.enumerated_mean(SKEWED, dim)) < 1e-9 for dim in DIMS)
    return Evidence(holds, "published: footnote 4 derives mean 0 and variance d_k, as found here over every pair")


def _skipping(keys: int) -> Evidence:
    scaled, raw = (band(compute.drawn_rows(4, divisor, keys).jacobian_trace) for divisor in (2.0, 1.0))
    shown = f"over {keys} keys: 1 − Σp² {scaled:.2f} with the scale, {raw:.2f} without"
    return Evidence(scaled.mean - raw.mean < LITTLE * scaled.mean, shown)


SOURCE.section("Seeing It with Real Numbers")


SOURCE.claim(
    "small-dim-hardly-matters", "At d_k = 4 scaling hardly matters.", "little difference",
    limit=Limit("over many keys", "over few", lambda: _skipping(FEW_KEYS)),
)(lambda: _skipping(KEYS))  # fmt: skip


@SOURCE.claim("scaled-more-even", "Scaling [14, 10, 12] by 1/8 makes attention more even.", "more even")
def _more_even() -> Evidence:
    raw, scaled = row_statistics(RAW).entropy_ratio.item(), row_statistics(SCALED).entropy_ratio.item()
    return Evidence(scaled > raw, f"entropy {raw:.0%} of its maximum before, {scaled:.0%} after")


def _t5_struggles() -> Evidence:
    shown = f"{T5.model} multiplies by {T5.multiplier:g} and starts with a spread of {compute.t5_spread():.2f}"
    return Evidence(regime(compute.t5_spread(), KEYS) != "healthy", shown)


SOURCE.section("Putting It All Together")


@SOURCE.claim(
    "struggles-without",
    "Without the division a Transformer would struggle to learn, especially with larger d_k.",
    "needed, more so when wide",
    limit=Limit("when q and k have unit variance", "when the query's weights contain the factor", _t5_struggles),
)  # fmt: skip
def _struggles() -> Evidence:
    losses = {dim: (final_loss(dim, "none"), final_loss(dim)) for dim in (compute.HEAD_DIMS[0], compute.HEAD_DIMS[-1])}
    (narrow, narrow_scaled), (wide, wide_scaled) = losses.values()
    shown = ", ".join(f"{raw:.2f} against {scaled:.2f} at d_k = {dim}" for dim, (raw, scaled) in losses.items())
    holds = wide.low - wide_scaled.high > max(compute.LEARNED, narrow.mean - narrow_scaled.mean)
    return Evidence(holds, f"small models end at a loss of {shown}")


# Numbers in the tutorial's calculations


def _squares(values: Array) -> Array:
    return np.asarray((values - values.mean()) ** 2)


def _counted(dim: int, average: float) -> int:
    """Count the terms of (q·k)² that have this average over every pair."""
    return _counted_in(average_terms(dim), average)


def _counted_in(terms: Array, average: float) -> int:
    return int((abs(terms - average) < NEAR).sum())


def _summed(scores: Sequence[float] | Array) -> float:
    return float(np.exp(scores).sum())


SOURCE.section("Proving It Step by Step")

SOURCE.numbers(
    ("product-mean", "Mean of one product q_i·k_i.", "0", lambda: products(SIGNS, 1).mean()),
    ("product-variance", "Variance of one product q_i·k_i.", "1", lambda: products(SIGNS, 1).var()),
    ("score-mean", "Mean of q·k when components have mean 0.", "0", lambda: compute.enumerated_mean(SIGNS, DIM)),
    ("average-square", "Average square of a component of mean 0 and variance 1.", "1", lambda: np.square(SIGNS).mean()),
    ("terms-3", "Terms of the squared dot product at d_k = 3.", "9", lambda: average_terms(PROOF_DIM).size),
    ("own-terms-3", "Of the terms at d_k = 3, squares of one product.", "3", lambda: _counted(PROOF_DIM, 1.0)),
    ("own-average", "Average of the square of one product.", "1 1 1", lambda: np.diag(average_terms(PROOF_DIM))),
    ("cross-terms-3", "Of the terms at d_k = 3, mixed ones.", "6", lambda: _counted(PROOF_DIM, 0.0)),
    ("cross-average", "Average of each mixed term at d_k = 3.", "0 0 0 0 0 0",
     lambda: average_terms(PROOF_DIM)[~np.eye(PROOF_DIM, dtype=bool)]),
    ("variance-3", "Variance of q·k at d_k = 3, as the sum of all terms.", "3", lambda: average_terms(PROOF_DIM).sum()),
    ("terms-64", "Terms of the squared dot product at d_k = 64.", "4096", lambda: compute.sampled_terms(DIM).size),
    ("own-terms-64", "Of the terms at d_k = 64, squares of one product.", "64",
     lambda: _counted_in(compute.sampled_terms(DIM), 1.0)),
    ("cross-terms-64", "Of the terms at d_k = 64, mixed ones.", "4032",
     lambda: _counted_in(compute.sampled_terms(DIM), 0.0)),
    ("variance-64", "Variance of q·k at d_k = 64.", "64", lambda: compute.enumerated_variance(SIGNS, DIM)),
)  # fmt: skip

SOURCE.section("What Large Dot Products Do to Softmax")

SOURCE.numbers(
    ("euler", "The constant e.", "2.718", lambda: math.e),
    ("exp-1", "e to the 1.", "2.718", lambda: math.exp(1)),
    ("exp-5", "e to the 5.", "148.4", lambda: math.exp(5)),
    ("exp-10", "e to the 10.", "22,026", lambda: math.exp(10)),
    ("exp-20", "e to the 20.", "485,165,195", lambda: math.exp(20)),
    ("exp-50", "e to the 50.", "5,184,705,528,587,072,045", lambda: math.exp(50),
     "The printed digits are those of the float64 result without the last three."),
    ("exp-5-whole", "e to the 5, to a whole number.", "148", lambda: math.exp(5)),
    ("softmax-50-10-5", "Softmax of [50, 10, 5].", "1.0 0.0 0.0", lambda: softmax([50, 10, 5])),
    ("exp-half", "e to the ½.", "1.649", lambda: math.exp(0.5)),
    ("sum-5-1-half", "Sum of the exponentials of [5, 1, 0.5].", "152.780", lambda: _summed([5, 1, 0.5])),
    ("softmax-5-1-half", "Softmax of [5, 1, 0.5].", "0.971 0.018 0.011", lambda: softmax([5, 1, 0.5])),
)  # fmt: skip

SOURCE.section("Why √dₖ is the Right Scaling Factor")

SOURCE.numbers(
    ("mean-2-4-6", "Mean of [2, 4, 6].", "4", TRIPLE.mean),
    ("differences-2-4-6", "Distances of [2, 4, 6] from their mean.", "-2 0 2", lambda: TRIPLE - TRIPLE.mean()),
    ("squares-2-4-6", "Squared distances of [2, 4, 6] from their mean.", "4 0 4", lambda: _squares(TRIPLE)),
    ("variance-2-4-6", "Variance of [2, 4, 6].", "2.67", TRIPLE.var),
    ("halved-2-4-6", "[2, 4, 6] divided by 2.", "1 2 3", lambda: TRIPLE / 2),
    ("mean-1-2-3", "Mean of [1, 2, 3].", "2", HALVED.mean),
    ("differences-1-2-3", "Distances of [1, 2, 3] from their mean.", "-1 0 1", lambda: HALVED - HALVED.mean()),
    ("squares-1-2-3", "Squared distances of [1, 2, 3] from their mean.", "1 0 1", lambda: _squares(HALVED)),
    ("variance-1-2-3", "Variance of [1, 2, 3].", "0.67", HALVED.var),
    ("variance-ratio", "Factor by which halving the values divides their variance.", "4",
     lambda: TRIPLE.var() / HALVED.var()),
)  # fmt: skip

SOURCE.section("Seeing It with Real Numbers")

SOURCE.numbers(
    ("dot-4", "Dot product of [1, 0, 1, 0] and [0, 1, 1, 1].", "1", lambda: QUERY @ KEY),
    ("root-4", "The square root of d_k = 4.", "2", lambda: math.sqrt(QUERY.size)),
    ("scaled-dot-4", "Dot product 1, divided by √4.", "0.5", lambda: QUERY @ KEY / math.sqrt(QUERY.size)),
    ("exp-14", "e to the 14.", "1,202,604", lambda: math.exp(14)),
    ("exp-12", "e to the 12.", "162,755", lambda: math.exp(12)),
    ("sum-14-10-12", "Sum of the exponentials of [14, 10, 12].", "1,387,386", lambda: _summed(RAW)),
    ("softmax-14-10-12", "Softmax of [14, 10, 12].", "0.867 0.016 0.117", lambda: softmax(RAW)),
    ("percent-14-10-12", "Per cent for the first two of [14, 10, 12].", "86.7 1.6", lambda: 100 * softmax(RAW)[:2]),
    ("root-64", "The square root of d_k = 64.", "8", lambda: math.sqrt(DIM)),
    ("scaled-14-10-12", "[14, 10, 12] divided by 8.", "1.75 1.25 1.5", lambda: SCALED),
    ("exp-1.75", "e to the 1.75.", "5.755", lambda: math.exp(1.75)),
    ("exp-1.25", "e to the 1.25.", "3.490", lambda: math.exp(1.25)),
    ("exp-1.5", "e to the 1.5.", "4.482", lambda: math.exp(1.5)),
    ("sum-scaled-14-10-12", "Sum of the exponentials of [1.75, 1.25, 1.5].", "13.727", lambda: _summed(SCALED)),
    ("softmax-scaled-14-10-12", "Softmax of [1.75, 1.25, 1.5].", "0.419 0.254 0.326", lambda: softmax(SCALED)),
    ("percent-scaled-14-10-12", "Per cent for [1.75, 1.25, 1.5].", "41.9 25.4 32.6", lambda: 100 * softmax(SCALED)),
)  # fmt: skip
