"""Claims of the blog post on stabilising attention scores: why √d_k, and why not d_k."""

import math

import numpy as np

from attnscale.claims.draws import drawn_rows, drawn_scores, drawn_spread, enumerated_variance, head_std
from attnscale.claims.evidence import (
    DIM,
    DIMS,
    KEYS,
    NEAR_ONE,
    SIGNS,
    SKEWED,
    TINY_GAIN,
    enumerated_is_dim,
    gpt2_scaled_spread,
    layer_norm,
    leading_row,
    unit_spread_at_start,
)
from attnscale.claims.judging import Evidence, Limit, Number, Source, Statement
from attnscale.claims.precision import KINDS, lost
from attnscale.claims.settings import MUP_ATTENTION, SETTINGS, language_models
from attnscale.claims.trained import HEAD_DIMS, WIDE, final_loss, gradients, has_learned
from attnscale.reference import softmax
from attnscale.theory import regime
from attnscale.theory.limits import SATURATED_TOP1

SOURCE = Source("post", "Stabilizing Attention Scores in Transformers", "blog post")

WIDE_DIM = 1024  # far beyond any head, to give small scores every chance to be too small
FOCUS_LOST = 10  # a weight this many times smaller counts as focus lost
NEARLY_UNIFORM = 0.99  # of ln n
MANY = 5  # models
HARM = 0.1  # nats
GROWS = 3.0  # times from the last layer to the first: it explodes
VANISHES = 0.1  # of the root mean square, for the median query


def _variance_is_dim() -> Evidence:
    drawn = drawn_spread(DIM)
    shown = f"{enumerated_variance(SIGNS, DIM):g} over every pair of signs at d_k = {DIM}; {drawn.variance:.1f} drawn"
    return Evidence(enumerated_is_dim() and drawn.is_(DIM), shown)


def _after_layer_norm() -> Evidence:
    normed = layer_norm(np.array(SKEWED) + 1)
    holds = np.allclose([normed.mean(), normed.std()], [0, 1])
    return Evidence(holds, f"std {normed.std():.2f} after LayerNorm")


def _after_initialisation() -> Evidence:
    stds = {name: head_std(name) for name in ("GPT-2", "nn.Linear", "nn.MultiheadAttention")}
    holds = all(abs(std - 1) < NEAR_ONE for std in stds.values())
    return Evidence(holds, "q std " + ", ".join(f"{std:.2f} ({name})" for name, std in stds.items()))


def _head_dims() -> Evidence:
    dims = sorted({setting.head_dim for setting in language_models()})
    return Evidence({64, 128} < set(dims) and dims[-1] > 128, f"published: {', '.join(map(str, dims))}")


def _can_be_sharp() -> Evidence:
    """ "Can" needs rows that are, among those that occur without scaling."""
    raw, scaled = (float((drawn_rows(DIM, by).top1 > SATURATED_TOP1).mean()) for by in (1.0, math.sqrt(DIM)))
    holds = raw > scaled == 0
    return Evidence(holds, f"{raw:.0%} of rows give one key 0.99 without a scale at d_k = {DIM}, {scaled:.0%} with it")


def _sharp_row() -> Evidence:
    row = leading_row(KEYS)
    return Evidence(row.gradient_gain.item() <= TINY_GAIN, f"1 − Σp² = {row.gradient_gain.item():.3f} at weight 0.99")


def _balanced() -> Evidence:
    row = drawn_rows(DIM, math.sqrt(DIM))
    ratio, top1, gain = (float(x.mean()) for x in (row.entropy_ratio, row.top1, row.gradient_gain))
    holds = NEARLY_UNIFORM > ratio > 0.5 > top1
    return Evidence(holds, f"H/ln n {ratio:.2f}, top weight {top1:.3f}, 1 − Σp² {gain:.3f}, drawn at d_k = {DIM}")


def _inverse_dim_variance() -> Evidence:
    spreads = {dim: drawn_spread(dim).over(dim) for dim in DIMS}
    holds = all(found.is_(1 / dim) for dim, found in spreads.items())
    return Evidence(holds, f"{spreads[DIM].variance:.4f} drawn, 1/{DIM} = {1 / DIM:.4f}")


def _entropy(dim: int, divisor: float) -> float:
    return float(drawn_rows(dim, divisor).entropy_ratio.mean())


def _inverse_dim_uniform() -> Evidence:
    ratios = {dim: _entropy(dim, dim) for dim in DIMS if dim >= DIM}
    holds = all(ratio > NEARLY_UNIFORM for ratio in ratios.values())
    return Evidence(holds, f"H/ln n {ratios[DIM]:.4f} drawn at d_k = {DIM}")


