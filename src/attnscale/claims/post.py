"""Claims of the blog post on stabilising attention scores: why √d_k, and why not d_k."""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from attnscale.claims import computations as compute
from attnscale.claims.computations import DIM, DIMS, HEAD_DIMS, KEYS, SIGNS, SKEWED, TINY_GAIN, WIDE
from attnscale.claims.judging import Entry, Evidence, Limit, Source
from attnscale.claims.settings import MUP_ATTENTION, SETTINGS, language_models
from attnscale.lab.outcomes import Band, band
from attnscale.reference import softmax
from attnscale.theory import regime

SOURCE = Source("post", "Stabilizing Attention Scores in Transformers", "blog post")

ROOT = math.sqrt(DIM)
WIDE_DIM = 1024  # larger than any compute.published head, so scores divided by d_k are very small
FOCUS_LOST = 10  # focus is lost if the weight is smaller by this factor
NEARLY_UNIFORM = 0.99  # entropy / ln n of nearly uniform weights
MANY = 5  # number of models that counts as many
GROWS = 3.0  # a gradient that grows by this factor from the last layer to the first explodes
VANISHES = 0.1  # a gradient that falls by this factor vanishes


def _variance_is_dim() -> Evidence:
    drawn, exact = compute.drawn_spread(DIM), compute.enumerated_variance(SIGNS, DIM)
    shown = f"{exact:g} over every pair of signs at d_k = {DIM}; spread {drawn:.2f} drawn"
    return Evidence(compute.enumerated_is_dim() and compute.agrees(drawn, ROOT), shown)


def _after_initialisation() -> Evidence:
    return compute.near_one(
        "q std", {name: compute.head_std(name) for name in ("GPT-2", "nn.Linear", "nn.MultiheadAttention")}
    )


def _head_dims() -> Evidence:
    dims = sorted({setting.head_dim for setting in language_models()})
    return compute.published(dims, {64, 128} < set(dims) and dims[-1] > 128)


SOURCE.add(
    "1. Variance of Dot Product",
    Entry("score-variance", "Independent components of mean 0 and variance 1 give q·k the variance d_k.", "d_k",
          _variance_is_dim, "For any distribution of the components."),
    Entry("unit-variance-common", "Initialisation or normalisation commonly leaves q and k with mean 0 and variance 1.",
          "std 1", compute.layer_norm_centres,
          limit=Limit("of a normalised vector", "of its projection by usual initialisations", _after_initialisation)),
    Entry("common-head-dims", "Heads of 64, 128 and more dimensions are common.", "64, 128, larger", _head_dims),
)  # fmt: skip


def _can_be_sharp() -> Evidence:
    raw, scaled = (compute.saturated_share(DIM, divisor) for divisor in (1.0, ROOT))
    shown = f"drawn at d_k = {DIM}: {raw:.0%} of rows give one key 0.99 without a scale, {scaled:.0%} with it"
    return Evidence(raw.low > scaled.mean == 0, shown)


def _balanced() -> Evidence:
    ratio, top1, trace = (compute.drawn(name, DIM, ROOT) for name in ("entropy_ratio", "top1", "jacobian_trace"))
    shown = f"drawn at d_k = {DIM}: entropy {ratio:.1%} of its maximum, largest weight {top1:.3f}, 1 − Σp² {trace:.3f}"
    return Evidence(NEARLY_UNIFORM > ratio.mean > 0.5 > top1.mean, shown)


SOURCE.add(
    "2. Softmax Stability",
    Entry("large-scores-sharpen",
          "Scores too large, as without scaling, can make softmax give one key nearly all the weight.",
          "can be very sharp", _can_be_sharp,
          "Size alone does not do it: softmax of [50, 50, 50] is uniform."),
    Entry("sharp-rows-lose-gradient", "A row that one key dominates passes almost no gradient to its scores.",
          "vanishing", lambda: compute.row_has(compute.leading_scores(KEYS), "jacobian_trace", below=TINY_GAIN)),
    Entry("scaled-variance-near-one", "Dividing by √d_k ensures scores of variance about 1.", "about 1",
          lambda: compute.drawn_spread_is(0.5, *DIMS), limit=compute.AT_GPT2),
    Entry("scaled-weights-balanced", "At unit variance softmax stays balanced and keeps its gradient.",
          "neither sharp nor uniform", _balanced),
)  # fmt: skip


