"""Claims of the tutorial on the mathematics behind √d_k: its statements, then its numbers."""

import math
from collections.abc import Sequence

import numpy as np

from attnscale.claims import computations as compute
from attnscale.claims.computations import DIM, DIMS, KEYS, SIGNS, SKEWED, TINY_GAIN
from attnscale.claims.judging import Entry, Evidence, Limit, Source
from attnscale.claims.settings import FULL_SIZE, T5, language_models
from attnscale.reference import Array, softmax
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


def _full_size_dims() -> Evidence:
    dims = sorted({setting.head_dim for setting in language_models(millions=FULL_SIZE)})
    return compute.published([f"{dims[0]} to {dims[-1]} from {FULL_SIZE} million parameters on"], dims[0] >= 64)


def _narrow_models() -> Evidence:
    small = [each for each in language_models() if each.millions < FULL_SIZE and each.head_dim < 64]
    return compute.published_none([f"{each.model} {each.head_dim}" for each in small])


SOURCE.add(
    "What Happens Without Scaling?",
    Entry("real-head-dims", "Real Transformers have heads of 64, 128 or more dimensions.", "64 or more",
          _full_size_dims, limit=Limit("for full-size language models", "for small ones", _narrow_models)),
)  # fmt: skip


def _dot_products_grow() -> Evidence:
    narrow, wide = compute.drawn_spread(4), compute.drawn_spread(512)
    return Evidence(
        wide.mean > FAR_LARGER * narrow.mean, f"drawn: std {narrow:.2f} at d_k = 4, {wide:.1f} at d_k = 512"
    )


def _wider_is_worse() -> Evidence:
    traces = {f"at {dim}": compute.drawn("jacobian_trace", dim) for dim in (512, 256, 128, 64, 32, 16, 4)}
    return compute.ordered("drawn: 1 − Σp² by d_k:", traces, ".2f")


SOURCE.add(
    "Why Do Dot Products Grow with dₖ?",
    Entry("dot-products-grow", "At d_k = 512 dot products are far larger than at 4.", "grows with d_k",
          _dot_products_grow),
    Entry("wider-is-worse", "The wider the head, the worse an unscaled softmax fares.", "worse with d_k",
          _wider_is_worse),
)  # fmt: skip


def _heights() -> Evidence:
    ranges = {"for heights from 5.0 to 5.5": (5.0, 5.5), "from 3.0 to 7.0": (3.0, 7.0)}
    variances = {name: float(np.linspace(*ends, 101).var()) for name, ends in ranges.items()}
    return compute.ordered("variance", variances, ".2f")


def _rms_norm_centres() -> Evidence:
    x = np.array(SKEWED) + 1
    normed = x / np.sqrt((x**2).mean())
    return Evidence(abs(normed.mean()) < 1e-12, f"mean {normed.mean():.2f} after RMSNorm, as in LLaMA")


SOURCE.add(
    "Understanding Variance of the Dot Product",
    Entry("height-ranges", "Heights of students from 3.0 to 7.0 feet vary more than heights from 5.0 to 5.5.",
          "high against low variance", _heights, "An illustration, judged as one."),
    Entry("inputs-normalised", "Inputs are typically normalised to mean 0 and variance 1.", "mean 0",
          compute.layer_norm_centres,
          limit=Limit("after LayerNorm", "after RMSNorm, which does not subtract the mean", _rms_norm_centres)),
)  # fmt: skip


def _mean_square() -> Evidence:
    scores = compute.products(SKEWED, 2).sum(-1)
    return Evidence(np.isclose(scores.var(), (scores**2).mean()).item(), f"{scores.var():g} and {(scores**2).mean():g}")


def _always_exact() -> Evidence:
    variance = compute.enumerated_variance(SKEWED, DIM)
    return Evidence(
        compute.enumerated_is_dim(), f"{variance:g} at d_k = {DIM} over every pair of vectors of two distributions"
    )


def _exact_anyway() -> Evidence:
    shifted = compute.drawn_pairs(DIM, "both means 1").band("variance")
    drawn = compute.head_spread("GPT-2").mean ** 2
    holds = compute.agrees(shifted, DIM) and abs(drawn / DIM - 1) < LITTLE
    return Evidence(holds, f"{shifted:.0f} with means of 1; {drawn:.1f} at GPT-2's initialisation")


