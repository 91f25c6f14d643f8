"""The textbook section's claims on practice: when scaling matters, other temperatures, what models do."""

import math

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnscale.claims.draws import drawn_rows, drawn_scores, drawn_spread, head_spread
from attnscale.claims.evidence import DIM, DIMS, KEYS, NEAR_ONE, grown_past_clipping, t5_spread
from attnscale.claims.judging import Evidence, Limit, Statement
from attnscale.claims.settings import (
    CLIPPED_AT,
    DIVERGED,
    FULL_SIZE,
    LEARNED,
    LLAMA4_FLOOR,
    T5,
    find,
    language_models,
    llama4_temperature,
)
from attnscale.claims.trained import (
    HEAD_DIMS,
    HOT,
    RATE,
    TASK,
    TEXT,
    bundled,
    bundled_scores,
    final_loss,
    has_learned,
)
from attnscale.reference import attention_scores, row_statistics
from attnscale.theory import regime

NEARLY_NORMAL = 0.1  # excess kurtosis
NEGLIGIBLE = 0.01  # share of the work, or of what was learned
LESS = 0.5  # of what it costs an untrained model
MODERN = 2019  # GPT-2's year


def _lost(dim: int) -> float:
    """Share of 1 − Σp² that rows of drawn scores lose without a scale."""
    raw, scaled = (float(drawn_rows(dim, divisor).gradient_gain.mean()) for divisor in (1.0, math.sqrt(dim)))
    return 1 - raw / scaled


def _high_dim() -> Evidence:
    holds = all(regime(drawn_spread(dim).std, KEYS) == "saturated" for dim in DIMS)
    return Evidence(holds, f"{_lost(64):.0%} of 1 − Σp² lost without it at d_k = 64, {_lost(512):.0%} at 512")


def _low_dim() -> Evidence:
    return Evidence(
        _lost(4) < _lost(64), f"{_lost(4):.0%} of 1 − Σp² lost without it at d_k = 4, {_lost(64):.0%} at 64"
    )


def _nearly_normal() -> Evidence:
    scores = drawn_scores(DIM)
    kurtosis = float(((scores - scores.mean()) ** 4).mean() / scores.var() ** 2 - 3)
    holds = abs(kurtosis) < NEARLY_NORMAL and drawn_spread(DIM).is_(DIM)
    return Evidence(
        holds, f"variance {drawn_spread(DIM).variance:.0f}, excess kurtosis {kurtosis:.2f} at d_k = {DIM}, drawn"
    )


def _gpt2_variance() -> Evidence:
    variance = head_spread("GPT-2") ** 2
    return Evidence(abs(variance / DIM - 1) < NEAR_ONE, f"variance {variance:.1f} at GPT-2's initialisation, drawn")


def _bundled_controlled() -> Evidence:
    """ "May" needs one that is: the bundled model, whose largest score no published limit would clip."""
    found = bundled_scores()
    size = f"the bundled model's scores spread by {found['std']:.2f} and reach {found['max']:.0f}"
    return Evidence(found["max"] < CLIPPED_AT, f"{size}, where published runs clip from {CLIPPED_AT:.0f} on")


def _cost(scale: str) -> float:
    """What another scale costs the bundled model, of all it has learned."""
    return (bundled(scale) - bundled("1/√d_k")) / (TEXT - bundled("1/√d_k"))


def _fresh_cost() -> float:
    """What leaving the scale out costs a model that learns without it, of all that the other learns."""
    wide = HEAD_DIMS[-1]
    return (final_loss(wide, "none") - final_loss(wide)) / (TASK.chance - final_loss(wide))


def _trained_spared() -> Evidence:
    shown = (
        f"left out of the bundled model: {bundled('1/√d_k'):.2f} to {bundled('none'):.2f} nats, {_cost('none'):.0%} of "
        f"what it learned; left out from the start, a small model loses {_fresh_cost():.0%}"
    )
    return Evidence(_cost("none") < LESS * _fresh_cost(), shown)


