"""Exact expectations of softmax over n independent N(0, σ²) scores, as integrals instead of asymptotic formulas.

With Z = Σ e^s and the Laplace transform L(t) = E[exp(−t eˢ)] of one term, independence gives E[exp(−tZ)] = L(t)ⁿ and

    E[ln Z]    = ∫ (e^{−t} − L(t)ⁿ) / t dt
    E[Σ p²]    = n ∫ t L″(t) L(t)ⁿ⁻¹ dt                       from 1/Zᵐ = ∫ tᵐ⁻¹ e^{−tZ} dt / (m−1)!
    E[Σ p s]   = σ² (1 − E[Σ p²])                             Stein's lemma
    E[H]       = E[ln Z] − E[Σ p s]
    E[max p]   = n ∫ φ(x) ∫ e^{−u} A(x, u)ⁿ⁻¹ du dx           A(x, u) = E[exp(−u e^{s−x}); s < x]
    E[Σ p³]    = n ∫ t² |L‴(t)| L(t)ⁿ⁻¹ dt / 2
    E[(Σ p²)²] = ∫ t³ (n L⁗(t) L(t)ⁿ⁻¹ + n (n−1) L″(t)² L(t)ⁿ⁻²) dt / 6

As a function of ln t every integrand is analytic and decays at both ends: the trapezoid rule converges exponentially.

For Gaussian queries and keys, the scores of a row are independent N(0, a² |q|²) for a fixed query. The expectation is
then averaged over |q|², which is χ² with d_k degrees of freedom.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from attnscale.errors import SettingError
from attnscale.reference import Array

# exp(−e^z) is analytic for |Im z| < π/2, so a step h has an error of e^{−π²/h}: 1e-17 at h = 0.25. For the Gaussian it
# is e^{−2π²/h²}, with h in units of the spread: 1e-34 at h = 0.5.
STEP = 0.2
GAUSSIAN_STEP = 0.4
TAIL = 40.0  # e^{−40} is under float64 rounding
VANISHED = 8.0  # exp(−e⁸) is zero in float64
FROZEN = 2e3  # above this spread H, 1 − Σp² and 1 − top-1 are proportional to 1/σ, within 0.1%
ORDERS = np.array([[2], [3], [4]])  # orders of the derivatives of L in the expectations
UNIFORM_BELOW = 1e-8  # below this spread every expectation equals the uniform one to float64 rounding
# The trapezoid rule in ln|q|² has errors of e^{−π²/h} for exp(−eʸ) and e^{−2π²w²/h²} for a peak of width w: both 3e-9.
LOG_STEP = 0.5
NEGLIGIBLE = 25.0  # e^{−25} is 1e-11


@dataclass(frozen=True)
class SoftmaxExpectation:
    """Expected entropy (nats), largest weight and 1 − Σp² of a row."""

    spread: float
    keys: int
    entropy: float
    top1: float
    jacobian_trace: float

    @property
    def entropy_ratio(self) -> float:
        """Entropy over its maximum ln n."""
        return self.entropy / math.log(self.keys)


@lru_cache(maxsize=4096)
def expected_softmax(spread: float, keys: int) -> SoftmaxExpectation:
    """Return the expectations of softmax over `keys` independent N(0, spread²) scores.

    >>> at_init = expected_softmax(1.0, 1024)
    >>> round(at_init.entropy_ratio, 2), round(at_init.top1, 3)
    (0.93, 0.016)
    """
    row = expected_row(spread, keys)
    if spread < UNIFORM_BELOW:
        top1 = 1 / keys
    elif spread > FROZEN:
        top1 = 1 - (1 - _top1(FROZEN, keys)) * FROZEN / spread
    else:
        top1 = _top1(spread, keys)
    return SoftmaxExpectation(spread, keys, row.entropy, top1, row.jacobian_trace)


@dataclass(frozen=True)
class RowExpectation:
    """Expected entropy (nats), 1 − Σp² and ‖diag(p) − ppᵀ‖² of a row."""

    entropy: float
    jacobian_trace: float
    jacobian_norm2: float


def expected_row(spread: float, keys: int, head_dim: int | None = None) -> RowExpectation:
    """Return the expectations of a row over `keys` Gaussian keys, for one query or averaged over Gaussian queries.

    `spread` is a · std(q·k). Queries have `head_dim` Gaussian components; without `head_dim`, all have the same norm.

    >>> one_length, four_components = expected_row(4.0, 256), expected_row(4.0, 256, head_dim=4)
    >>> round(one_length.jacobian_trace, 2), round(four_components.jacobian_trace, 2)
    (0.64, 0.69)
    """
    if keys < 2 or not 0 <= spread < math.inf or (head_dim is not None and head_dim < 1):
        raise SettingError(
            f"Expected at least 2 keys, a finite spread of 0 or more and a positive head_dim, got {keys=}, {spread=}, "
            f"{head_dim=}."
        )
    if head_dim is None:
        return _row(spread, keys)
    lengths, weights = _query_lengths(head_dim)
    rows = [_row(spread * float(length), keys) for length in lengths]
    means = weights @ [(row.entropy, row.jacobian_trace, row.jacobian_norm2) for row in rows]
    return RowExpectation(*means.tolist())


@lru_cache(maxsize=65536)
def _row(spread: float, keys: int) -> RowExpectation:
    if spread < UNIFORM_BELOW:
        return RowExpectation(math.log(keys), 1 - 1 / keys, (1 - 1 / keys) / keys)
    if spread > FROZEN:
        frozen, shrink = _row(FROZEN, keys), FROZEN / spread
        return RowExpectation(frozen.entropy * shrink, frozen.jacobian_trace * shrink, frozen.jacobian_norm2 * shrink)
    log_t, log_laplace, (second, third, fourth) = _laplace(spread, keys)
    all_keys, others, but_two = (np.exp(count * log_laplace) for count in (keys, keys - 1, keys - 2))
    below = np.exp(-np.exp(np.minimum(log_t, VANISHED)))
    log_normaliser = STEP * float((below - all_keys).sum())
    square = STEP * keys * float((second * others).sum())
    cube = STEP * keys * float((third * others).sum()) / 2
    alone = keys * float((fourth * others).sum())
    pairs = keys * (keys - 1) * float((second**2 * but_two).sum())
    entropy = log_normaliser - spread**2 * (1 - square)
    norm2 = square - 2 * cube + STEP * (alone + pairs) / 6
    return RowExpectation(max(entropy, 0.0), 1 - square, max(norm2, 0.0))


@lru_cache
def _query_lengths(head_dim: int) -> tuple[Array, Array]:
    """Return |q|/√d_k and its weights: |q|²/2 is Gamma(d_k/2), with density exp(y d_k/2 − eʸ) in y = ln(|q|²/2)."""
    shape = head_dim / 2
    width = 1 / math.sqrt(shape)
    step = min(LOG_STEP, width)
    left, right = -NEGLIGIBLE / shape - 10 * width, 10 * width + math.log1p(NEGLIGIBLE / shape)
    from_mode = np.arange(left, right, step)
    log_density = shape * (from_mode - np.expm1(from_mode))
    counts = log_density > -NEGLIGIBLE
    lengths, weights = np.exp(from_mode[counts] / 2), np.exp(log_density[counts])
    return lengths, weights / weights.sum()


def _reach(keys: int) -> float:
    """Return the number of standard deviations beyond which n Gaussian tails are below float64 rounding."""
    return math.sqrt(2 * math.log(keys) + 2 * TAIL)


def _laplace(spread: float, keys: int) -> tuple[Array, Array, Array]:
    """Return ln t in steps of STEP, ln L(t) of an N(0, spread²) score and tᵏ |L⁽ᵏ⁾(t)| for k = 2, 3, 4.

    The grid is wide enough for `keys` scores.
    """
    reach = _reach(keys) * spread
    step = min(STEP, GAUSSIAN_STEP * spread)
    half = math.ceil(reach / step)
    scores = np.arange(-half, half + 1, dtype=np.float64) * np.float64(step)
    density: Array = np.exp(-0.5 * (scores / spread) ** 2)
    density = np.asarray(density / density.sum())

    mass_from = np.append(density[::-1].cumsum()[::-1], 0.0)  # probability of this score and all larger ones
    transform = _transform_by_convolution if step == STEP else _transform_by_sum
    log_t, one_minus_laplace, derivatives = transform(scores, density, mass_from, TAIL + math.log(keys))
    return log_t, np.log1p(-np.minimum(one_minus_laplace, 1 - 1e-16)), derivatives


def _transform_by_sum(scores: Array, density: Array, mass_from: Array, negligible: float) -> tuple[Array, Array, Array]:
    """Return ln t, 1 − L(t) and tᵏ |L⁽ᵏ⁾(t)| for small spreads, where scores need a finer grid than ln t."""
    log_t = np.arange(scores[0] - negligible, scores[-1] + math.log(TAIL), STEP)
    first, last = np.searchsorted(scores, -log_t - negligible), np.searchsorted(scores, -log_t + VANISHED)
    one_minus_laplace, derivatives = np.empty_like(log_t), np.empty((len(ORDERS), len(log_t)))
    for i, tau in enumerate(log_t):
        near = slice(first[i], last[i])  # exp(−t eˢ) is zero for larger scores and one for smaller scores
        term = np.exp(tau + scores[near])  # t eˢ
        one_minus_laplace[i] = mass_from[last[i]] - density[near] @ np.expm1(-term)
        derivatives[:, i] = (term**ORDERS * np.exp(-term)) @ density[near]
    return log_t, one_minus_laplace, derivatives


def _transform_by_convolution(
    scores: Array, density: Array, mass_from: Array, negligible: float
) -> tuple[Array, Array, Array]:
    """Return ln t, 1 − L(t) and tᵏ |L⁽ᵏ⁾(t)| for large spreads, as convolutions on one grid of scores and ln t."""
    near = np.arange(-math.ceil(negligible / STEP), math.ceil(VANISHED / STEP) + 1)
    term = np.exp(near * STEP)
    half = len(scores) // 2
    grid = np.arange(near[0] - half, near[-1] + half + 1)
    above = np.clip(half + near[-1] - grid + 1, 0, len(scores))  # exp(−t eˢ) is zero from this score on
    one_minus_laplace = mass_from[above] - np.convolve(density, np.expm1(-term))
    derivatives = [np.convolve(density, weight) for weight in term**ORDERS * np.exp(-term)]
    return grid * STEP, one_minus_laplace, np.stack(derivatives)


def _top1(spread: float, keys: int) -> float:
    """Return E[max p]: the largest score is x, and each other s adds e^{−(x−s)} to the denominator."""
    reach = _reach(keys)
    highest = np.linspace(-reach, reach, 401)  # largest score / spread
    log_u = np.arange(-TAIL - math.log(keys), math.log(TAIL), STEP)
    gaps, weights = _panels(end=min(2 * reach * spread, 2 * TAIL + math.log(keys)), width=2 * min(1.0, spread))
    # 1 − exp(−u e^{−gap}) of a key at this gap below the largest score; it does not depend on x
    deficit = -np.expm1(-np.exp(log_u[:, None] - gaps[None, :]))
    outer = np.exp(log_u - np.exp(log_u)) * STEP

    total = 0.0
    for x in highest:
        below = _normal_density(x - gaps / spread) / spread * weights
        survives = 1.0 - deficit @ below - 0.5 * math.erfc(x / math.sqrt(2))
        others = np.exp((keys - 1) * np.log(np.maximum(survives, 1e-300)))
        total += float(_normal_density(x)) * float(outer @ others)
    return min(1.0, keys * total * float(highest[1] - highest[0]))


def _panels(end: float, width: float) -> tuple[Array, Array]:
    """Return Gauss–Legendre nodes and weights on [0, end], in panels no wider than `width`."""
    nodes, weights = np.polynomial.legendre.leggauss(20)
    edges = np.linspace(0.0, end, math.ceil(end / width) + 1)
    middle, half = (edges[1:] + edges[:-1]) / 2, np.diff(edges) / 2
    return (middle[:, None] + half[:, None] * nodes).ravel(), (half[:, None] * weights).ravel()


def _normal_density(x: Array | float) -> Array:
    return np.asarray(np.exp(-0.5 * np.square(x)) / math.sqrt(2 * math.pi))
