"""Where a growing score is going: Theil–Sen on its logarithm, and the step at which it will pass a threshold.

Scores that run away grow by a factor a step, so their logarithm is fitted with a line: its slope is the median of the
slopes between all pairs of samples (Theil 1950, Sen 1968), which a third of wild samples does not move. The interval
of the slope is Sen's, from the variance of Kendall's tau, widened where neighbouring residuals resemble each other.
A forecast says where the present growth leads, not that it will go on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

LEAST_SAMPLES = 6  # five slopes from each: fewer have no interval worth naming
NORMAL_QUANTILE = 1.645  # of a 90% interval
MOST_ALIKE = 0.9  # correlation of neighbouring residuals that is still believed
MAD_TO_STD = 1.4826  # of a normal distribution


@dataclass(frozen=True)
class Crossing:
    """The step at which a threshold will be passed, and a 90% interval; `latest` is inf where growth may be ending."""

    threshold: float
    step: float
    earliest: float
    latest: float


@dataclass(frozen=True)
class Growth:
    """A line through the logarithm of a series, at its last step."""

    step: float
    level: float  # ln of the value, on the line
    noise: float  # standard deviation about the line, by the median
    rate: float  # of the logarithm, a step
    low: float
    high: float
    samples: int
    span: float  # steps from the first sample to the last

    @property
    def is_growing(self) -> bool:
        """Whether the whole interval of the rate is above zero."""
        return self.low > 0

    def factor(self, steps: float) -> float:
        """By how much the value is multiplied in so many steps."""
        return math.exp(min(self.rate * steps, 700.0))

    def highest_at(self, step: float) -> float:
        """The most the value can be at a later step, by the upper end of its growth."""
        return math.exp(min(self.level + self.noise + max(self.high, 0.0) * (step - self.step), 700.0))

    def passes(self, threshold: float) -> Crossing | None:
        """When the value will pass a threshold above it; None where it does not grow, or has passed it."""
        distance = math.log(threshold) - self.level
        if distance <= 0 or self.rate <= 0 or self.high <= 0:
            return None
        return Crossing(
            threshold,
            self.step + distance / self.rate,
            self.step + max(distance - self.noise, 0.0) / self.high,
            self.step + (distance + self.noise) / self.low if self.low > 0 else math.inf,
        )


@dataclass(frozen=True)
class Ceiling:
    """What keeps a score down whatever its growth: a soft-cap, how fast its upper bound grows, and QK-Clip.

    A soft-cap is never passed. Scores that QK-Clip holds are clipped again when they grow again. The bound |a| · max‖q‖ · max‖k‖ is above every score: under a QK-norm it follows the
    gains alone, and scores that grow towards it stop there.
    """

    softcap: float | None = None
    bound: Growth | None = None
    is_clipped: bool = False

    def allows(self, crossing: Crossing) -> bool:
        """Whether a score can pass this threshold, and at that time."""
        if self.is_clipped:
            return False
        if self.softcap is not None and crossing.threshold >= self.softcap:
            return False
        return self.bound is None or self.bound.highest_at(crossing.step) >= crossing.threshold


def forecast(growing: Growth | None, ceiling: Ceiling, threshold: float | None) -> Crossing | None:
    """When a score that grows for certain will pass a threshold; None where what keeps it down keeps it below."""
    if growing is None or not growing.is_growing or threshold is None:
        return None
    crossing = growing.passes(threshold)
    return crossing if crossing is not None and ceiling.allows(crossing) else None


def growth(steps: Sequence[float], values: Sequence[float]) -> Growth | None:
    """Fit the growth of a positive series; None where fewer than six of its samples are positive and finite.

    >>> steps = range(0, 1000, 100)
    >>> found = growth(steps, [10 * 1.002**step for step in steps])
    >>> round(found.passes(1000).step)
    2305
    """
    x, y = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    usable = np.isfinite(y) & (y > 0)
    x, y = x[usable], np.log(y[usable])
    if len(np.unique(x)) < LEAST_SAMPLES:
        return None
    slopes = _slopes(x, y)
    rate = _middle(slopes)
    last = float(x[-1])
    offsets = y - rate * (x - last)
    level = _middle(np.sort(offsets))
    residuals = offsets - level
    low, high = _interval(slopes, len(x), _inflation(residuals))
    noise = MAD_TO_STD * _middle(np.sort(np.abs(residuals)))
    return Growth(last, level, noise, rate, low, high, len(x), last - float(x[0]))


def _slopes(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    first, second = _pairs(len(x))
    run, rise = x[second] - x[first], y[second] - y[first]
    if not run.all():
        run, rise = run[run != 0], rise[run != 0]
    slopes: NDArray[np.float64] = np.sort(rise / run)
    return slopes


@lru_cache(maxsize=64)
def _pairs(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    first, second = np.triu_indices(count, 1)
    return first, second


def _middle(ordered: NDArray[np.float64]) -> float:
    """The median of what is in order; np.median takes longer than all else here."""
    half = len(ordered) // 2
    return float(ordered[half]) if len(ordered) % 2 else float(ordered[half - 1] + ordered[half]) / 2


def _interval(slopes: NDArray[np.float64], samples: int, inflation: float) -> tuple[float, float]:
    """Sen (1968): the ranks of the slopes between which the true one lies."""
    tau_deviation = math.sqrt(samples * (samples - 1) * (2 * samples + 5) / 18)
    reach = NORMAL_QUANTILE * tau_deviation * inflation
    low = max(0, math.floor((len(slopes) - reach) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + reach) / 2))
    return float(slopes[low]), float(slopes[high])


def _inflation(residuals: NDArray[np.float64]) -> float:
    """√((1 + ρ)/(1 − ρ)): by how much neighbours that are alike make the samples fewer than they seem."""
    power = float(residuals @ residuals)
    alike, samples = float(residuals[1:] @ residuals[:-1]) / power if power > 0 else 0.0, len(residuals)
    # about a fitted line the correlation comes out too low, by about (2 + 4ρ)/n (Kendall 1954)
    alike = (alike + 2 / samples) / (1 - 4 / samples) if power > 0 else 0.0
    alike = min(max(alike, 0.0), MOST_ALIKE)
    return math.sqrt((1 + alike) / (1 - alike))