def _trained_indifferent() -> Evidence:
    shown = f"1/d_k in the bundled model: {bundled('1/d_k'):.2f} nats, {_cost('1/d_k'):.0%} of what it learned"
    return Evidence(_cost("1/d_k") < NEGLIGIBLE, shown)


def _scale_healthy() -> Evidence:
    spread = drawn_spread(DIM)
    raw, scaled = regime(spread.std, KEYS), regime(spread.over(math.sqrt(DIM)).std, KEYS)
    return Evidence((raw, scaled) == ("saturated", "healthy"), f"{raw} without, {scaled} with, drawn at d_k = {DIM}")


def _scale_t5() -> Evidence:
    raw, scaled = regime(t5_spread(), KEYS), regime(t5_spread() / math.sqrt(T5.head_dim), KEYS)
    return Evidence(scaled == "healthy", f"{T5.model} is {raw} without, {scaled} with")


def _cheap() -> Evidence:
    """The scale is one operation a score, or one a component of the query, beside those counted in both products."""
    query, key = torch.empty(KEYS, DIM, device="meta"), torch.empty(KEYS, DIM, device="meta")
    with FlopCounterMode(display=False) as counter:
        scores = query @ key.T
        scores @ key
    on_scores, on_query = (each.numel() / counter.get_total_flops() for each in (scores, query))
    return Evidence(
        on_scores < NEGLIGIBLE, f"{on_scores:.2%} of the operations at d_k = {DIM}, {on_query:.3%} on the query"
    )


def _learned() -> Evidence:
    return Evidence(len(LEARNED) > 1, f"published: {'; '.join(map(str, LEARNED))}")


def _learned_in_language() -> Evidence:
    found = [each for each in LEARNED if each.language]
    return Evidence(bool(found), f"published: {'; '.join(map(str, found))}")


def _learned_alone() -> Evidence:
    found = [each.model for each in LEARNED if each.language and each.is_temperature]
    return Evidence(bool(found), f"published: {', '.join(found) or 'none here'} with a τ in place of √d_k")


def _entropy_at(temperature: float) -> float:
    """H/ln n of drawn scores when they are divided by this many √d_k."""
    return float(drawn_rows(DIM, temperature * math.sqrt(DIM)).entropy_ratio.mean())


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


def _stable(rate: float) -> Evidence:
    losses = [final_loss(dim, rate=rate) for dim in HEAD_DIMS]
    learned = sum(map(has_learned, losses))
    dims = f"d_k {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
    shown = f"at a rate of {rate:g} {learned} of {len(losses)} small models of {dims} learn, to {min(losses):.2f}"
    return Evidence(learned == len(losses), f"{shown} to {max(losses):.2f} nats, guessing {TASK.chance:.2f}")


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
        "In a trained model scores may be controlled.",
        "may be",
        _bundled_controlled,
        remark=f"Not in every one; {grown_past_clipping()}.",
    ),
    Statement(
        "trained-less-critical",
        "In a trained model scaling is less critical.",
        "less critical",
        _trained_spared,
        Limit("of leaving it out", "of putting 1/d_k in its place", _trained_indifferent),
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
    Statement(
        "efficient-learn-temperature",
        "Some efficient variants of language models learn the temperature.",
        "some",
        _learned_in_language,
        Limit("of a learned gain on q·k", "of a temperature alone", _learned_alone),
        remark="A selection, not a census.",
    ),
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
        lambda: _stable(RATE),
        Limit("at a rate that suits the model", "at a hundred times that rate", lambda: _stable(HOT * RATE)),
        remark=f"Published: runs whose largest score passed {DIVERGED.max_score:,.0f} diverged ({DIVERGED.name}).",
    ),
    Statement(
        "essential-in-practice",
        "Attention needs the division to work in practice.",
        "essential",
        _scale_healthy,
        Limit("when q and k have unit variance", "of every released model", _essential_for_all),
    ),
)