SOURCE.add(
    "Proving It Step by Step",
    Entry("mean-square", "At mean zero the variance is the average square.", "equal", _mean_square),
    Entry("variance-always-exact", "The variance of q·k is d_k always and exactly, not approximately.", "always d_k",
          _always_exact,
          limit=Limit("for independent components of mean 0 and variance 1", "for others", _exact_anyway,
                      is_stated=True)),
)  # fmt: skip


def _typical_one_hot() -> Evidence:
    top1 = compute.drawn("top1", DIM)
    return Evidence(top1.mean > SATURATED_TOP1, f"drawn: {top1:.2f} on average over {KEYS} keys at d_k = {DIM}")


SOURCE.add(
    "What Large Dot Products Do to Softmax",
    Entry("exp-gap", "From e¹⁰ to e⁵⁰ is an astronomical distance.", "astronomical",
          lambda: Evidence(math.exp(50 - 10) > STARS, f"a factor of {math.exp(50 - 10):.2g}")),
    Entry("still-learns", "With scores [5, 1, 0.5] every position can still be learned from.", "not zero",
          lambda: compute.row_has([5, 1, 0.5], "jacobian_trace", above=TINY_GAIN)),
    Entry("unscaled-one-hot", "Unscaled scores of wide heads make softmax almost one-hot.", "one weight near 1",
          lambda: compute.row_has([50, 10, 5], "top1", above=SATURATED_TOP1),
          limit=Limit("for the example's scores", "for a typical row at d_k = 64", _typical_one_hot)),
    Entry("unscaled-stops-learning",
          "Without scaling gradients become extremely small, almost zero, and learning stops.",
          "almost zero", compute.softmax_passes_little,
          "Gradient without a scale over gradient with it, for random q, k and v.", compute.AT_SOFTMAX),
)  # fmt: skip


def _quotient() -> Evidence:
    scores = compute.products(SKEWED, 3).sum(-1)
    holds = all(math.isclose((scores / c).var(), scores.var() / c**2) for c in (2, 3, 8))
    return Evidence(holds, f"{scores.var():g} becomes {(scores / 2).var():g} for c = 2")


def _paper() -> Evidence:
    holds = compute.enumerated_is_dim() and all(abs(compute.enumerated_mean(SKEWED, dim)) < 1e-9 for dim in DIMS)
    return compute.published(["footnote 4 derives mean 0 and variance d_k, as found here over every pair"], holds)


SOURCE.add(
    "Why √dₖ is the Right Scaling Factor",
    Entry("variance-of-quotient", "Dividing by c divides the variance by c².", "Var/c²", _quotient),
    Entry("divisor-from-variance", "d_k/c² = 1 is solved by c = √d_k.", "√d_k",
          lambda: compute.drawn_spread_is(0.5, *DIMS)),
    Entry("correct-factor", "√d_k is mathematically the correct divisor.", "√d_k",
          lambda: compute.drawn_spread_is(0.5, *DIMS), limit=compute.AT_GPT2),
    Entry("paper-reason", "The Transformer's authors chose √d_k for its effect on the variance.", "variance d_k",
          _paper, "The paper (section 3.2.1) says that it suspects, not shows, that softmax suffers."),
)  # fmt: skip


def _skipping(keys: int) -> Evidence:
    scaled, raw = (compute.drawn("jacobian_trace", 4, divisor, keys) for divisor in (2.0, 1.0))
    shown = f"over {keys} keys: 1 − Σp² {scaled:.2f} with the scale, {raw:.2f} without"
    return Evidence(scaled.mean - raw.mean < LITTLE * scaled.mean, shown)


SOURCE.add(
    "Seeing It with Real Numbers",
    Entry("small-dim-hardly-matters", "At d_k = 4 scaling hardly matters.", "little difference",
          lambda: _skipping(KEYS), limit=Limit("over many keys", "over few", lambda: _skipping(FEW_KEYS))),
    Entry("scaled-more-even", "Scaling [14, 10, 12] by 1/8 makes attention more even.", "more even",
          lambda: compute.is_softer(RAW, SCALED)),
)  # fmt: skip


