"""Claims of the textbook section on scaled attention: its examples, its code and its exercises, then its practice."""

import math

import numpy as np

from attnscale.claims import computations as compute
from attnscale.claims.computations import AT_SOFTMAX, DIM, DIMS, KEYS, NEAR_ONE, SPREAD
from attnscale.claims.judging import Evidence, Limit, Source
from attnscale.claims.practice import add_claims
from attnscale.lab.outcomes import band
from attnscale.reference import Array, row_statistics, scaled_dot_product_attention, softmax, softmax_jacobian
from attnscale.theory import regime, saturation_point
from attnscale.theory.limits import SATURATED_TOP1

SOURCE = Source("textbook", "Section 5.3: Scaled Attention — Why √d Matters", "textbook section")

PEAKED = np.array([8.5, -2.1, 7.9])  # the source omits further scores
FIVE = np.array([9.2, -3.1, 8.8, -5.4, 1.2])
LIKELY = 0.95  # of samples lie between the ends of what is consistent


def normal_product_moment(power: int) -> float:
    """Return E[(XY)^power] for independent standard normal X and Y, by Gauss–Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    weights = weights / weights.sum()
    return float(weights @ np.outer(nodes, nodes) ** power @ weights)


SOURCE.section("Variance Analysis")


SOURCE.number("normal-product-mean", "E[XY] for independent standard normals.", "0", lambda: normal_product_moment(1))
SOURCE.number(
    "normal-product-square", "E[(XY)²] for independent standard normals.", "1", lambda: normal_product_moment(2)
)
SOURCE.number(
    "normal-product-variance", "Var(XY) for independent standard normals.", "1",
    lambda: normal_product_moment(2) - normal_product_moment(1) ** 2,
)  # fmt: skip


@SOURCE.claim("variance-linear", "The variance of q·k grows linearly with d_k.", "linear")
def _linear() -> Evidence:
    drawn, along = [compute.drawn_spread(dim) for dim in DIMS], np.log(DIMS) - np.log(DIMS).mean()
    power = float(along @ np.log([each.variance for each in drawn]) / (along @ along))
    errors = along * [each.error / each.variance for each in drawn]
    margin = 1.96 * float(np.sqrt(errors @ errors) / (along @ along))
    shown = f"drawn from d_k = {DIMS[0]} to {DIMS[-1]}: as d_k to the power {power:.3f} ± {margin:.1g}"
    return Evidence(abs(power - 1) < NEAR_ONE, shown)


SOURCE.section("Why This Matters")


@SOURCE.claim("score-std-64", "The spread of unscaled scores at d_k = 64 is 8.", "8")
def _std_64() -> Evidence:
    found = compute.drawn_spread(DIM)
    return Evidence(found.is_(DIM), f"drawn: {found:.2f}")


SOURCE.number(
    "softmax-peaked", "Softmax of [8.5, -2.1, 7.9].", "0.99 0.00 0.01", lambda: softmax(PEAKED),
    "Further scores, which the source omits, would not change the ratio of the first to the third.",
)  # fmt: skip


@SOURCE.claim(
    "saturates-at-64", "Unscaled scores at d_k = 64 saturate the softmax.", "almost all on one key",
    limit=Limit("if that means a spread above the critical one", "if it means one-hot rows", compute.mostly_one_hot),
)  # fmt: skip
def _saturates() -> Evidence:
    found, top1 = regime(compute.drawn_spread(DIM).std, KEYS), band(compute.drawn_rows(DIM).top1)
    return Evidence(found == "sharp", f"drawn: {found}, with a largest weight of {top1:.2f} on average")


@SOURCE.claim("saturated-gradients-vanish", "As softmax saturates its derivatives tend to zero.", "→ 0")
def _vanishing() -> Evidence:
    gains = [row_statistics([x, 0, 0, 0]).jacobian_trace.item() for x in (5, 10, 20, 30)]
    holds = gains == sorted(gains, reverse=True) and gains[-1] < 1e-9
    return Evidence(holds, f"1 − Σp² from {gains[0]:.2g} to {gains[-1]:.1g} as the lead grows from 5 to 30")


@SOURCE.claim("one-position-contributes", "In a saturated row a single position contributes.", "one")
def _one_contributes() -> Evidence:
    effective = compute.leading_row(KEYS).effective_keys.item()
    return Evidence(effective < 1 + NEAR_ONE, f"{effective:.2f} effective keys at weight {SATURATED_TOP1}")


SOURCE.section("Why √d_k Works")


SOURCE.claim("scaled-unit-any-dim", "Division by √d_k gives variance 1 at every d_k.", "1")(
    compute.unit_spread_at_start
)


SOURCE.section("Visualizing the Effect")


@SOURCE.claim(
    "five-scores-spread", "The scores [9.2, -3.1, 8.8, -5.4, 1.2] have a spread of about 8.", "about 8"
)  # fmt: skip
def _five_spread() -> Evidence:
    """Locate the sample variance among those of five N(0, 8²) draws: (n−1)s²/σ² is χ² with four degrees of freedom."""
    half = (FIVE.size - 1) * FIVE.var(ddof=1) / SPREAD**2 / 2
    below = 1 - math.exp(-half) * (1 + half)
    return Evidence(abs(below - 0.5) < LIKELY / 2, f"std {FIVE.std(ddof=1):.2f}; {below:.0%} of such samples are lower")


SOURCE.number(
    "softmax-five", "Softmax of [9.2, -3.1, 8.8, -5.4, 1.2].", "0.599 0.000 0.401 0.000 0.000", lambda: softmax(FIVE)
)


@SOURCE.claim("two-positions", "Of these five scores two take all the attention.", "two keys")
def _two_positions() -> Evidence:
    two = np.sort(softmax(FIVE))[-2:].sum()
    return Evidence(bool(two > SATURATED_TOP1), f"{two:.4f} on two keys")


SOURCE.number(
    "scaled-five", "[9.2, -3.1, 8.8, -5.4, 1.2] divided by 8.", "1.15 -0.39 1.10 -0.68 0.15", lambda: FIVE / SPREAD
)
SOURCE.number(
    "softmax-scaled-five", "Softmax of [9.2, -3.1, 8.8, -5.4, 1.2] divided by 8.", "0.31 0.07 0.30 0.05 0.12",
    lambda: softmax(FIVE / SPREAD),
)  # fmt: skip


@SOURCE.claim("scaled-spreads", "Scaling spreads attention over more of five keys.", "more even")
def _spreads() -> Evidence:
    before, after = row_statistics(FIVE).effective_keys.item(), row_statistics(FIVE / SPREAD).effective_keys.item()
    return Evidence(after > before, f"{before:.2f} effective keys before, {after:.2f} after")


SOURCE.section("Implementation")


@SOURCE.claim(
    "implementation", "The listing returns [n, d_v] outputs and [n, n] weights of scaled attention.", "correct"
)  # fmt: skip
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


SOURCE.section("Numerical Stability")


@SOURCE.claim("softmax-overflows", "A plain softmax overflows for large scores.", "overflow")
def _overflows() -> Evidence:
    limit = math.log(np.finfo(np.float64).max)
    above, below = (bool(np.isnan(_plain_softmax([limit + step, 0.0])).any()) for step in (1, -1))
    return Evidence(above and not below, f"NaN from a score of {limit:.1f} on, in float64")


@SOURCE.claim(
    "stable-softmax-same", "Subtracting the maximum avoids overflow and leaves softmax unchanged.", "same result"
)  # fmt: skip
def _same() -> Evidence:
    difference = abs(softmax(FIVE) - _plain_softmax(FIVE.tolist())).max()
    holds = difference < 1e-15 and np.isfinite(softmax([1000.0, 999.0])).all()
    return Evidence(bool(holds), f"largest difference {difference:.1g}; finite at 1000")


SOURCE.section("Gradient Flow")


SOURCE.claim(
    "gradient-flow", "Without scaling gradients are tiny, with it they are healthy.", "healthy against tiny",
    limit=AT_SOFTMAX, remark="Gradient without a scale over gradient with it, for random q, k and v.",
)(compute.softmax_passes_little)  # fmt: skip


@SOURCE.claim("jacobian-formula", "∂p_i/∂x_j = p_i (δ_ij − p_j).", "p_i (δ_ij − p_j)")
def _jacobian() -> Evidence:
    step, x = 1e-6, FIVE / SPREAD
    columns = [(softmax(x + nudge) - softmax(x - nudge)) / (2 * step) for nudge in step * np.eye(FIVE.size)]
    error = abs(np.stack(columns, axis=-1) - softmax_jacobian(softmax(x))).max()
    return Evidence(bool(error < 1e-9), f"within {error:.0e} of finite differences")


def _own(weights: list[float]) -> Array:
    """Return ∂p_i/∂x_i = p_i (1 − p_i)."""
    return np.diag(softmax_jacobian(weights))


SOURCE.number("one-hot-gradients", "Derivatives at [1, 0, 0], each to its own score.", "0 0 0", lambda: _own([1, 0, 0]))
SOURCE.number(
    "mixed-gradients", "Derivatives at [0.3, 0.3, 0.2, 0.2], each to its own score.", "0.21 0.21 0.16 0.16",
    lambda: _own([0.3, 0.3, 0.2, 0.2]),
)  # fmt: skip


SOURCE.section("Exercises")


@SOURCE.claim("std-512", "Exercise: the standard deviation at d_k = 512.", "√512")
def _std_512() -> Evidence:
    found = compute.drawn_spread(512)
    return Evidence(found.is_(512), f"drawn: {found:.2f}; √512 = {math.sqrt(512):.2f}")


@SOURCE.claim(
    "saturation-exercise", "Exercise: softmax([x, 0, 0, 0]) saturates for some x from 0 to 10.", "0 to 10"
)  # fmt: skip
def _saturates_within() -> Evidence:
    point = saturation_point(4)
    return Evidence(0 < point < 10, f"weight 0.99 at x = {point:.2f}")


@SOURCE.claim(
    "peaked-or-uniform", "Exercise: a peaked row has smaller derivatives than a uniform one.", "smaller"
)  # fmt: skip
def _peaked_or_uniform() -> Evidence:
    peaked, uniform = (np.trace(softmax_jacobian(p)) for p in ([0.97, 0.01, 0.01, 0.01], [0.25] * 4))
    return Evidence(bool(peaked < uniform), f"trace {peaked:.3f} peaked, {uniform:.2f} uniform")


add_claims(SOURCE)
