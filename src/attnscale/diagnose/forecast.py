"""Growth of the largest score of a layer, and a forecast: a robust line through the logarithm of its latest samples.

Scores that run away grow by a factor a step. The slope of the line is the median of the slopes between all pairs of
samples (Theil 1950, Sen 1968), which a third of wild samples does not move.

The forecast continues the line, damped (Gardner & McKenzie 1985): each sample ahead adds four fifths of what the sample
before added, so growth is followed for a while, and never extrapolated as an exponential. The 90% interval reaches from
growth that ends now to growth that goes on, with the scatter of the samples on both sides. A forecast covers at most
half as many samples ahead as there are, and at most eight.

Damping and widths were chosen on recorded runs, healthy and diverging: `python benchmarks/forecasts.py` measures how
often they hold. Growth may end at any time, and in one forecast of ten it does, so a threshold has a step before which
it is not expected to be passed, and none by which it must have been.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import median

import numpy as np
from numpy.typing import NDArray

MAD_TO_STD = 1.4826  # of a normal distribution
LATEST = 8  # samples that the line is fitted to
LEAST_SAMPLES = 4  # runs that diverge at once are over after some more
FARTHEST = 8  # samples ahead: trends of recorded runs say little of what is beyond
DAMPING = 0.8
LEAST_SCATTER = 0.03  # of a logarithm: no run is smoother for long
BELOW, ABOVE = 1.45, 1.5  # scatters to the ends of the interval; above, times the root of the samples ahead
SURE = 2.5  # scatters: nine series of ten that do not grow come to less (tests/diagnose/test_forecast.py)
FEW = 4.0  # the scatter of n samples may be larger than measured, by this over n
LARGEST_LOG = 700.0  # whose exponential is a float


@dataclass(frozen=True)
class Crossing:
    """The step at which a threshold is passed if growth goes on, and the earliest step at which it may be."""

    threshold: float
    step: float
    earliest: float

    def __str__(self) -> str:
        return f"about step {self.step:.0f} and not before {self.earliest:.0f}"


@dataclass(frozen=True)
class Growth:
    """Growth of a positive series over its latest samples, and its forecast."""

    step: float
    level: float  # ln of the last value, without outliers
    rate: float  # of the logarithm, a step
    scatter: float
    spacing: float  # steps from sample to sample
    observed: float  # steps over which the rate was measured
    horizon: float  # steps ahead that the forecast covers

    @property
    def factor(self) -> float:
        """Factor by which the value grew over the latest samples."""
        return math.exp(min(self.rate * self.observed, LARGEST_LOG))

    @property
    def is_growing(self) -> bool:
        """True if the latest samples grow by more than their scatter explains."""
        return self.rate * self.observed > SURE * self.scatter

    def likely(self, steps: float) -> float:
        """Return the logarithm so many steps ahead if growth goes on."""
        return self.level + self._added(steps)

    def lowest(self, steps: float) -> float:
        """Return the lower end of the interval: growth has ended, or a fall goes on."""
        return self.level + min(self._added(steps), 0.0) - BELOW * self.scatter

    def highest(self, steps: float) -> float:
        """Return the upper end of the interval."""
        return self.level + max(self._added(steps), 0.0) + ABOVE * self.scatter * math.sqrt(steps / self.spacing)

    def passes(self, threshold: float) -> Crossing | None:
        """Return when it would pass a threshold; None where it has, or would not within the horizon."""
        aim = math.log(threshold)
        if self.rate <= 0 or not self.level < aim <= self.likely(self.horizon):
            return None
        total = self.rate * self.spacing * DAMPING / (1 - DAMPING)
        ahead = math.log1p(-(aim - self.level) / total) / math.log(DAMPING) * self.spacing
        return Crossing(threshold, self.step + ahead, self.step + self._first_within(aim, ahead))

    def _added(self, steps: float) -> float:
        samples = steps / self.spacing
        return self.rate * self.spacing * DAMPING * (1 - math.pow(DAMPING, samples)) / (1 - DAMPING)

    def _first_within(self, aim: float, ahead: float) -> float:
        """Return the first step at which the interval holds the threshold, by bisection: its upper end only rises."""
        low, high = 0.0, ahead
        while high - low > self.spacing / 100:
            middle = (low + high) / 2
            low, high = (low, middle) if self.highest(middle) >= aim else (middle, high)
        return high


def growth(steps: Sequence[float], values: Sequence[float]) -> Growth | None:
    """Fit the growth of a positive series; None where fewer than four of its samples are positive and finite.

    >>> steps = range(0, 1000, 100)
    >>> found = growth(steps, [10 * 1.002**step for step in steps])
    >>> round(found.factor, 3), round(found.passes(100).step), found.passes(1000)
    (4.051, 1347, None)
    """
    x, y = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    usable = np.isfinite(y) & (y > 0)
    x, y = x[usable], np.log(y[usable])
    if len(set(x.tolist())) < LEAST_SAMPLES:
        return None
    rate, end, residuals = _robust_line(x[-LATEST:], y[-LATEST:])
    moves = np.diff(y)
    noise, move = _deviation(residuals), _deviation(moves - _median(moves))
    scatter = math.sqrt(LEAST_SCATTER**2 + (noise**2 + move**2) / 2) * (1 + FEW / len(x))
    level = min(max(float(y[-1]), end - scatter), end + scatter)
    spacing = _median(np.diff(x)[-LATEST:])
    horizon = spacing * min(len(x) // 2, FARTHEST)
    return Growth(float(x[-1]), level, rate, scatter, spacing, float(x[-1] - x[-LATEST:][0]), horizon)


@dataclass(frozen=True)
class Trend:
    """Samples of the largest score of a layer, and what limits it.

    A soft-cap is never passed. A score that QK-Clip holds is clipped again when it grows again. The bound
    |a| · max‖q‖ · max‖k‖ is above every score: under a QK-norm it follows the gains alone, and scores that grow towards
    it stop there.
    """

    steps: Sequence[float]
    largest: Sequence[float]
    bounds: Sequence[float]
    softcap: float | None = None
    is_clipped: bool = False

    @cached_property
    def growth(self) -> Growth | None:
        """Growth of the largest score; None where there are too few samples."""
        return growth(self.steps, self.largest)

    def passes(self, threshold: float | None) -> Crossing | None:
        """Return when the score would pass a threshold; None where that is beyond the horizon, or a limit prevents it.

        >>> steps = range(0, 1000, 100)
        >>> trend = Trend(steps, [10 * 1.002**step for step in steps], [90.0] * 10)
        >>> trend.passes(80).step < 1347, trend.passes(100)
        (True, None)
        """
        if threshold is None or self.growth is None or self.is_clipped:
            return None
        if self.softcap is not None and threshold >= self.softcap:
            return None
        crossing = self.growth.passes(threshold)
        bound = None if crossing is None else growth(self.steps, self.bounds)
        if crossing is None or bound is None:
            return crossing
        return crossing if bound.highest(max(crossing.step - bound.step, 0.0)) >= math.log(threshold) else None


def _robust_line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float, NDArray[np.float64]]:
    """Return the slope of the line of Theil and Sen, its value at the last sample, and the residuals."""
    first, second = _pairs(len(x))
    run, rise = x[second] - x[first], y[second] - y[first]
    rate = _median(rise[run != 0] / run[run != 0])
    offsets = y - rate * (x - x[-1])
    level = _median(offsets)
    return rate, level, offsets - level


@lru_cache
def _pairs(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    first, second = np.triu_indices(count, 1)
    return first, second


def _deviation(residuals: NDArray[np.float64]) -> float:
    """Return the standard deviation about zero, by the median."""
    return MAD_TO_STD * _median(np.abs(residuals))


def _median(values: NDArray[np.float64]) -> float:
    return float(median(values.tolist()))  # np.median takes several times as long on so few
