"""The textbook section's claims on practice: when scaling matters, other temperatures, what models do."""

import math

import numpy as np

from attnscale.claims.evidence import (
    DIM,
    DIMS,
    KEYS,
    NEAR_ONE,
    SPREAD,
    bounded_in_training,
    gpt2,
    normal_product_moment,
    t5_spread,
    trained_to_the_end,
    unit_spread_at_start,
)
from attnscale.claims.judging import Evidence, Limit, Statement
from attnscale.claims.settings import (
    CLIPPED_AT,
    FULL_SIZE,
    LLAMA4_FLOOR,
    SETTINGS,
    T5,
    find,
    language_models,
    llama4_temperature,
)
from attnscale.reference import attention_scores, row_statistics
from attnscale.theory import expected_softmax, regime, score_variance

NEARLY_NORMAL = 0.1  # excess kurtosis
NEGLIGIBLE = 0.01  # share of the work
MODERN = 2019  # GPT-2's year


def _lost(dim: int) -> float:
    """Share of the gradient gain that unscaled scores lose."""
    return 1 - expected_softmax(math.sqrt(dim), KEYS).gradient_gain / expected_softmax(1.0, KEYS).gradient_gain


def _high_dim() -> Evidence:
    holds = all(regime(math.sqrt(dim), KEYS) == "saturated" for dim in DIMS)
    return Evidence(holds, f"{_lost(64):.0%} of 1 − Σp² lost without it at d_k = 64, {_lost(512):.0%} at 512")


def _low_dim() -> Evidence:
    return Evidence(
        _lost(4) < _lost(64), f"{_lost(4):.0%} of 1 − Σp² lost without it at d_k = 4, {_lost(64):.0%} at 64"
    )


def _nearly_normal() -> Evidence:
    kurtosis = (normal_product_moment(4) - 3) / DIM  # that of a sum of independent terms falls as 1/d_k
    return Evidence(
        kurtosis < NEARLY_NORMAL, f"variance {score_variance(DIM):g}, excess kurtosis {kurtosis:.3f} at d_k = {DIM}"
    )


def _gpt2_variance() -> Evidence:
    variance = gpt2().score_std ** 2
    return Evidence(
        abs(variance / gpt2().head_dim - 1) < NEAR_ONE, f"variance {variance:.1f} at GPT-2's initialisation"
    )


def _bounded_by_norm() -> Evidence:
    """|s| ≤ ‖q‖‖k‖/√d_k = √d_k when q and k are RMS-normed with unit gain."""
    bound = math.sqrt(DIM) * math.sqrt(DIM) / SPREAD
    return Evidence(bound < CLIPPED_AT, f"|score| ≤ {bound:g} at d_k = {DIM}")


def _scale_healthy() -> Evidence:
    raw, scaled = regime(SPREAD, KEYS), regime(1.0, KEYS)
    return Evidence((raw, scaled) == ("saturated", "healthy"), f"{raw} without, {scaled} with")


def _scale_t5() -> Evidence:
    raw, scaled = regime(t5_spread(), KEYS), regime(t5_spread() / math.sqrt(T5.head_dim), KEYS)
    return Evidence(scaled == "healthy", f"{T5.model} is {raw} without, {scaled} with")


def _cheap() -> Evidence:
    """QKᵀ and PV take 2·n²·d_k operations each, the scale n²; on the query it takes n·d_k."""
    on_scores, on_query = 1 / (4 * DIM), 1 / (4 * KEYS)
    return Evidence(
        on_scores < NEGLIGIBLE, f"{on_scores:.2%} of the operations at d_k = {DIM}, {on_query:.3%} on the query"
    )


def _learned() -> Evidence:
    models = [setting.model for setting in SETTINGS if setting.learned]
    return Evidence(bool(models), f"published: {', '.join(models)}")


def _entropy_at(temperature: float) -> float:
    """H/ln n when scores are divided by this many √d_k."""
    return expected_softmax(1 / temperature, KEYS).entropy_ratio


def _sharper() -> Evidence:
    return Evidence(
        _entropy_at(0.5) < _entropy_at(1), f"H/ln n {_entropy_at(0.5):.2f} at ½√d_k, {_entropy_at(1):.2f} at √d_k"
    )


