"""What softmax does to n independent N(0, σ²) scores, in expectation: integrals, not asymptotics.

With Z = Σ e^s and the Laplace transform L(t) = E[exp(−t eˢ)] of one term, independence gives E[exp(−tZ)] = L(t)ⁿ and

    E[ln Z]     = ∫ (e^{−t} − L(t)ⁿ) / t dt
    E[Σ p²]     = n ∫ t L″(t) L(t)ⁿ⁻¹ dt                  from 1/Z² = ∫ t e^{−tZ} dt
    E[Σ p s]    = σ² (1 − E[Σ p²])                        Stein's lemma
    E[H]        = E[ln Z] − E[Σ p s]
    E[max p]    = n ∫ φ(x) ∫ e^{−u} A(x, u)ⁿ⁻¹ du dx      A(x, u) = E[exp(−u e^{s−x}); s < x]

In ln t every integrand is analytic and decays at both ends, where the trapezoid rule converges exponentially.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from attnscale.errors import SettingError
from attnscale.reference import Array

# exp(−e^z) is analytic for |Im z| < π/2, so a step h costs e^{−π²/h}: 1e-17 at h = 0.25. The Gaussian costs
# e^{−2π²/h²} in units of its own spread: 1e-34 at h = 0.5.
STEP = 0.2
GAUSSIAN_STEP = 0.4
TAIL = 40.0  # e^{−40} is under float64 rounding
VANISHED = 8.0  # exp(−e⁸) is zero in float64
FROZEN = 2e3  # above this spread H, gain and 1 − top-1 fall as 1/σ, to 1e-3 of themselves: two scores must nearly tie
ORDERS = np.array([[2], [3], [4]])  # of the derivatives of L that expectations need
UNIFORM_BELOW = 1e-8  # under this spread every expectation equals the uniform one to float64 rounding


@dataclass(frozen=True)
class SoftmaxExpectation:
    """Expected entropy (nats), largest weight and gradient gain of a row."""

    spread: float
    keys: int
    entropy: float
    top1: float
    gradient_gain: float

    @property
    def entropy_ratio(self) -> float:
        """H / ln n, comparable across lengths."""
        return self.entropy / math.log(self.keys)


@lru_cache(maxsize=4096)
def expected_softmax(spread: float, keys: int) -> SoftmaxExpectation:
    """Expected entropy, top-1 weight and gradient gain of softmax over `keys` independent N(0, spread²) scores.

    >>> at_init = expected_softmax(1.0, 1024)
    >>> round(at_init.entropy_ratio, 2), round(at_init.top1, 3)
    (0.93, 0.016)
    """
    if keys < 2 or not 0 <= spread < math.inf:
        raise SettingError(
            f"Expected at least 2 keys and a finite spread of 0 or more, got keys={keys}, spread={spread}."
        )
    if spread < UNIFORM_BELOW:
        return SoftmaxExpectation(spread, keys, math.log(keys), 1 / keys, 1 - 1 / keys)
    if spread > FROZEN:
        frozen, shrink = expected_softmax(FROZEN, keys), FROZEN / spread
        top1 = 1 - (1 - frozen.top1) * shrink
        return SoftmaxExpectation(spread, keys, frozen.entropy * shrink, top1, frozen.gradient_gain * shrink)
    log_normaliser, gradient_gain = log_normaliser_and_gain(spread, keys)
    entropy = log_normaliser - spread**2 * gradient_gain
    return SoftmaxExpectation(spread, keys, max(entropy, 0.0), _top1(spread, keys), gradient_gain)


def _reach(keys: int) -> float:
    """How many standard deviations out n Gaussian tails still weigh more than float64 rounding."""
    return math.sqrt(2 * math.log(keys) + 2 * TAIL)


def log_normaliser_and_gain(spread: float, keys: int) -> tuple[float, float]:
    """E[ln Z] and E[1 − Σ p²], for a spread between the two limits."""
    found = laplace(spread, keys)
    below = np.exp(-np.exp(np.minimum(found.log_t, VANISHED)))
    log_normaliser = STEP * float((below - np.exp(keys * found.log)).sum())
    participation = STEP * keys * float((found.second * np.exp((keys - 1) * found.log)).sum())
    return log_normaliser, 1.0 - participation


@dataclass(frozen=True)
class Laplace:
    """ln L(t) and tᵏ |L⁽ᵏ⁾(t)|, on a grid of ln t in steps of STEP that holds all that counts for `keys` scores."""

    log_t: Array
    log: Array
    second: Array
    third: Array
    fourth: Array


def laplace(spread: float, keys: int) -> Laplace:
    """The transform of eˢ for one N(0, spread²) score s."""
    reach = _reach(keys) * spread
    step = min(STEP, GAUSSIAN_STEP * spread)
    half = math.ceil(reach / step)
    scores = np.arange(-half, half + 1, dtype=np.float64) * np.float64(step)
    density: Array = np.exp(-0.5 * (scores / spread) ** 2)
    density = np.asarray(density / density.sum())

    mass_from = np.append(density[::-1].cumsum()[::-1], 0.0)  # of this score and all above it
    transform = _transform_by_convolution if step == STEP else _transform_by_sum
    log_t, one_minus_laplace, derivatives = transform(scores, density, mass_from, TAIL + math.log(keys))
    return Laplace(log_t, np.log1p(-np.minimum(one_minus_laplace, 1 - 1e-16)), *derivatives)


def _transform_by_sum(scores: Array, density: Array, mass_from: Array, negligible: float) -> tuple[Array, Array, Array]:
    """ln t, 1 − L(t) and tᵏ |L⁽ᵏ⁾(t)| for k = 2, 3, 4, for narrow spreads, whose scores lie closer than ln t."""
    log_t = np.arange(scores[0] - negligible, scores[-1] + math.log(TAIL), STEP)
    first, last = np.searchsorted(scores, -log_t - negligible), np.searchsorted(scores, -log_t + VANISHED)
    one_minus_laplace, derivatives = np.empty_like(log_t), np.empty((len(ORDERS), len(log_t)))
    for i, tau in enumerate(log_t):
        near = slice(first[i], last[i])  # scores above it make exp(−t eˢ) vanish, scores below it leave it at one
        term = np.exp(tau + scores[near])  # t eˢ
        one_minus_laplace[i] = mass_from[last[i]] - density[near] @ np.expm1(-term)
        derivatives[:, i] = (term**ORDERS * np.exp(-term)) @ density[near]
    return log_t, one_minus_laplace, derivatives


def _transform_by_convolution(
    scores: Array, density: Array, mass_from: Array, negligible: float
) -> tuple[Array, Array, Array]:
    """The same for wide spreads, where both lie on one grid: the density is even, so the sums are a convolution."""
    near = np.arange(-math.ceil(negligible / STEP), math.ceil(VANISHED / STEP) + 1)
    term = np.exp(near * STEP)
    half = len(scores) // 2
    grid = np.arange(near[0] - half, near[-1] + half + 1)
    above = np.clip(half + near[-1] - grid + 1, 0, len(scores))  # from this score on, exp(−t eˢ) has vanished
    one_minus_laplace = mass_from[above] - np.convolve(density, np.expm1(-term))
    derivatives = [np.convolve(density, weight) for weight in term**ORDERS * np.exp(-term)]
    return grid * STEP, one_minus_laplace, np.stack(derivatives)


def _top1(spread: float, keys: int) -> float:
    """E[max p]: the largest score lies at x, the others below it, each adding e^{−(x−s)} to the denominator."""
    reach = _reach(keys)
    highest = np.linspace(-reach, reach, 401)  # in units of the spread
    log_u = np.arange(-TAIL - math.log(keys), math.log(TAIL), STEP)
    gaps, weights = _panels(end=min(2 * reach * spread, 2 * TAIL + math.log(keys)), width=2 * min(1.0, spread))
    # 1 − exp(−u e^{−gap}), the deficit a key at this gap below the largest causes: the same for every x
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
    """Gauss–Legendre nodes and weights on [0, end], in panels no wider than `width`."""
    nodes, weights = np.polynomial.legendre.leggauss(20)
    edges = np.linspace(0.0, end, math.ceil(end / width) + 1)
    middle, half = (edges[1:] + edges[:-1]) / 2, np.diff(edges) / 2
    return (middle[:, None] + half[:, None] * nodes).ravel(), (half[:, None] * weights).ravel()


def _normal_density(x: Array | float) -> Array:
    return np.asarray(np.exp(-0.5 * np.square(x)) / math.sqrt(2 * math.pi))