def _struggles() -> Evidence:
    ends = (compute.HEAD_DIMS[0], compute.HEAD_DIMS[-1])
    losses = {dim: (compute.final_loss(dim, "none"), compute.final_loss(dim)) for dim in ends}
    (narrow, narrow_scaled), (wide, wide_scaled) = losses.values()
    shown = ", ".join(f"{raw:.2f} against {scaled:.2f} at d_k = {dim}" for dim, (raw, scaled) in losses.items())
    holds = wide.low - wide_scaled.high > max(compute.LEARNED, narrow.mean - narrow_scaled.mean)
    return Evidence(holds, f"small models end at a loss of {shown}")


def _t5_struggles() -> Evidence:
    shown = f"{T5.model} multiplies by {T5.multiplier:g} and starts with a spread of {compute.t5_spread():.2f}"
    return Evidence(regime(compute.t5_spread(), KEYS) != "healthy", shown)


SOURCE.add(
    "Putting It All Together",
    Entry("struggles-without",
          "Without the division a Transformer would struggle to learn, especially with larger d_k.",
          "needed, more so when wide", _struggles,
          limit=Limit(compute.UNIT, "when the query's weights contain the factor", _t5_struggles)),
)  # fmt: skip


# Numbers in the tutorial's calculations


def _squares(values: Array) -> Array:
    return np.asarray((values - values.mean()) ** 2)


def _counted(terms: Array, average: float) -> int:
    """Count the terms of (q·k)² that have this average."""
    return int((abs(terms - average) < NEAR).sum())


def _summed(scores: Sequence[float] | Array) -> float:
    return float(np.exp(scores).sum())


SOURCE.add(
    "Proving It Step by Step",
    Entry("product-mean", "Mean of one product q_i·k_i.", "0", lambda: compute.products(SIGNS, 1).mean()),
    Entry("product-variance", "Variance of one product q_i·k_i.", "1", lambda: compute.products(SIGNS, 1).var()),
    Entry("score-mean", "Mean of q·k when components have mean 0.", "0", lambda: compute.enumerated_mean(SIGNS, DIM)),
    Entry("average-square", "Average square of a component of mean 0 and variance 1.", "1",
          lambda: np.square(SIGNS).mean()),
    Entry("terms-3", "Terms of the squared dot product at d_k = 3.", "9",
          lambda: compute.average_terms(PROOF_DIM).size),
    Entry("own-terms-3", "Of the terms at d_k = 3, squares of one product.", "3",
          lambda: _counted(compute.average_terms(PROOF_DIM), 1.0)),
    Entry("own-average", "Average of the square of one product.", "1 1 1",
          lambda: np.diag(compute.average_terms(PROOF_DIM))),
    Entry("cross-terms-3", "Of the terms at d_k = 3, mixed ones.", "6",
          lambda: _counted(compute.average_terms(PROOF_DIM), 0.0)),
    Entry("cross-average", "Average of each mixed term at d_k = 3.", "0 0 0 0 0 0",
          lambda: compute.average_terms(PROOF_DIM)[~np.eye(PROOF_DIM, dtype=bool)]),
    Entry("variance-3", "Variance of q·k at d_k = 3, as the sum of all terms.", "3",
          lambda: compute.average_terms(PROOF_DIM).sum()),
    Entry("terms-64", "Terms of the squared dot product at d_k = 64.", "4096", lambda: compute.sampled_terms(DIM).size),
    Entry("own-terms-64", "Of the terms at d_k = 64, squares of one product.", "64",
          lambda: _counted(compute.sampled_terms(DIM), 1.0)),
    Entry("cross-terms-64", "Of the terms at d_k = 64, mixed ones.", "4032",
          lambda: _counted(compute.sampled_terms(DIM), 0.0)),
    Entry("variance-64", "Variance of q·k at d_k = 64.", "64", lambda: compute.enumerated_variance(SIGNS, DIM)),
)  # fmt: skip

SOURCE.add(
    "What Large Dot Products Do to Softmax",
    Entry("euler", "The constant e.", "2.718", lambda: math.e),
    Entry("exp-1", "e to the 1.", "2.718", lambda: math.exp(1)),
    Entry("exp-5", "e to the 5.", "148.4", lambda: math.exp(5)),
    Entry("exp-10", "e to the 10.", "22,026", lambda: math.exp(10)),
    Entry("exp-20", "e to the 20.", "485,165,195", lambda: math.exp(20)),
    Entry("exp-50", "e to the 50.", "5,184,705,528,587,072,045", lambda: math.exp(50),
          "The printed digits are those of the float64 result without the last three."),
    Entry("exp-5-whole", "e to the 5, to a whole number.", "148", lambda: math.exp(5)),
    Entry("softmax-50-10-5", "Softmax of [50, 10, 5].", "1.0 0.0 0.0", lambda: softmax([50, 10, 5])),
    Entry("exp-half", "e to the ½.", "1.649", lambda: math.exp(0.5)),
    Entry("sum-5-1-half", "Sum of the exponentials of [5, 1, 0.5].", "152.780", lambda: _summed([5, 1, 0.5])),
    Entry("softmax-5-1-half", "Softmax of [5, 1, 0.5].", "0.971 0.018 0.011", lambda: softmax([5, 1, 0.5])),
)  # fmt: skip

