"""Claims of the textbook section on scaled attention: its examples, its code, its exercises, then its practice."""

import math

import numpy as np

from attnscale.claims.draws import drawn_rows, drawn_spread
from attnscale.claims.evidence import (
    DIM,
    DIMS,
    KEYS,
    NEAR_ONE,
    SPREAD,
    leading_row,
    mostly_one_hot,
    normal_product_moment,
    unit_spread_at_start,
)
from attnscale.claims.judging import Evidence, Limit, Number, Source, Statement
from attnscale.claims.practice import STATEMENTS
from attnscale.claims.trained import WIDE, gradients
from attnscale.reference import Array, row_statistics, scaled_dot_product_attention, softmax, softmax_jacobian
from attnscale.theory import regime, saturation_point
from attnscale.theory.limits import SATURATED_TOP1

SOURCE = Source("textbook", "Section 5.3: Scaled Attention — Why √d Matters", "textbook section")

PEAKED = np.array([8.5, -2.1, 7.9])  # the source leaves further scores out
FIVE = np.array([9.2, -3.1, 8.8, -5.4, 1.2])
TINY = 0.1  # of the root mean square
GOOD_SHARE = 0.95  # of chances: what lies inside is consistent


def _linear() -> Evidence:
    """The power of d_k that the variance of drawn scores follows."""
    variances = [drawn_spread(dim).variance for dim in DIMS]
    power = float(np.polyfit(np.log(DIMS), np.log(variances), 1)[0])
    return Evidence(abs(power - 1) < NEAR_ONE, f"as d_k to the power {power:.3f}, drawn from {DIMS[0]} to {DIMS[-1]}")


def _frozen() -> Evidence:
    found = regime(drawn_spread(DIM).std, KEYS)
    top1 = float(drawn_rows(DIM).top1.mean())
    return Evidence(found == "saturated", f"{found}, with a top weight of {top1:.2f} on average, drawn")


def _vanishing() -> Evidence:
    gains = [row_statistics([x, 0, 0, 0]).gradient_gain.item() for x in (5, 10, 20, 30)]
    holds = gains == sorted(gains, reverse=True) and gains[-1] < 1e-9
    return Evidence(holds, f"1 − Σp² from {gains[0]:.2g} to {gains[-1]:.1g} as the lead grows from 5 to 30")


def _one_contributes() -> Evidence:
    effective = leading_row(KEYS).effective_keys.item()
    return Evidence(effective < 1 + NEAR_ONE, f"{effective:.2f} effective keys at weight {SATURATED_TOP1}")


def _five_spread() -> Evidence:
    """Where the sample variance falls among those of five N(0, 8²) draws: (n−1)s²/σ² is χ² with four degrees."""
    half = (FIVE.size - 1) * FIVE.var(ddof=1) / SPREAD**2 / 2
    below = 1 - math.exp(-half) * (1 + half)
    holds = abs(below - 0.5) < GOOD_SHARE / 2
    return Evidence(holds, f"std {FIVE.std(ddof=1):.2f}; {below:.0%} of such samples lie below it")


def _two_positions() -> Evidence:
    two = np.sort(softmax(FIVE))[-2:].sum()
    return Evidence(bool(two > SATURATED_TOP1), f"{two:.4f} on two keys")


def _spreads() -> Evidence:
    before, after = row_statistics(FIVE).effective_keys.item(), row_statistics(FIVE / SPREAD).effective_keys.item()
    return Evidence(after > before, f"{before:.2f} effective keys before, {after:.2f} after")


def _implementation() -> Evidence:
    rows, dim, value_dim = 3, 5, 7
    rng = np.random.default_rng(0)
    Q, K, V = rng.standard_normal((rows, dim)), rng.standard_normal((rows, dim)), rng.standard_normal((rows, value_dim))
    weights = softmax(Q @ K.T / math.sqrt(dim))
    output, expected = scaled_dot_product_attention(Q, K, V)
    holds = output.shape == (rows, value_dim) and np.allclose(weights, expected) and np.allclose(weights @ V, output)
    return Evidence(holds, f"output {list(output.shape)}, weights {list(weights.shape)} for n = 3, d_v = 7")


def _plain_softmax(scores: list[float]) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.exp(scores) / np.exp(scores).sum())


def _overflows() -> Evidence:
    limit = math.log(np.finfo(np.float64).max)
    holds = bool(
        np.isnan(_plain_softmax([limit + 1, 0.0])).any() and not np.isnan(_plain_softmax([limit - 1, 0.0])).any()
    )
    return Evidence(holds, f"not a number from a score of {limit:.1f} on, in float64")


def _same() -> Evidence:
    difference = abs(softmax(FIVE) - _plain_softmax(FIVE.tolist())).max()
    holds = difference < 1e-15 and np.isfinite(softmax([1000.0, 999.0])).all()
    return Evidence(bool(holds), f"largest difference {difference:.1g}, and finite at 1000")


def _gradient_healthy() -> Evidence:
    """The median query's gradient, of the root mean square over all, in a deep model before training."""
    raw, scaled = gradients("none")["evenness"], gradients("1/√d_k")["evenness"]
    shown = f"the median query receives {scaled:.2f} of the root mean square with, {raw:.2f} without, at d_k = {WIDE}"
    return Evidence(raw < TINY < 0.5 < scaled, shown)


def _gradient_in_sum() -> Evidence:
    raw, scaled = gradients("none")["on_queries"], gradients("1/√d_k")["on_queries"]
    return Evidence(raw < scaled, f"in root mean square it is {raw / scaled:.0f} times as large without")


