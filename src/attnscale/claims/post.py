"""Claims of the blog post on stabilising attention scores: why √d_k, and why not d_k."""

import math
from functools import partial

import numpy as np
from numpy.typing import DTypeLike

from attnscale.claims.evidence import (
    DIM,
    DIMS,
    KEYS,
    NEAR_ONE,
    SIGNS,
    SKEWED,
    TINY_GAIN,
    bounded_in_training,
    gpt2,
    gpt2_scaled_spread,
    layer_norm,
    leading_row,
    one_hot,
    products,
    unit_spread_at_start,
)
from attnscale.claims.judging import Evidence, Limit, Number, Source, Statement
from attnscale.claims.settings import MUP_ATTENTION, SETTINGS, language_models
from attnscale.reference import row_statistics, softmax
from attnscale.theory import expected_softmax, predict, regime, saturation_point, score_variance
from attnscale.theory.limits import SATURATED_TOP1

SOURCE = Source("000_d12550b827726f46.txt", "Stabilizing Attention Scores in Transformers", "blog post")

LOW_PRECISION = (np.float16, np.float32)
WIDE_DIM = 1024  # far beyond any head, to give small scores every chance to be too small
FOCUS_LOST = 10  # a weight this many times smaller counts as focus lost


def _variance_is_dim() -> Evidence:
    enumerated = [float(products(values, 3).sum(-1).var()) for values in (SIGNS, SKEWED)]
    holds = all(score_variance(dim) == dim for dim in DIMS) and np.allclose(enumerated, 3)
    return Evidence(holds, f"{score_variance(DIM):g} at d_k = {DIM}; {enumerated[0]:g} by enumeration at d_k = 3")


def _after_layer_norm() -> Evidence:
    normed = layer_norm(np.array(SKEWED) + 1)
    holds = np.allclose([normed.mean(), normed.std()], [0, 1])
    return Evidence(holds, f"std {normed.std():.2f} after LayerNorm")


def _after_initialisation() -> Evidence:
    stds = {
        "GPT-2": gpt2().query_std,
        "nn.Linear": predict(768, 12, KEYS, initialisation="torch").query_std,
        "nn.MultiheadAttention": predict(768, 12, KEYS, initialisation="xavier", packed=True).query_std,
    }
    holds = all(abs(std - 1) < NEAR_ONE for std in stds.values())
    return Evidence(holds, "q std " + ", ".join(f"{std:.2f} ({name})" for name, std in stds.items()))


def _head_dims() -> Evidence:
    dims = sorted({setting.head_dim for setting in language_models()})
    return Evidence({64, 128} < set(dims) and dims[-1] > 128, f"published: {', '.join(map(str, dims))}")


def _leading_score() -> Evidence:
    lead = math.ceil(saturation_point(KEYS))
    top1 = row_statistics([lead] + [0.0] * (KEYS - 1)).top1.item()
    return Evidence(top1 > SATURATED_TOP1, f"top weight {top1:.3f} of {KEYS} keys with a lead of {lead}")


def _sharp_row() -> Evidence:
    row = leading_row(KEYS)
    return Evidence(row.gradient_gain.item() <= TINY_GAIN, f"1 − Σp² = {row.gradient_gain.item():.3f} at weight 0.99")


def _balanced() -> Evidence:
    row = expected_softmax(1.0, KEYS)
    holds = all(regime(1.0, keys) == "healthy" for keys in (64, KEYS, 16 * KEYS)) and row.top1 < 0.5
    return Evidence(
        holds, f"H/ln n {row.entropy_ratio:.2f}, top weight {row.top1:.3f}, 1 − Σp² {row.gradient_gain:.3f}"
    )


def _inverse_dim_variance() -> Evidence:
    holds = all(math.isclose(score_variance(dim) / dim**2, 1 / dim) for dim in DIMS)
    return Evidence(holds, f"{score_variance(DIM) / DIM**2:.4f} = 1/{DIM} at d_k = {DIM}")


def _inverse_dim_uniform() -> Evidence:
    holds = all(regime(dim**-0.5, KEYS) == "diluted" for dim in DIMS if dim >= DIM)
    return Evidence(holds, f"H/ln n {expected_softmax(DIM**-0.5, KEYS).entropy_ratio:.4f} at d_k = {DIM}")


def _small_scores() -> Evidence:
    sizes = (1.0, 0.1, 0.01)
    away = [float(abs(KEYS * softmax(np.linspace(-size, size, KEYS)) - 1).max()) for size in sizes]
    holds = all(distance < 2 * size for size, distance in zip(sizes, away, strict=True))
    return Evidence(holds, f"n·p within {away[-1]:.2g} of 1 for scores within {sizes[-1]} of 0")


