"""The textbook section's claims on practice: when scaling matters, other temperatures, and released models."""

import math

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnscale.claims import computations as compute
from attnscale.claims.computations import DIM, DIMS, KEYS, NEAR_ONE
from attnscale.claims.judging import Evidence, Limit, Source
from attnscale.claims.settings import (
    CLIPPED_AT,
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
from attnscale.lab.outcomes import Band, band
from attnscale.reference import attention_scores, row_statistics
from attnscale.theory import regime

NEARLY_NORMAL = 0.1  # excess kurtosis
NEGLIGIBLE = 0.01  # share of the work, or of what was learned
LESS = 0.5  # of what it costs an untrained model
MODERN = 2019  # GPT-2's year
UNIT = "when q and k have unit variance"


def _lost(dim: int) -> Band:
    """Return the share of 1 − Σp² that rows of drawn scores lose without a scale."""
    raw, scaled = (compute.drawn_rows(dim, divisor).jacobian_trace for divisor in (1.0, math.sqrt(dim)))
    return band(1 - raw / scaled.mean())


def _gpt2_variance() -> Evidence:
    variance = compute.head_spread("GPT-2").mean ** 2
    return Evidence(abs(variance / DIM - 1) < NEAR_ONE, f"variance {variance:.1f} at GPT-2's initialisation")


def _cost(scale: str) -> float:
    """Return what another scale costs the bundled model, as a share of what it has learned."""
    return (bundled(scale).mean - bundled("1/√d_k").mean) / (TEXT - bundled("1/√d_k").mean)


def _fresh_cost() -> float:
    """Return what a model loses that learns without a scale, as a share of what another learns with it."""
    wide = HEAD_DIMS[-1]
    return (final_loss(wide, "none").mean - final_loss(wide).mean) / (TASK.chance - final_loss(wide).mean)


def _trained_indifferent() -> Evidence:
    shown = f"1/d_k in the bundled model: {bundled('1/d_k'):.2f} nats, {_cost('1/d_k'):.0%} of what it learned"
    return Evidence(_cost("1/d_k") < NEGLIGIBLE, shown)


def _scale_healthy() -> Evidence:
    spread = compute.drawn_spread(DIM)
    raw, scaled = regime(spread.std, KEYS), regime(spread.over(math.sqrt(DIM)).std, KEYS)
    return Evidence((raw, scaled) == ("sharp", "healthy"), f"drawn at d_k = {DIM}: {raw} without, {scaled} with")


def _scale_t5() -> Evidence:
    raw, scaled = regime(compute.t5_spread(), KEYS), regime(compute.t5_spread() / math.sqrt(T5.head_dim), KEYS)
    return Evidence(scaled == "healthy", f"{T5.model} is {raw} without, {scaled} with")


def _learned_alone() -> Evidence:
    found = [each.model for each in LEARNED if each.language and each.is_temperature]
    return Evidence(bool(found), f"published: {', '.join(found) or 'none here'} with a τ in place of √d_k")


def _entropy_at(temperature: float) -> Band:
    """Return the entropy of drawn scores, as a share of its maximum, when divided by this many √d_k."""
    return band(compute.drawn_rows(DIM, temperature * math.sqrt(DIM)).entropy_ratio)


def _llama4() -> Evidence:
    factor = llama4_temperature(LLAMA4_FLOOR)
    return Evidence(factor == 1, f"Llama 4 {factor:.3f} from token {LLAMA4_FLOOR:,} on")


def _essential_for_all() -> Evidence:
    without = [setting.model for setting in language_models(millions=FULL_SIZE) if setting.multiplier == 1]
    return Evidence(not without, f"published: {', '.join(without)} multiply by 1")


def _stable(rate: float) -> Evidence:
    losses = [final_loss(dim, rate=rate) for dim in HEAD_DIMS]
    learned = sum(map(has_learned, losses))
    shown = (
        f"at a rate of {rate:g}, {learned} of {len(losses)} small models of d_k {HEAD_DIMS[0]} to {HEAD_DIMS[-1]} "
        f"learn (loss {', '.join(f'{loss:.2f}' for loss in losses)}; guessing {TASK.chance:.2f})"
    )
    return Evidence(learned == len(losses), shown)


def add_claims(source: Source) -> None:
    """Add these claims to the textbook's."""
    source.section("When Scaling Matters Most")

    @source.claim("high-dim-critical", "For wide heads scaling is critical.", "critical")
    def _high_dim() -> Evidence:
        holds = all(regime(compute.drawn_spread(dim).std, KEYS) == "sharp" for dim in DIMS)
        return Evidence(holds, f"1 − Σp² falls by {_lost(64):.0%} without it at d_k = 64, by {_lost(512):.0%} at 512")

    @source.claim("low-dim-less-critical", "For narrow heads scaling matters less.", "less critical")
    def _low_dim() -> Evidence:
        shown = f"1 − Σp² falls by {_lost(4):.0%} without it at d_k = 4, by {_lost(64):.0%} at 64"
        return Evidence(_lost(4).high < _lost(64).low, shown)

    @source.claim(
        "random-init-normal", "At random initialisation scores are close to N(0, d_k).", "N(0, d_k)",
        limit=Limit(UNIT, "when weights start from N(0, 0.02²)", _gpt2_variance),
    )  # fmt: skip
    def _nearly_normal() -> Evidence:
        scores = compute.drawn_scores(DIM)
        kurtosis = float(((scores - scores.mean()) ** 4).mean() / scores.var() ** 2 - 3)
        holds = abs(kurtosis) < NEARLY_NORMAL and compute.drawn_spread(DIM).is_(DIM)
        shown = f"drawn at d_k = {DIM}: spread {compute.drawn_spread(DIM):.2f}, excess kurtosis {kurtosis:.2f}"
        return Evidence(holds, shown)

    @source.claim(
        "trained-controlled", "In a trained model scores may be controlled.", "may be",
        remark="Not in every one. Published: the largest score of a trial run of Kimi K2 passed 1,000 (its report).",
    )  # fmt: skip
    def _bundled_controlled() -> Evidence:
        found = bundled_scores()
        size = f"the bundled model's scores have a spread of {found['std']:.2f} and reach {found['max']:.0f}"
        return Evidence(found["max"] < CLIPPED_AT, f"{size}; published runs clip from {CLIPPED_AT:.0f} on")

    @source.claim(
        "trained-less-critical", "In a trained model scaling is less critical.", "less critical",
        limit=Limit("for no scale at all", "for 1/d_k in its place", _trained_indifferent),
    )  # fmt: skip
    def _trained_spared() -> Evidence:
        shown = (
            f"removed from the bundled model: {bundled('1/√d_k'):.2f} to {bundled('none'):.2f} nats, "
            f"{_cost('none'):.0%} of what it learned; missing from the start, a small model loses {_fresh_cost():.0%}"
        )
        return Evidence(_cost("none") < LESS * _fresh_cost(), shown)

    source.claim(
        "always-scale", "One should always scale.", "always",
        limit=Limit(UNIT, "when their initialisation contains the factor already", _scale_t5),
    )(_scale_healthy)  # fmt: skip

    @source.claim("cost-negligible", "Scaling costs next to nothing.", "negligible")
    def _cheap() -> Evidence:
        query, key = torch.empty(KEYS, DIM, device="meta"), torch.empty(KEYS, DIM, device="meta")
        with FlopCounterMode(display=False) as counter:
            scores = query @ key.T
            scores @ key
        on_scores, on_query = (each.numel() / counter.get_total_flops() for each in (scores, query))
        shown = f"{on_scores:.2%} of the operations at d_k = {DIM}, {on_query:.3%} if the query is multiplied instead"
        return Evidence(on_scores < NEGLIGIBLE, shown)

    source.section("Alternative Scaling Factors")

    @source.claim("learned-temperature", "Some implementations learn the temperature.", "some")
    def _learned() -> Evidence:
        return Evidence(len(LEARNED) > 1, f"published: {'; '.join(map(str, LEARNED))}")

    @source.claim(
        "efficient-learn-temperature", "Some efficient variants of language models learn the temperature.", "some",
        limit=Limit("for a learned gain on q·k", "for a temperature alone", _learned_alone),
        remark="A selection of models, not all.",
    )  # fmt: skip
    def _learned_in_language() -> Evidence:
        found = [each for each in LEARNED if each.language]
        return Evidence(bool(found), f"published: {'; '.join(map(str, found))}")

    @source.claim("small-temperature-sharper", "A temperature below √d_k sharpens attention.", "sharper")
    def _sharper() -> Evidence:
        shown = f"entropy, of its maximum: {_entropy_at(0.5):.0%} at ½√d_k, {_entropy_at(1):.0%} at √d_k"
        return Evidence(_entropy_at(0.5).high < _entropy_at(1).low, shown)

    @source.claim("large-temperature-softer", "A temperature above √d_k softens attention.", "softer")
    def _softer() -> Evidence:
        shown = f"entropy, of its maximum: {_entropy_at(2):.0%} at 2√d_k, {_entropy_at(1):.0%} at √d_k"
        return Evidence(_entropy_at(2).low > _entropy_at(1).high, shown)

    @source.claim("scale-by-query", "A scale for each query lets queries differ in sharpness.", "differ")
    def _by_query() -> Evidence:
        query, key = np.ones((3, 2)), np.array([[0.0, 1.0], [1.0, 2.0], [2.0, 3.0], [3.0, 5.0], [5.0, 5.0]])
        ratios = row_statistics(attention_scores(query, key, scale=np.array([[0.1], [0.5], [2.0]]))).entropy_ratio
        shown = ", ".join(f"{ratio:.0%}" for ratio in ratios)
        return Evidence(bool((np.diff(ratios) < 0).all()), f"entropy, of its maximum: {shown} at three scales")

    source.section("Connection to Modern LLMs")

    @source.claim(
        "modern-llms-universal", "All modern language models scale by 1/√d_k.", "universal",
        remark="One exception refutes a universal claim. How many models do so a selection cannot say: not testable.",
    )  # fmt: skip
    def _universal() -> Evidence:
        models = language_models(since=MODERN, millions=FULL_SIZE)
        others = [setting for setting in models if not setting.standard]
        return Evidence(not others, f"published, times 1/√d_k: {', '.join(map(str, others)) or 'none that differs'}")

    @source.claim("gpt-standard", "GPT scales by 1/√d_k.", "standard")
    def _gpt() -> Evidence:
        models = [find(name) for name in ("GPT", "GPT-2")]
        shown = f"published, times 1/√d_k: {', '.join(map(str, models))}"
        return Evidence(all(setting.standard for setting in models), shown)

    @source.claim(
        "llama-standard", "LLaMA scales by 1/√d_k.", "standard",
        limit=Limit("up to LLaMA-2", "for Llama 4's layers without rotary positions", _llama4),
    )  # fmt: skip
    def _llama() -> Evidence:
        model = find("LLaMA-2 7B")
        return Evidence(model.standard, f"published, times 1/√d_k: {model}")

    source.section("Summary")

    source.claim(
        "stable-training-any-dim", "With 1/√d_k training is stable whatever the dimension.", "stable",
        limit=Limit("at a suitable learning rate", "at a hundred times that rate", lambda: _stable(HOT * RATE)),
        remark="Published: runs whose largest score passed 10,000 diverged (Wortsman et al., arXiv 2309.14322).",
    )(lambda: _stable(RATE))  # fmt: skip

    source.claim(
        "essential-in-practice", "Attention needs the division to work in practice.", "essential",
        limit=Limit(UNIT, "for released models that multiply by 1", _essential_for_all),
    )(_scale_healthy)  # fmt: skip