def _small_scores() -> Evidence:
    sizes = (1.0, 0.1, 0.01)
    away = [float(abs(KEYS * softmax(np.linspace(-size, size, KEYS)) - 1).max()) for size in sizes]
    holds = all(distance < 2 * size for size, distance in zip(sizes, away, strict=True))
    return Evidence(holds, f"n·p within {away[-1]:.2g} of 1 for scores within {sizes[-1]} of 0")


def _weight_of_match(divisor: float) -> float:
    """Weight of a key that equals its query, among drawn keys; its score is |q|², about d_k."""
    scores = drawn_scores(DIM).copy()
    scores[:, 0] = DIM
    return float(softmax(scores / divisor)[:, 0].mean())


def _cannot_focus() -> Evidence:
    by_root, by_dim = _weight_of_match(math.sqrt(DIM)), _weight_of_match(DIM)
    return Evidence(by_dim * FOCUS_LOST < by_root, f"a matching key gets {by_dim:.4f} instead of {by_root:.2f}, drawn")


def _less_precise() -> Evidence:
    """ "In some cases": one suffices, of outputs about their mean or of gradients."""
    cases = [(dim, kind) for dim in (DIM, WIDE_DIM) for kind in KINDS]
    found = {(dim, kind): (lost(1 / dim, dim, kind), lost(dim**-0.5, dim, kind)) for dim, kind in cases}
    times = [by_dim.output / by_root.output for by_dim, by_root in found.values()]
    by_dim, by_root = found[WIDE_DIM, "float16"]
    worse = sum(ratio > 1 for ratio in times)
    shown = (
        f"outputs about their mean lose {min(times):.2g} to {max(times):.2g} times as much as with 1/√d_k, in {worse} "
        f"of {len(cases)} cases; at d_k = {WIDE_DIM} {by_dim.gradients:.0%} of float16 query gradients become zero, "
        f"with 1/√d_k {by_root.gradients:.0%}"
    )
    return Evidence(worse > 0 or by_dim.gradients > by_root.gradients, shown)


def _three_regimes() -> Evidence:
    divisors = {"no divisor": 1.0, "√d_k": math.sqrt(DIM), "d_k": float(DIM)}
    found = {name: drawn_scores(DIM) / divisor for name, divisor in divisors.items()}
    regimes = [regime(float(scores.std()), KEYS) for scores in found.values()]
    shown = ", ".join(f"{name} {_entropy(DIM, divisor):.3f}" for name, divisor in divisors.items())
    return Evidence(regimes == ["saturated", "healthy", "diluted"], f"{', '.join(regimes)}; H/ln n {shown}")


def _introduced() -> Evidence:
    first = min((setting for setting in SETTINGS if setting.standard), key=lambda setting: setting.year)
    return Evidence((first.model, first.year) == ("Transformer", 2017), f"published: {first.model}, {first.year}")


def _validated() -> Evidence:
    found = [setting.model for setting in SETTINGS if setting.standard]
    return Evidence(len(found) >= MANY, f"published: trained so and released, {len(found)} here, {', '.join(found)}")


def _works_at_every_dim() -> Evidence:
    losses = {dim: final_loss(dim) for dim in HEAD_DIMS}
    shown = ", ".join(f"{loss:.2f} at {dim}" for dim, loss in losses.items())
    return Evidence(all(map(has_learned, losses.values())), f"small models trained with it end at a loss of {shown}")


def _explodes_or_vanishes() -> Evidence:
    raw, scaled = gradients("none"), gradients("1/√d_k")
    times = raw["first_query"] / scaled["first_query"]
    explodes = raw["backwards"] > GROWS > scaled["backwards"] and times > GROWS
    vanishes = raw["evenness"] < VANISHES < scaled["evenness"]
    shown = (
        f"before training at d_k = {WIDE}, without it: {times:.0f} times the gradient on the first W_q, "
        f"{raw['backwards']:.1f}-fold from last layer to first (with it {scaled['backwards']:.1f}), yet the median "
        f"query's is {raw['evenness']:.2f} of the root mean square (with it {scaled['evenness']:.2f})"
    )
    return Evidence(explodes and vanishes, shown)


def _may_harm() -> Evidence:
    losses = {dim: (final_loss(dim, "1/d_k"), final_loss(dim)) for dim in (HEAD_DIMS[0], HEAD_DIMS[-1])}
    flatter = _entropy(DIM, DIM) > _entropy(DIM, math.sqrt(DIM))
    harmed = [dim for dim, (by_dim, by_root) in losses.items() if by_dim > by_root + HARM]
    shown = "; ".join(
        f"loss {by_dim:.2f} against {by_root:.2f} at d_k = {dim}" for dim, (by_dim, by_root) in losses.items()
    )
    return Evidence(flatter and bool(harmed), f"small models trained with 1/d_k: {shown}")


