"""Claims of the textbook section on scaled attention: its examples, code and exercises, then its practice."""

import math

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnscale.claims import computations as compute
from attnscale.claims import settings
from attnscale.claims.computations import DIM, DIMS, HEAD_DIMS, HOT, KEYS, NEAR_ONE, RATE, SPREAD, TASK, TEXT
from attnscale.claims.judging import Entry, Evidence, Limit, Source
from attnscale.lab.outcomes import Outcomes, band
from attnscale.reference import (
    Array,
    attention_scores,
    row_statistics,
    scaled_dot_product_attention,
    softmax,
    softmax_jacobian,
)
from attnscale.theory import regime, saturation_point
from attnscale.theory.limits import SATURATED_TOP1

SOURCE = Source("textbook", "Section 5.3: Scaled Attention — Why √d Matters", "textbook section")

PEAKED = np.array([8.5, -2.1, 7.9])  # the source omits further scores
FIVE = np.array([9.2, -3.1, 8.8, -5.4, 1.2])
LIKELY = 0.95  # share of samples that count as consistent
NEARLY_NORMAL = 0.1  # largest excess kurtosis of a nearly normal distribution
NEGLIGIBLE = 0.01  # negligible share of the operations, or of the reduction of the loss
LESS = 0.5  # less critical: the cost is below this share of an untrained model's
MODERN = 2019  # year of GPT-2