def _jacobian() -> Evidence:
    step = 1e-6
    columns = [
        (softmax(FIVE / SPREAD + nudge) - softmax(FIVE / SPREAD - nudge)) / (2 * step)
        for nudge in step * np.eye(FIVE.size)
    ]
    error = abs(np.stack(columns, axis=-1) - softmax_jacobian(softmax(FIVE / SPREAD))).max()
    return Evidence(bool(error < 1e-9), f"within {error:.0e} of finite differences")


def _own(weights: list[float]) -> Array:
    """∂p_i/∂x_i = p_i (1 − p_i)."""
    return np.diag(softmax_jacobian(weights))


def _std_512() -> Evidence:
    found = drawn_spread(512)
    return Evidence(found.is_(512), f"{found.std:.2f} drawn, √512 = {math.sqrt(512):.2f}")


def _saturates_within() -> Evidence:
    point = saturation_point(4)
    return Evidence(0 < point < 10, f"weight 0.99 at x = {point:.2f}")


def _peaked_or_uniform() -> Evidence:
    peaked, uniform = (np.trace(softmax_jacobian(p)) for p in ([0.97, 0.01, 0.01, 0.01], [0.25] * 4))
    return Evidence(bool(peaked < uniform), f"trace {peaked:.3f} peaked, {uniform:.2f} uniform")


CLAIMS: tuple[Number | Statement, ...] = (
    Number("normal-product-mean", "E[XY] for independent standard normals.", "0", lambda: normal_product_moment(1)),
    Number(
        "normal-product-square", "E[(XY)²] for independent standard normals.", "1", lambda: normal_product_moment(2)
    ),
    Number(
        "normal-product-variance",
        "Var(XY) for independent standard normals.",
        "1",
        lambda: normal_product_moment(2) - normal_product_moment(1) ** 2,
    ),
    Statement("variance-linear", "The variance of q·k grows linearly with d_k.", "linear", _linear),
    Number(
        "score-std-64",
        "Spread of unscaled scores at d_k = 64.",
        "8",
        lambda: drawn_spread(DIM).std,
    ),
    Number(
        "softmax-peaked",
        "Softmax of [8.5, -2.1, 7.9].",
        "0.99 0.00 0.01",
        lambda: softmax(PEAKED),
        remark="Further scores, which the source leaves out, would not change the ratio of the first to the third.",
    ),
    Statement(
        "saturates-at-64",
        "Unscaled scores at d_k = 64 saturate the softmax.",
        "almost all on one key",
        _frozen,
        Limit("as a spread past the freezing point", "as one-hot rows", mostly_one_hot),
    ),
    Statement("saturated-gradients-vanish", "As softmax saturates its derivatives tend to zero.", "→ 0", _vanishing),
    Statement("one-position-contributes", "In a saturated row a single position contributes.", "one", _one_contributes),
    Statement("scaled-unit-any-dim", "Division by √d_k gives variance 1 at every d_k.", "1", unit_spread_at_start),
    Statement(
        "five-scores-spread",
        "The scores [9.2, -3.1, 8.8, -5.4, 1.2] have a spread of about 8.",
        "about 8",
        _five_spread,
    ),
    Number(
        "softmax-five",
        "Softmax of [9.2, -3.1, 8.8, -5.4, 1.2].",
        "0.599 0.000 0.401 0.000 0.000",
        lambda: softmax(FIVE),
    ),
    Statement("two-positions", "Of these five scores two take all the attention.", "two keys", _two_positions),
    Number(
        "scaled-five", "[9.2, -3.1, 8.8, -5.4, 1.2] divided by 8.", "1.15 -0.39 1.10 -0.68 0.15", lambda: FIVE / SPREAD
    ),
    Number(
        "softmax-scaled-five",
        "Softmax of [9.2, -3.1, 8.8, -5.4, 1.2] divided by 8.",
        "0.31 0.07 0.30 0.05 0.12",
        lambda: softmax(FIVE / SPREAD),
    ),
    Statement("scaled-spreads", "Scaling spreads attention over more of five keys.", "more even", _spreads),
    Statement(
        "implementation",
        "The listing returns [n, d_v] outputs and [n, n] weights of scaled attention.",
        "correct",
        _implementation,
    ),
    Statement("softmax-overflows", "A plain softmax overflows for large scores.", "overflow", _overflows),
    Statement(
        "stable-softmax-same",
        "Subtracting the maximum avoids overflow and leaves softmax unchanged.",
        "same result",
        _same,
    ),
    Statement(
        "gradient-flow",
        "Without scaling gradients are tiny, with it they are healthy.",
        "healthy against tiny",
        _gradient_healthy,
        Limit("of what most queries receive", "in sum", _gradient_in_sum),
        remark="Without it a few queries, near a tie, receive nearly all.",
    ),
    Statement("jacobian-formula", "∂p_i/∂x_j = p_i (δ_ij − p_j).", "p_i (δ_ij − p_j)", _jacobian),
    Number("one-hot-gradients", "Derivatives at [1, 0, 0], each to its own score.", "0 0 0", lambda: _own([1, 0, 0])),
    Number(
        "mixed-gradients",
        "Derivatives at [0.3, 0.3, 0.2, 0.2], each to its own score.",
        "0.21 0.21 0.16 0.16",
        lambda: _own([0.3, 0.3, 0.2, 0.2]),
    ),
    Statement("std-512", "Exercise: the standard deviation at d_k = 512.", "√512", _std_512),
    Statement(
        "saturation-exercise",
        "Exercise: softmax([x, 0, 0, 0]) saturates for some x from 0 to 10.",
        "0 to 10",
        _saturates_within,
    ),
    Statement(
        "peaked-or-uniform",
        "Exercise: a peaked row has smaller derivatives than a uniform one.",
        "smaller",
        _peaked_or_uniform,
    ),
    *STATEMENTS,
)