def _inverse_dim_uniform() -> Evidence:
    ratios = {dim: compute.drawn("entropy_ratio", dim, dim) for dim in DIMS if dim >= DIM}
    shown = f"drawn at d_k = {DIM}: entropy {ratios[DIM]:.1%} of its maximum"
    return Evidence(all(ratio.low > NEARLY_UNIFORM for ratio in ratios.values()), shown)


def _small_scores() -> Evidence:
    sizes = (1.0, 0.1, 0.01)
    away = [float(abs(KEYS * softmax(np.linspace(-size, size, KEYS)) - 1).max()) for size in sizes]
    holds = all(distance < 2 * size for size, distance in zip(sizes, away, strict=True))
    return Evidence(holds, f"n·p within {away[-1]:.2g} of 1 for scores within {sizes[-1]} of 0")


def _weight_of_match(divisor: float) -> Band:
    """Return the weight of a key that equals the query, with the score |q|² ≈ d_k, among random keys."""
    scores = compute.drawn_scores(DIM).copy()
    scores[:, 0] = DIM
    return band(softmax(scores / divisor)[:, 0])


def _cannot_focus() -> Evidence:
    by_root, by_dim = _weight_of_match(ROOT), _weight_of_match(DIM)
    shown = f"drawn: a matching key gets {by_dim:.4f} instead of {by_root:.2f}"
    return Evidence(by_dim.high * FOCUS_LOST < by_root.low, shown)


@dataclass(frozen=True)
class PrecisionLoss:
    """Relative error of the outputs after subtracting their mean, and share of query gradients that became zero."""

    output: float
    gradients: float


KINDS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
TOKENS = 16 * 1024  # tokens in a mean loss; each output gets 1/TOKENS of the gradient


@cache
def precision_loss(scale: float, dim: int, kind: str) -> PrecisionLoss:
    """Compare attention in low precision with float64 on the same rounded inputs."""
    rng = torch.Generator().manual_seed(0)
    shapes = ((256, dim), (256, dim), (256, 64), (256, 64))
    query, key, value, upstream = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes)
    found = []
    for dtype in (torch.float64, KINDS[kind]):
        q, k, v, g = (x.to(KINDS[kind]).to(dtype) for x in (query, key, value, upstream / TOKENS))
        output = F.scaled_dot_product_attention(q.requires_grad_(), k, v, scale=scale)
        gradient = torch.autograd.grad(output, q, g)[0]
        found.append((output.detach().double(), gradient.double()))
    (exact, slopes), (low, low_slopes) = found
    error = ((low - low.mean(0)) - (exact - exact.mean(0))).norm() / (exact - exact.mean(0)).norm()
    return PrecisionLoss(error.item(), ((low_slopes == 0) & (slopes != 0)).double().mean().item())


def _less_precise() -> Evidence:
    found = {
        (dim, kind): (precision_loss(1 / dim, dim, kind), precision_loss(dim**-0.5, dim, kind))
        for dim in (DIM, WIDE_DIM)
        for kind in KINDS
    }
    times = [by_dim.output / by_root.output for by_dim, by_root in found.values()]
    by_dim, by_root = found[WIDE_DIM, "float16"]
    worse = sum(ratio > 1 for ratio in times)
    shown = (
        f"differences between outputs lose {min(times):.2g} to {max(times):.2g} times as much precision as with "
        f"1/√d_k, in {worse} of {len(found)} cases; at d_k = {WIDE_DIM} {by_dim.gradients:.0%} of float16 query "
        f"gradients become zero, with 1/√d_k {by_root.gradients:.0%}"
    )
    return Evidence(worse > 0 or by_dim.gradients > by_root.gradients, shown)


SOURCE.add(
    "3. Why Not d_k?",
    Entry("inverse-dim-variance", "Dividing by d_k leaves scores a variance of 1/d_k.", "1/d_k",
          lambda: compute.drawn_spread_is(1.0, *DIMS)),
    Entry("inverse-dim-uniform", "In wide heads, division by d_k makes softmax nearly uniform.", "near 1/n each",
          _inverse_dim_uniform),
    Entry("small-scores-uniform", "Scores near zero give weights near 1/n.", "close to 1/n", _small_scores),
    Entry("inverse-dim-cannot-focus", "Division by d_k makes it hard to single out a relevant key.", "focus diluted",
          _cannot_focus),
    Entry("inverse-dim-precision",
          "The very small scores that d_k leaves might in some cases be harder to handle precisely.",
          "could, in some cases", _less_precise,
          "Single weights are as precise as others, since rounding is relative. Their differences are not."),
)  # fmt: skip