def _weight_of_match(scale: float) -> float:
    """Weight of a key that equals its query, among keys independent of it."""
    match, others = math.exp(scale * DIM), (KEYS - 1) * math.exp(scale**2 * DIM / 2)
    return match / (match + others)


def _cannot_focus() -> Evidence:
    by_root, by_dim = _weight_of_match(DIM**-0.5), _weight_of_match(1 / DIM)
    return Evidence(by_dim * FOCUS_LOST < by_root, f"a matching key gets {by_dim:.4f} instead of {by_root:.2f}")


def _rounding_error(scale: float, dim: int, dtype: DTypeLike) -> float:
    """Largest relative error of softmax weights in low precision, sums accumulated in float32 as kernels do."""
    rng = np.random.default_rng(0)
    scores = scale * rng.standard_normal((31, dim)) @ rng.standard_normal((257, dim)).T
    low = scores.astype(dtype)
    terms = np.exp(low - low.max(-1, keepdims=True))
    weights = terms / terms.sum(-1, keepdims=True, dtype=np.float32).astype(dtype)
    return float(abs(weights.astype(np.float64) / softmax(scores) - 1).max())


def _less_precise() -> Evidence:
    cases = [(dim, dtype) for dim in (DIM, WIDE_DIM) for dtype in LOW_PRECISION]
    by_dim = [_rounding_error(1 / dim, dim, dtype) for dim, dtype in cases]
    by_root = [_rounding_error(dim**-0.5, dim, dtype) for dim, dtype in cases]
    worse = sum(d > root for d, root in zip(by_dim, by_root, strict=True))
    shown = f"float16 weights are off by {by_dim[0]:.2%} with 1/d_k, by {by_root[0]:.2%} with 1/√d_k"
    return Evidence(worse > 0, f"{shown}; 1/d_k is worse in {worse} of {len(cases)} cases")


def _three_regimes() -> Evidence:
    prediction = predict(512, 8, KEYS)
    regimes = [prediction[name].regime for name in ("unscaled", "inverse_sqrt", "inverse_dim")]
    return Evidence(regimes == ["saturated", "healthy", "diluted"], ", ".join(regimes))


def _introduced() -> Evidence:
    first = min((setting for setting in SETTINGS if setting.standard), key=lambda setting: setting.year)
    return Evidence((first.model, first.year) == ("Transformer", 2017), f"published: {first.model}, {first.year}")


def _no_model_divides_by_dim() -> Evidence:
    found = [setting for setting in language_models() if math.isclose(setting.multiplier, 1 / setting.head_dim)]
    shown = f"published: {', '.join(setting.model for setting in found)} multiplies by 1/d_k"
    by_mup = f"muP by {MUP_ATTENTION:g}/d_k, a spread of {MUP_ATTENTION / math.sqrt(DIM):g} at d_k = {DIM}"
    return Evidence(not found, f"{shown}, {by_mup}")


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
        "Large scores make softmax give one key nearly all the weight.",
        "one weight near 1",
        _leading_score,
        Limit(
            "when one score leads the others", "when large scores are close together", partial(one_hot, [50, 50, 50])
        ),
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
        Limit("when q and k have unit variance", "when weights start from N(0, 0.02²)", gpt2_scaled_spread),
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
        "The small scores that d_k leaves may be numerically less precise.",
        "less precise",
        _less_precise,
        remark="Tried in float16 and float32, at d_k = 64 and 1024. Rounding is relative: a smaller score loses less.",
    ),
    Number(
        "scaled-variance-identity",
        "Var(q·k)/d_k, the variance after dividing by √d_k.",
        "1",
        lambda: score_variance(DIM) / DIM,
    ),
    Statement(
        "three-regimes",
        "√d_k lies between values that explode without a scale and values that d_k suppresses.",
        "too sharp, balanced, too flat",
        _three_regimes,
    ),
    Statement("introduced-2017", "The Transformer of 2017 introduced the division by √d_k.", "2017", _introduced),
    Statement(
        "wide-range-of-dims",
        "Training with √d_k is stable for narrow and wide heads alike.",
        "stable for many d_k",
        unit_spread_at_start,
        Limit("at initialisation", "of every training run", bounded_in_training),
    ),
    Statement(
        "inverse-dim-harms",
        "A model that divides by d_k attends less selectively and may do worse.",
        "potentially harmful",
        _inverse_dim_uniform,
        Limit("at initialisation", "of every model that was trained so", _no_model_divides_by_dim),
    ),
)