def _divides_by_dim() -> str:
    found = [setting.model for setting in language_models() if math.isclose(setting.multiplier, 1 / setting.head_dim)]
    return f"Not every model: {', '.join(found)} multiplies by 1/d_k, muP by {MUP_ATTENTION:g}/d_k."


CLAIMS: tuple[Number | Statement, ...] = (
    Statement(
        "score-variance",
        "Independent components of mean 0 and variance 1 give q·k the variance d_k.",
        "d_k",
        _variance_is_dim,
        remark="Whatever the distribution of the components.",
    ),
    Statement(
        "unit-variance-common",
        "Initialisation or normalisation commonly leaves q and k with mean 0 and variance 1.",
        "std 1",
        _after_layer_norm,
        Limit("of a vector just normalised", "of what usual initialisations project it to", _after_initialisation),
    ),
    Statement("common-head-dims", "Heads of 64, 128 and more dimensions are common.", "64, 128, larger", _head_dims),
    Statement(
        "large-scores-sharpen",
        "Scores too large, as without scaling, can make softmax give one key nearly all the weight.",
        "can be very sharp",
        _can_be_sharp,
        remark="It does not follow from size alone: softmax of [50, 50, 50] is even.",
    ),
    Statement(
        "sharp-rows-lose-gradient",
        "A row that one key dominates passes almost no gradient to its scores.",
        "vanishing",
        _sharp_row,
    ),
    Statement(
        "scaled-variance-near-one",
        "Dividing by √d_k ensures scores of variance about 1.",
        "about 1",
        unit_spread_at_start,
        Limit(
            "when q and k have unit variance",
            "when weights start from N(0, 0.02²)",
            gpt2_scaled_spread,
            is_stated=True,
        ),
    ),
    Statement(
        "scaled-weights-balanced",
        "At unit variance softmax stays balanced and keeps its gradient.",
        "neither sharp nor uniform",
        _balanced,
    ),
    Statement(
        "inverse-dim-variance", "Dividing by d_k leaves scores a variance of 1/d_k.", "1/d_k", _inverse_dim_variance
    ),
    Statement(
        "inverse-dim-uniform",
        "In wide heads, division by d_k makes softmax nearly uniform.",
        "near 1/n each",
        _inverse_dim_uniform,
    ),
    Statement("small-scores-uniform", "Scores near zero give weights near 1/n.", "close to 1/n", _small_scores),
    Statement(
        "inverse-dim-cannot-focus",
        "Division by d_k makes it hard to single out a relevant key.",
        "focus diluted",
        _cannot_focus,
    ),
    Statement(
        "inverse-dim-precision",
        "The very small scores that d_k leaves might in some cases be harder to handle precisely.",
        "could, in some cases",
        _less_precise,
        remark="Not of the weights one by one: rounding is relative. What they say beyond their mean is what is lost.",
    ),
    Number(
        "scaled-variance-identity",
        "Var(q·k)/d_k, the variance after dividing by √d_k.",
        "1",
        lambda: enumerated_variance(SKEWED, DIM) / DIM,
    ),
    Statement(
        "three-regimes",
        "√d_k lies between values that explode without a scale and values that d_k suppresses.",
        "too sharp, balanced, too flat",
        _three_regimes,
    ),
    Statement("introduced-2017", "The Transformer of 2017 introduced the division by √d_k.", "2017", _introduced),
    Statement(
        "validated-widely",
        "The division by √d_k has been validated in practice across many models.",
        "many models",
        _validated,
        remark="A selection, not a census; see also what the textbook section says of all models.",
    ),
    Statement(
        "wide-range-of-dims",
        "With √d_k models train well for a wide range of d_k.",
        "a wide range",
        _works_at_every_dim,
        remark="That it ensures stable training whatever else is done is judged in the textbook section.",
    ),
    Statement(
        "avoids-exploding-and-vanishing",
        "Without the scale gradients explode or vanish; √d_k avoids both.",
        "neither",
        _explodes_or_vanishes,
        remark="Both at once: not smaller in sum, but uneven, most queries pass little and a few pass much.",
    ),
    Statement(
        "inverse-dim-harms",
        "A model that divides by d_k attends less selectively and potentially does worse.",
        "potentially",
        _may_harm,
        remark=_divides_by_dim(),
    ),
)