def _three_regimes() -> Evidence:
    divisors = {"with no divisor": 1.0, "with √d_k": ROOT, "with d_k": float(DIM)}
    regimes = [regime(float((compute.drawn_scores(DIM) / divisor).std()), KEYS) for divisor in divisors.values()]
    entropies = {name: compute.drawn("entropy_ratio", DIM, divisor) for name, divisor in divisors.items()}
    shown = compute.ordered("entropy, of its maximum:", entropies, ".1%").shown
    return Evidence(regimes == ["sharp", "healthy", "diluted"], f"{', '.join(regimes)}; {shown}")


SOURCE.add(
    "4. Why √d_k?",
    Entry("scaled-variance-identity", "Var(q·k)/d_k, the variance after dividing by √d_k.", "1",
          lambda: compute.enumerated_variance(SKEWED, DIM) / DIM),
    Entry("three-regimes", "√d_k lies between values that explode without a scale and values that d_k suppresses.",
          "too sharp, balanced, too flat", _three_regimes),
)  # fmt: skip


def _introduced() -> Evidence:
    first = min((setting for setting in SETTINGS if setting.standard), key=lambda setting: setting.year)
    return compute.published([first.model, first.year], (first.model, first.year) == ("Transformer", 2017))


def _works_at_every_dim() -> Evidence:
    losses = {dim: compute.final_loss(dim) for dim in HEAD_DIMS}
    shown = ", ".join(f"{loss:.2f} at {dim}" for dim, loss in losses.items())
    holds = all(map(compute.has_learned, losses.values()))
    return Evidence(holds, f"small models trained with it end at a loss of {shown}")


SOURCE.add(
    "5. Empirical Effectiveness",
    Entry("introduced-2017", "The Transformer of 2017 introduced the division by √d_k.", "2017", _introduced),
    Entry("validated-widely", "The division by √d_k has been validated in practice across many models.",
          "many models", lambda: compute.published_some([each.model for each in SETTINGS if each.standard], MANY),
          "A selection of models, not all; see also what the textbook section says of all models."),
    Entry("wide-range-of-dims", "With √d_k models train well for a wide range of d_k.", "a wide range",
          _works_at_every_dim, "The textbook section claims more: that training is then always stable."),
)  # fmt: skip


def _explodes_or_vanishes() -> Evidence:
    raw, scaled = compute.gradients("none"), compute.gradients("1/√d_k")
    rows = compute.gradient_without_scale(512, 64)
    times = raw["first_query"].mean / scaled["first_query"].mean
    explodes = raw["backwards"].low > GROWS > scaled["backwards"].high and times > GROWS
    shown = (
        f"before training at d_k = {WIDE}, without it: {times:.0f} times the gradient on the first W_q, which is "
        f"{raw['backwards']:.1f} times the last layer's (with it {scaled['backwards']:.1f}); on the median row's "
        f"scores {rows.on_scores:.2g} times the gradient at d_k = 512 over 64 keys"
    )
    return Evidence(explodes and rows.on_scores.high < VANISHES, shown)


def _divides_by_dim() -> str:
    found = [setting.model for setting in language_models() if math.isclose(setting.multiplier, 1 / setting.head_dim)]
    return f"Not every model: {', '.join(found)} multiplies by 1/d_k, muP by {MUP_ATTENTION:g}/d_k."


def _may_harm() -> Evidence:
    extra = compute.extra_loss(WIDE, "1/d_k")
    by_dim, by_root = (compute.drawn("entropy_ratio", DIM, divisor) for divisor in (DIM, ROOT))
    shown = f"small models trained with 1/d_k at d_k = {WIDE} lose {extra:+.2f} nats against 1/√d_k"
    return Evidence(by_dim.low > by_root.high and extra.low > 0, shown)


SOURCE.add(
    "Summary",
    Entry("avoids-exploding-and-vanishing", "Without the scale gradients explode or vanish; √d_k avoids both.",
          "neither", _explodes_or_vanishes,
          "They explode on the way back through layers. They vanish at softmax's input, once √d_k is much larger "
          "than √(2 ln n)."),
    Entry("inverse-dim-harms", "A model that divides by d_k attends less selectively and potentially does worse.",
          "potentially", _may_harm, _divides_by_dim()),
)  # fmt: skip
