"""How a score grew: Theil–Sen on its logarithm.

Scores that run away grow by a factor a step, so their logarithm is fitted with a line: its slope is the median of the
slopes between all pairs of samples (Theil 1950, Sen 1968), which a third of wild samples does not move. The interval
of the slope is Sen's, from the variance of Kendall's tau, widened where neighbouring residuals resemble each other.
It says what was; where that leads is told by forecast.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

LEAST_SAMPLES = 6  # five slopes from each: fewer have no interval worth naming
LATEST = 6  # samples by which a score still grows, or falls
NORMAL_QUANTILE = 1.645  # of a 90% interval
MOST_ALIKE = 0.9  # correlation of neighbouring residuals that is still believed
MAD_TO_STD = 1.4826  # of a normal distribution


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
    lately: float  # the rate of the latest samples alone

    @property
    def is_growing(self) -> bool:
        """Whether the whole interval of the rate is above zero, and the latest samples do not fall."""
        return self.low > 0 and self.lately > 0

    @property
    def grown(self) -> float:
        """By how much the value was multiplied over all samples."""
        return self.factor(self.span)

    def factor(self, steps: float) -> float:
        """By how much the value was multiplied in so many steps, or in all that were seen where they are fewer."""
        return math.exp(min(self.rate * min(steps, self.span), 700.0))


def growth(steps: Sequence[float], values: Sequence[float]) -> Growth | None:
    """Fit the growth of a positive series; None where fewer than six of its samples are positive and finite.

    >>> steps = range(0, 1000, 100)
    >>> found = growth(steps, [10 * 1.002**step for step in steps])
    >>> round(found.factor(500), 3)
    2.716
    """
    x, y = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    usable = np.isfinite(y) & (y > 0)
    x, y = x[usable], np.log(y[usable])
    if len(set(x.tolist())) < LEAST_SAMPLES:
        return None
    line = robust_line(x, y)
    low, high = _interval(line.slopes, len(x), _inflation(line.residuals))
    lately = line.rate if len(x) <= LATEST else robust_line(x[-LATEST:], y[-LATEST:]).rate
    level, noise, rate, last = float(line.level), float(line.noise), float(line.rate), float(x[-1])
    return Growth(last, level, noise, rate, low, high, len(x), last - float(x[0]), float(lately))


@dataclass(frozen=True)
class Line:
    """A line that wild samples do not move."""

    rate: NDArray[np.float64]
    level: NDArray[np.float64]  # at the last sample
    residuals: NDArray[np.float64]
    slopes: NDArray[np.float64]  # of all pairs, in order

    @property
    def noise(self) -> NDArray[np.float64]:
        """Standard deviation about it, by the median."""
        return deviation(self.residuals)


def robust_line(x: NDArray[np.float64], y: NDArray[np.float64]) -> Line:
    """The line of Theil and Sen through some points; one for each series where `y` is (series, samples)."""
    slopes = _slopes(x, y)
    rate = middle(slopes)
    offsets = y - rate[..., None] * (x - x[-1])
    level = middle(np.sort(offsets))
    return Line(rate, level, offsets - level[..., None], slopes)


def deviation(residuals: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard deviation about zero, by the median."""
    return MAD_TO_STD * middle(np.sort(np.abs(residuals)))


def middle(ordered: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median of what is in order along the last axis; np.median takes longer than all else here."""
    half, is_odd = divmod(ordered.shape[-1], 2)
    found: NDArray[np.float64] = ordered[..., half]
    return found if is_odd else (ordered[..., half - 1] + found) / 2


def _slopes(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    first, second = _pairs(len(x))
    run, rise = x[second] - x[first], y[..., second] - y[..., first]
    if not run.all():
        run, rise = run[run != 0], rise[..., run != 0]
    slopes: NDArray[np.float64] = np.sort(rise / run)
    return slopes


@lru_cache(maxsize=64)
def _pairs(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    first, second = np.triu_indices(count, 1)
    return first, second


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