def normal_product_moment(power: int) -> float:
    """Return E[(XY)^power] for independent standard normal X and Y, by Gauss–Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    weights = weights / weights.sum()
    return float(weights @ np.outer(nodes, nodes) ** power @ weights)


def _linear() -> Evidence:
    pairs = Outcomes([cell for dim in DIMS for cell in compute.drawn_pairs(dim).cells])
    power = pairs.exponent("variance", "head_dim")
    return compute.near_one(f"drawn from d_k = {DIMS[0]} to {DIMS[-1]}:", {"the power of d_k": power})


SOURCE.add(
    "Variance Analysis",
    Entry("normal-product-mean", "E[XY] for independent standard normals.", "0", lambda: normal_product_moment(1)),
    Entry("normal-product-square", "E[(XY)²] for independent standard normals.", "1",
          lambda: normal_product_moment(2)),
    Entry("normal-product-variance", "Var(XY) for independent standard normals.", "1",
          lambda: normal_product_moment(2) - normal_product_moment(1) ** 2),
    Entry("variance-linear", "The variance of q·k grows linearly with d_k.", "linear", _linear),
)  # fmt: skip


def _saturates() -> Evidence:
    found, top1 = regime(compute.drawn_spread(DIM).mean, KEYS), compute.drawn("top1", DIM)
    return Evidence(found == "sharp", f"drawn: {found}, with a largest weight of {top1:.2f} on average")


def _vanishing() -> Evidence:
    gains = [row_statistics([x, 0, 0, 0]).jacobian_trace.item() for x in (5, 10, 20, 30)]
    holds = gains == sorted(gains, reverse=True) and gains[-1] < 1e-9
    return Evidence(holds, f"1 − Σp² from {gains[0]:.2g} to {gains[-1]:.1g} as the lead grows from 5 to 30")


SOURCE.add(
    "Why This Matters",
    Entry("score-std-64", "The spread of unscaled scores at d_k = 64 is 8.", "8",
          lambda: compute.drawn_spread_is(0.0, DIM)),
    Entry("softmax-peaked", "Softmax of [8.5, -2.1, 7.9].", "0.99 0.00 0.01", lambda: softmax(PEAKED),
          "Further scores, which the source omits, would not change the ratio of the first to the third."),
    Entry("saturates-at-64", "Unscaled scores at d_k = 64 saturate the softmax.", "almost all on one key", _saturates,
          limit=Limit("if that means a spread above the critical one", "if it means one-hot rows",
                      compute.mostly_one_hot)),
    Entry("saturated-gradients-vanish", "As softmax saturates its derivatives tend to zero.", "→ 0", _vanishing),
    Entry("one-position-contributes", "In a saturated row a single position contributes.", "one",
          lambda: compute.row_has(compute.leading_scores(KEYS), "effective_keys", below=1 + NEAR_ONE)),
)  # fmt: skip

SOURCE.add(
    "Why √d_k Works",
    Entry("scaled-unit-any-dim", "Division by √d_k gives variance 1 at every d_k.", "1",
          lambda: compute.drawn_spread_is(0.5, *DIMS)),
)  # fmt: skip


def _five_spread() -> Evidence:
    """Locate the sample variance among those of five N(0, 8²) draws: (n−1)s²/σ² is χ² with four degrees of freedom."""
    half = (FIVE.size - 1) * FIVE.var(ddof=1) / SPREAD**2 / 2
    below = 1 - math.exp(-half) * (1 + half)
    return Evidence(abs(below - 0.5) < LIKELY / 2, f"std {FIVE.std(ddof=1):.2f}; {below:.0%} of such samples are lower")


def _two_positions() -> Evidence:
    two = np.sort(softmax(FIVE))[-2:].sum()
    return Evidence(bool(two > SATURATED_TOP1), f"{two:.4f} on two keys")


SOURCE.add(
    "Visualizing the Effect",
    Entry("five-scores-spread", "The scores [9.2, -3.1, 8.8, -5.4, 1.2] have a spread of about 8.", "about 8",
          _five_spread),
    Entry("softmax-five", "Softmax of [9.2, -3.1, 8.8, -5.4, 1.2].", "0.599 0.000 0.401 0.000 0.000",
          lambda: softmax(FIVE)),
    Entry("two-positions", "Of these five scores two take all the attention.", "two keys", _two_positions),
    Entry("scaled-five", "[9.2, -3.1, 8.8, -5.4, 1.2] divided by 8.", "1.15 -0.39 1.10 -0.68 0.15",
          lambda: FIVE / SPREAD),
    Entry("softmax-scaled-five", "Softmax of [9.2, -3.1, 8.8, -5.4, 1.2] divided by 8.", "0.31 0.07 0.30 0.05 0.12",
          lambda: softmax(FIVE / SPREAD)),
    Entry("scaled-spreads", "Scaling spreads attention over more of five keys.", "more even",
          lambda: compute.is_softer(FIVE, FIVE / SPREAD)),
)  # fmt: skip


def _implementation() -> Evidence:
    rows, dim, value_dim = 3, 5, 7
    rng = np.random.default_rng(0)
    Q, K, V = rng.standard_normal((rows, dim)), rng.standard_normal((rows, dim)), rng.standard_normal((rows, value_dim))
    weights = softmax(Q @ K.T / math.sqrt(dim))
    output, expected = scaled_dot_product_attention(Q, K, V)
    holds = output.shape == (rows, value_dim) and np.allclose(weights, expected) and np.allclose(weights @ V, output)
    return Evidence(holds, f"output {list(output.shape)}, weights {list(weights.shape)} for n = 3, d_v = 7")


SOURCE.add(
    "Implementation",
    Entry("implementation", "The listing returns [n, d_v] outputs and [n, n] weights of scaled attention.", "correct",
          _implementation),
)  # fmt: skip


def _plain_softmax(scores: list[float]) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.exp(scores) / np.exp(scores).sum())


def _overflows() -> Evidence:
    limit = math.log(np.finfo(np.float64).max)
    above, below = (bool(np.isnan(_plain_softmax([limit + step, 0.0])).any()) for step in (1, -1))
    return Evidence(above and not below, f"NaN from a score of {limit:.1f} on, in float64")


def _same() -> Evidence:
    difference = abs(softmax(FIVE) - _plain_softmax(FIVE.tolist())).max()
    holds = difference < 1e-15 and np.isfinite(softmax([1000.0, 999.0])).all()
    return Evidence(bool(holds), f"largest difference {difference:.1g}; finite at 1000")


SOURCE.add(
    "Numerical Stability",
    Entry("softmax-overflows", "A plain softmax overflows for large scores.", "overflow", _overflows),
    Entry("stable-softmax-same", "Subtracting the maximum avoids overflow and leaves softmax unchanged.",
          "same result", _same),
)  # fmt: skip


def _jacobian() -> Evidence:
    step, x = 1e-6, FIVE / SPREAD
    columns = [(softmax(x + nudge) - softmax(x - nudge)) / (2 * step) for nudge in step * np.eye(FIVE.size)]
    error = abs(np.stack(columns, axis=-1) - softmax_jacobian(softmax(x))).max()
    return Evidence(bool(error < 1e-9), f"within {error:.0e} of finite differences")


def _own(weights: list[float]) -> Array:
    """Return ∂p_i/∂x_i = p_i (1 − p_i)."""
    return np.diag(softmax_jacobian(weights))


def _trace(weights: list[float]) -> float:
    return float(_own(weights).sum())


SOURCE.add(
    "Gradient Flow",
    Entry("gradient-flow", "Without scaling gradients are tiny, with it they are healthy.", "healthy against tiny",
          compute.softmax_passes_little, "Gradient without a scale over gradient with it, for random q, k and v.",
          compute.AT_SOFTMAX),
    Entry("jacobian-formula", "∂p_i/∂x_j = p_i (δ_ij − p_j).", "p_i (δ_ij − p_j)", _jacobian),
    Entry("one-hot-gradients", "Derivatives at [1, 0, 0], each to its own score.", "0 0 0", lambda: _own([1, 0, 0])),
    Entry("mixed-gradients", "Derivatives at [0.3, 0.3, 0.2, 0.2], each to its own score.", "0.21 0.21 0.16 0.16",
          lambda: _own([0.3, 0.3, 0.2, 0.2])),
)  # fmt: skip


SOURCE.add(
    "Exercises",
    Entry("std-512", "Exercise: the standard deviation at d_k = 512.", "√512",
          lambda: compute.drawn_spread_is(0.0, 512)),
    Entry("saturation-exercise", "Exercise: softmax([x, 0, 0, 0]) saturates for some x from 0 to 10.", "0 to 10",
          lambda: Evidence(0 < saturation_point(4) < 10, f"weight 0.99 at x = {saturation_point(4):.2f}")),
    Entry("peaked-or-uniform", "Exercise: a peaked row has smaller derivatives than a uniform one.", "smaller",
          lambda: compute.ordered(
              "trace", {"peaked": _trace([0.97, 0.01, 0.01, 0.01]), "uniform": _trace([0.25] * 4)}, ".3f")),
)  # fmt: skip


# Practice: when scaling matters, other temperatures, released models


def _lost(*dims: int) -> Evidence:
    """Test if random scores lose more of 1 − Σp² without a scale at each d_k than at the one before."""
    lost = {}
    for dim in dims:
        raw, scaled = (compute.drawn_rows(dim, divisor).jacobian_trace for divisor in (1.0, math.sqrt(dim)))
        lost[f"at d_k = {dim}"] = band(1 - raw / scaled.mean())
    return compute.ordered("part of 1 − Σp² lost without it:", lost, ".0%")


def _high_dim() -> Evidence:
    holds = all(regime(compute.drawn_spread(dim).mean, KEYS) == "sharp" for dim in DIMS)
    return Evidence(holds, _lost(64, 512).shown)


def _nearly_normal() -> Evidence:
    scores, spread = compute.drawn_scores(DIM), compute.drawn_spread(DIM)
    kurtosis = float(((scores - scores.mean()) ** 4).mean() / scores.var() ** 2 - 3)
    shown = f"drawn at d_k = {DIM}: spread {spread:.2f}, excess kurtosis {kurtosis:.2f}"
    return Evidence(abs(kurtosis) < NEARLY_NORMAL and compute.agrees(spread, SPREAD), shown)


def _bundled_controlled() -> Evidence:
    found = compute.bundled_scores()
    size = f"the bundled model's scores have a spread of {found['std']:.2f} and reach {found['max']:.0f}"
    return Evidence(
        found["max"] < settings.CLIPPED_AT, f"{size}; published runs clip from {settings.CLIPPED_AT:.0f} on"
    )


def _cost(scale: str) -> float:
    """Return the extra loss of the bundled model with another scale, as a share of its learned loss reduction."""
    kept = compute.bundled("1/√d_k").mean
    return (compute.bundled(scale).mean - kept) / (TEXT - kept)


def _fresh_cost() -> float:
    """Return the extra loss of training without a scale, as a share of the loss reduction with it."""
    kept = compute.final_loss(HEAD_DIMS[-1]).mean
    return (compute.final_loss(HEAD_DIMS[-1], "none").mean - kept) / (TASK.chance - kept)


def _trained_spared() -> Evidence:
    shown = (
        f"removed from the bundled model: {compute.bundled('1/√d_k'):.2f} to {compute.bundled('none'):.2f} nats, "
        f"{_cost('none'):.0%} of what it learned; missing from the start, a small model loses {_fresh_cost():.0%}"
    )
    return Evidence(_cost("none") < LESS * _fresh_cost(), shown)


def _trained_indifferent() -> Evidence:
    cost = _cost("1/d_k")
    shown = f"1/d_k in the bundled model: {compute.bundled('1/d_k'):.2f} nats, {cost:.0%} of what it learned"
    return Evidence(cost < NEGLIGIBLE, shown)


def _scale_healthy() -> Evidence:
    spread, divided = compute.drawn_spread(DIM), compute.drawn_spread(DIM, SPREAD)
    raw, scaled = regime(spread.mean, KEYS), regime(divided.mean, KEYS)
    shown = f"drawn at d_k = {DIM}: spread {spread:.2f} without is {raw}, {divided:.2f} with {scaled}"
    return Evidence((raw, scaled) == ("sharp", "healthy"), shown)


def _scale_t5() -> Evidence:
    raw, scaled = regime(compute.t5_spread(), KEYS), regime(compute.t5_spread() / math.sqrt(settings.T5.head_dim), KEYS)
    return Evidence(scaled == "healthy", f"{settings.T5.model} is {raw} without, {scaled} with")


def _cheap() -> Evidence:
    query, key = torch.empty(KEYS, DIM, device="meta"), torch.empty(KEYS, DIM, device="meta")
    with FlopCounterMode(display=False) as counter:
        scores = query @ key.T
        scores @ key
    on_scores, on_query = (each.numel() / counter.get_total_flops() for each in (scores, query))
    shown = f"{on_scores:.2%} of the operations at d_k = {DIM}, {on_query:.3%} if the query is multiplied instead"
    return Evidence(on_scores < NEGLIGIBLE, shown)


SOURCE.add(
    "When Scaling Matters Most",
    Entry("high-dim-critical", "For wide heads scaling is critical.", "critical", _high_dim),
    Entry("low-dim-less-critical", "For narrow heads scaling matters less.", "less critical", lambda: _lost(4, 64)),
    Entry("random-init-normal", "At random initialisation scores are close to N(0, d_k).", "N(0, d_k)", _nearly_normal,
          limit=Limit(compute.UNIT, "when weights start from N(0, 0.02²)", compute.gpt2_scaled_spread)),
    Entry("trained-controlled", "In a trained model scores may be controlled.", "may be", _bundled_controlled,
          "Not in every one. Published: the largest score of a trial run of Kimi K2 passed 1,000 (its report)."),
    Entry("trained-less-critical", "In a trained model scaling is less critical.", "less critical", _trained_spared,
          limit=Limit("for no scale at all", "for 1/d_k in its place", _trained_indifferent)),
    Entry("always-scale", "One should always scale.", "always", _scale_healthy,
          limit=Limit(compute.UNIT, "when their initialisation contains the factor already", _scale_t5)),
    Entry("cost-negligible", "Scaling costs next to nothing.", "negligible", _cheap),
)  # fmt: skip


def _entropies(multiples: dict[str, float]) -> Evidence:
    """Test if random scores have more entropy at each multiple of √d_k than at the one before."""
    ratios = {name: compute.drawn("entropy_ratio", DIM, times * math.sqrt(DIM)) for name, times in multiples.items()}
    return compute.ordered("drawn: entropy, of its maximum:", ratios, ".0%")


def _by_query() -> Evidence:
    query, key = np.ones((3, 2)), np.array([[0.0, 1.0], [1.0, 2.0], [2.0, 3.0], [3.0, 5.0], [5.0, 5.0]])
    scales = (2.0, 0.5, 0.1)
    ratios = row_statistics(attention_scores(query, key, scale=np.array(scales)[:, None])).entropy_ratio
    found = {f"at a scale of {scale}": float(ratio) for scale, ratio in zip(scales, ratios, strict=True)}
    return compute.ordered("entropy, of its maximum:", found, ".0%")


def _learned_in_language(only_temperature: bool = False) -> Evidence:
    found = [each for each in settings.LEARNED if each.language and (each.is_temperature or not only_temperature)]
    return compute.published_some(found)


SOURCE.add(
    "Alternative Scaling Factors",
    Entry("learned-temperature", "Some implementations learn the temperature.", "some",
          lambda: compute.published_some(settings.LEARNED, at_least=2)),
    Entry("efficient-learn-temperature", "Some efficient variants of language models learn the temperature.", "some",
          _learned_in_language, "A selection of models, not all.",
          Limit("for a learned gain on q·k", "for a temperature alone",
                lambda: _learned_in_language(only_temperature=True))),
    Entry("small-temperature-sharper", "A temperature below √d_k sharpens attention.", "sharper",
          lambda: _entropies({"at ½√d_k": 0.5, "at √d_k": 1.0})),
    Entry("large-temperature-softer", "A temperature above √d_k softens attention.", "softer",
          lambda: _entropies({"at √d_k": 1.0, "at 2√d_k": 2.0})),
    Entry("scale-by-query", "A scale for each query lets queries differ in sharpness.", "differ", _by_query),
)  # fmt: skip


def _none_differs() -> Evidence:
    models = settings.language_models(since=MODERN, millions=settings.FULL_SIZE)
    return compute.published_none([each for each in models if not each.standard])


def _are_standard(*names: str) -> Evidence:
    models = [settings.find(name) for name in names]
    shown = f"published, times 1/√d_k: {', '.join(map(str, models))}"
    return Evidence(all(setting.standard for setting in models), shown)


def _llama4() -> Evidence:
    factor = settings.llama4_temperature(settings.LLAMA4_FLOOR)
    return Evidence(factor == 1, f"Llama 4 {factor:.3f} from token {settings.LLAMA4_FLOOR:,} on")


SOURCE.add(
    "Connection to Modern LLMs",
    Entry("modern-llms-universal", "All modern language models scale by 1/√d_k.", "universal",
          _none_differs,
          "One exception refutes a universal claim. How many models do so a selection cannot say: not testable."),
    Entry("gpt-standard", "GPT scales by 1/√d_k.", "standard", lambda: _are_standard("GPT", "GPT-2")),
    Entry("llama-standard", "LLaMA scales by 1/√d_k.", "standard", lambda: _are_standard("LLaMA-2 7B"),
          limit=Limit("up to LLaMA-2", "for Llama 4's layers without rotary positions", _llama4)),
)  # fmt: skip


def _stable(rate: float) -> Evidence:
    losses = [compute.final_loss(dim, rate=rate) for dim in HEAD_DIMS]
    learned = sum(map(compute.has_learned, losses))
    shown = (
        f"at a rate of {rate:g}, {learned} of {len(losses)} small models of d_k {HEAD_DIMS[0]} to {HEAD_DIMS[-1]} "
        f"learn (loss {', '.join(f'{loss:.2f}' for loss in losses)}; guessing {TASK.chance:.2f})"
    )
    return Evidence(learned == len(losses), shown)


def _none_multiplies_by_one() -> Evidence:
    return compute.published_none([each for each in settings.language_models() if each.multiplier == 1])


SOURCE.add(
    "Summary",
    Entry("stable-training-any-dim", "With 1/√d_k training is stable whatever the dimension.", "stable",
          lambda: _stable(RATE),
          "Published: runs whose largest score passed 10,000 diverged (Wortsman et al., arXiv 2309.14322).",
          Limit("at a suitable learning rate", "at a hundred times that rate", lambda: _stable(HOT * RATE))),
    Entry("essential-in-practice", "Attention needs the division to work in practice.", "essential", _scale_healthy,
          limit=Limit(compute.UNIT, "for released models that multiply by 1", _none_multiplies_by_one)),
)  # fmt: skip