def _softer() -> Evidence:
    return Evidence(
        _entropy_at(2) > _entropy_at(1), f"H/ln n {_entropy_at(2):.2f} at 2√d_k, {_entropy_at(1):.2f} at √d_k"
    )


def _by_query() -> Evidence:
    query, key = np.ones((3, 2)), np.array([[0.0, 1.0], [1.0, 2.0], [2.0, 3.0], [3.0, 5.0], [5.0, 5.0]])
    ratios = row_statistics(attention_scores(query, key, scale=np.array([[0.1], [0.5], [2.0]]))).entropy_ratio
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return Evidence(bool((np.diff(ratios) < 0).all()), f"H/ln n {shown} for one query at three scales")


def _universal() -> Evidence:
    models = language_models(since=MODERN, millions=FULL_SIZE)
    others = [setting for setting in models if not setting.standard]
    shown = (
        f"published: {len(models) - len(others)} of {len(models)} models; times 1/√d_k: {', '.join(map(str, others))}"
    )
    return Evidence(not others, shown)


def _gpt() -> Evidence:
    models = [find(name) for name in ("GPT", "GPT-2")]
    return Evidence(
        all(setting.standard for setting in models), f"published, times 1/√d_k: {', '.join(map(str, models))}"
    )


def _llama() -> Evidence:
    model = find("LLaMA-2 7B")
    return Evidence(model.standard, f"published, times 1/√d_k: {model}")


def _llama4() -> Evidence:
    factor = llama4_temperature(LLAMA4_FLOOR)
    return Evidence(factor == 1, f"Llama 4 {factor:.3f} from token {LLAMA4_FLOOR:,} on")


def _essential_for_all() -> Evidence:
    without = [setting.model for setting in language_models(millions=FULL_SIZE) if setting.multiplier == 1]
    return Evidence(not without, f"published: {', '.join(without)} multiply by 1")


STATEMENTS = (
    Statement("high-dim-critical", "For wide heads scaling is critical.", "critical", _high_dim),
    Statement("low-dim-less-critical", "For narrow heads scaling matters less.", "less critical", _low_dim),
    Statement(
        "random-init-normal",
        "At random initialisation scores are close to N(0, d_k).",
        "N(0, d_k)",
        _nearly_normal,
        Limit("when q and k have unit variance", "when weights start from N(0, 0.02²)", _gpt2_variance),
    ),
    Statement(
        "trained-controlled",
        "A trained model may keep its scores in check by itself.",
        "may be controlled",
        _bounded_by_norm,
        Limit("when q and k are normalised", "when nothing bounds their norms", bounded_in_training),
    ),
    Statement(
        "always-scale",
        "One should always scale.",
        "always",
        _scale_healthy,
        Limit("when q and k have unit variance", "when their initialisation holds the factor already", _scale_t5),
    ),
    Statement("cost-negligible", "Scaling costs next to nothing.", "negligible", _cheap),
    Statement("learned-temperature", "Some implementations learn the temperature.", "some", _learned),
    Statement("small-temperature-sharper", "A temperature under √d_k sharpens attention.", "sharper", _sharper),
    Statement("large-temperature-softer", "A temperature over √d_k softens attention.", "softer", _softer),
    Statement("scale-by-query", "A scale for each query lets queries differ in sharpness.", "differ", _by_query),
    Statement(
        "modern-llms-universal",
        "All modern language models scale by 1/√d_k.",
        "universal",
        _universal,
        remark="A universal claim falls with one exception; the table is a selection, not a census.",
    ),
    Statement("gpt-standard", "GPT scales by 1/√d_k.", "standard", _gpt),
    Statement(
        "llama-standard",
        "LLaMA scales by 1/√d_k.",
        "standard",
        _llama,
        Limit("up to LLaMA-2", "of Llama 4's layers without rotary positions", _llama4),
    ),
    Statement(
        "stable-training-any-dim",
        "With 1/√d_k training is stable whatever the dimension.",
        "stable",
        unit_spread_at_start,
        Limit("at initialisation", "of training at a high learning rate", trained_to_the_end),
    ),
    Statement(
        "essential-in-practice",
        "Attention needs the division to work in practice.",
        "essential",
        _scale_healthy,
        Limit("when q and k have unit variance", "of every released model", _essential_for_all),
    ),
)