SOURCE.add(
    "Why √dₖ is the Right Scaling Factor",
    Entry("mean-2-4-6", "Mean of [2, 4, 6].", "4", TRIPLE.mean),
    Entry("differences-2-4-6", "Distances of [2, 4, 6] from their mean.", "-2 0 2", lambda: TRIPLE - TRIPLE.mean()),
    Entry("squares-2-4-6", "Squared distances of [2, 4, 6] from their mean.", "4 0 4", lambda: _squares(TRIPLE)),
    Entry("variance-2-4-6", "Variance of [2, 4, 6].", "2.67", TRIPLE.var),
    Entry("halved-2-4-6", "[2, 4, 6] divided by 2.", "1 2 3", lambda: TRIPLE / 2),
    Entry("mean-1-2-3", "Mean of [1, 2, 3].", "2", HALVED.mean),
    Entry("differences-1-2-3", "Distances of [1, 2, 3] from their mean.", "-1 0 1", lambda: HALVED - HALVED.mean()),
    Entry("squares-1-2-3", "Squared distances of [1, 2, 3] from their mean.", "1 0 1", lambda: _squares(HALVED)),
    Entry("variance-1-2-3", "Variance of [1, 2, 3].", "0.67", HALVED.var),
    Entry("variance-ratio", "Factor by which halving the values divides their variance.", "4",
          lambda: TRIPLE.var() / HALVED.var()),
)  # fmt: skip

SOURCE.add(
    "Seeing It with Real Numbers",
    Entry("dot-4", "Dot product of [1, 0, 1, 0] and [0, 1, 1, 1].", "1", lambda: QUERY @ KEY),
    Entry("root-4", "The square root of d_k = 4.", "2", lambda: math.sqrt(QUERY.size)),
    Entry("scaled-dot-4", "Dot product 1, divided by √4.", "0.5", lambda: QUERY @ KEY / math.sqrt(QUERY.size)),
    Entry("exp-14", "e to the 14.", "1,202,604", lambda: math.exp(14)),
    Entry("exp-12", "e to the 12.", "162,755", lambda: math.exp(12)),
    Entry("sum-14-10-12", "Sum of the exponentials of [14, 10, 12].", "1,387,386", lambda: _summed(RAW)),
    Entry("softmax-14-10-12", "Softmax of [14, 10, 12].", "0.867 0.016 0.117", lambda: softmax(RAW)),
    Entry("percent-14-10-12", "Per cent for the first two of [14, 10, 12].", "86.7 1.6",
          lambda: 100 * softmax(RAW)[:2]),
    Entry("root-64", "The square root of d_k = 64.", "8", lambda: math.sqrt(DIM)),
    Entry("scaled-14-10-12", "[14, 10, 12] divided by 8.", "1.75 1.25 1.5", lambda: SCALED),
    Entry("exp-1.75", "e to the 1.75.", "5.755", lambda: math.exp(1.75)),
    Entry("exp-1.25", "e to the 1.25.", "3.490", lambda: math.exp(1.25)),
    Entry("exp-1.5", "e to the 1.5.", "4.482", lambda: math.exp(1.5)),
    Entry("sum-scaled-14-10-12", "Sum of the exponentials of [1.75, 1.25, 1.5].", "13.727", lambda: _summed(SCALED)),
    Entry("softmax-scaled-14-10-12", "Softmax of [1.75, 1.25, 1.5].", "0.419 0.254 0.326", lambda: softmax(SCALED)),
    Entry("percent-scaled-14-10-12", "Per cent for [1.75, 1.25, 1.5].", "41.9 25.4 32.6",
          lambda: 100 * softmax(SCALED)),
)  # fmt: skip
