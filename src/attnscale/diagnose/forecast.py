"""Measure and forecast the growth of a layer's largest score, by a robust line through its latest logarithms.

Diverging scores grow exponentially. The slope of the line is the median of the slopes between all pairs of samples
(Theil 1950, Sen 1968), which is robust to a third of outliers.

The forecast continues the line with damping (Gardner & McKenzie 1985): each sample ahead adds 80% of the growth of the
previous one, so the forecast never grows exponentially. The lower end of the 90% interval assumes that growth stops
now, the upper end that it continues; both include the scatter of the samples. A forecast covers at most half as many
samples ahead as were measured, and at most eight.

Damping and widths were fitted to recorded runs, healthy and diverging: `python benchmarks/forecasts.py` measures the
coverage of the interval. Growth stops early in one forecast of ten. A forecast therefore gives the earliest step at
which a threshold may be passed, but no latest step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from statistics import median

import numpy as np
from numpy.typing import NDArray

MAD_TO_STD = 1.4826  # standard deviation / median absolute deviation of a normal distribution
LATEST = 8  # number of samples in the fit
LEAST_SAMPLES = 4  # few, because some runs diverge early
FARTHEST = 8  # longest forecast in samples; recorded runs follow their trend no longer
DAMPING = 0.8
STEPS_ADDED = 1 + 1 / (1 - DAMPING)  # limit for the growth that a forecast adds, in samples; the first 1 is for scatter
LEAST_SCATTER = 0.03  # smallest scatter of a logarithm; no run stays smoother
BELOW, ABOVE = 1.45, 1.5  # width of the interval in scatters; ABOVE is multiplied by √(samples ahead)
SIGNIFICANT = 2.5  # growth in scatters; 90% of series without growth stay below (tests/diagnose/test_forecast.py)
FEW = 4.0  # the true scatter may exceed that of n samples by the factor 1 + FEW / n
LARGEST_LOG = 700.0  # exp() of more overflows a float


@dataclass(frozen=True)
class Crossing:
    """Expected step at which growth passes a threshold, and the earliest possible step."""

    threshold: float
    step: float
    earliest: float

    def __str__(self) -> str:
        return f"about step {self.step:.0f} and not before {self.earliest:.0f}"


@dataclass(frozen=True)
class Growth:
    """Growth over the latest samples of a positive series, and its forecast."""

    step: float
    level: float  # logarithm of the last value, robust to outliers
    rate: float  # growth of the logarithm per step
    scatter: float
    spacing: float  # steps between samples
    observed: float  # steps covered by the fitted samples
    horizon: float  # steps covered by the forecast

    @property
    def factor(self) -> float:
        """Factor by which the value grew over the latest samples."""
        return math.exp(min(self.rate * self.observed, LARGEST_LOG))

    @property
    def is_growing(self) -> bool:
        """True if the growth of the latest samples exceeds their scatter."""
        return self.rate * self.observed > SIGNIFICANT * self.scatter

    def likely(self, steps: float) -> float:
        """Return the expected logarithm after this many steps."""
        return self.level + self._added(steps)

    def lowest(self, steps: float) -> float:
        """Return the lower end of the interval: growth stops, or a decrease continues."""
        return self.level + min(self._added(steps), 0.0) - BELOW * self.scatter

    def highest(self, steps: float) -> float:
        """Return the upper end of the interval."""
        return self.level + max(self._added(steps), 0.0) + ABOVE * self.scatter * math.sqrt(steps / self.spacing)

    def passes(self, threshold: float) -> Crossing | None:
        """Return the forecast step of a threshold; None if it is already passed, or not reached within the horizon."""
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
        """Return the first step at which the rising upper end of the interval reaches the threshold, by bisection."""
        low, high = 0.0, ahead
        while high - low > self.spacing / 100:
            middle = (low + high) / 2
            low, high = (low, middle) if self.highest(middle) >= aim else (middle, high)
        return high


def growth(steps: Sequence[float], values: Sequence[float]) -> Growth | None:
    """Fit the growth of a positive series; return None for fewer than four positive, finite samples.

    >>> steps = range(0, 1000, 100)
    >>> found = growth(steps, [10 * 1.002**step for step in steps])
    >>> round(found.factor, 3), round(found.passes(100).step), found.passes(1000)
    (4.05, 1347, None)
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
    """Samples of the largest score of a layer, with its limits.

    Scores stay below a soft-cap, and QK-Clip clips a score again whenever it grows. The bound |a| · max‖q‖ · max‖k‖
    also limits every score; under a QK-norm only the gains can raise it.
    """

    steps: Sequence[float]
    largest: Sequence[float]
    bounds: Sequence[float]
    softcap: float | None = None
    is_clipped: bool = False

    @cached_property
    def growth(self) -> Growth | None:
        """Growth of the largest score; None if there are too few samples."""
        return growth(self.steps, self.largest)

    def passes(self, threshold: float | None) -> Crossing | None:
        """Return the forecast step of a threshold; None if it is beyond the horizon, or a limit prevents it.

        >>> steps = range(0, 1000, 100)
        >>> trend = Trend(steps, [10 * 1.002**step for step in steps], [80.0] * 10)
        >>> trend.passes(80).step < 1347, trend.passes(100)
        (True, None)
        """
        if threshold is None or self.is_clipped or (self.softcap is not None and threshold >= self.softcap):
            return None
        if not self._may_reach(threshold) or self.growth is None:
            return None
        crossing = self.growth.passes(threshold)
        bound = None if crossing is None else growth(self.steps, self.bounds)
        if crossing is None or bound is None:
            return crossing
        return crossing if bound.highest(max(crossing.step - bound.step, 0.0)) >= math.log(threshold) else None

    def _may_reach(self, threshold: float) -> bool:
        """Return False if no line through the latest samples reaches the threshold; a fit takes many times as long.

        The steepest pair of neighbours is no flatter than the line, and damping adds up to a few samples of it.
        """
        samples = zip(self.steps[-LATEST:], self.largest[-LATEST:], strict=True)
        logs = [(step, math.log(value)) for step, value in samples if 0 < value < math.inf]
        pairs = [(after - before, now - then) for (before, then), (after, now) in pairwise(logs) if after > before]
        steepest = max((rise / run for run, rise in pairs), default=0.0)
        added = max(steepest, 0.0) * STEPS_ADDED * max((run for run, _ in pairs), default=0.0)
        return max((level for _, level in logs), default=-math.inf) + added >= math.log(threshold)


def _robust_line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float, NDArray[np.float64]]:
    """Return the Theil–Sen slope, the value of the line at the last sample, and the residuals."""
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
    """Return the standard deviation about zero, estimated by the median."""
    return MAD_TO_STD * _median(np.abs(residuals))


def _median(values: NDArray[np.float64]) -> float:
    return float(median(values.tolist()))  # np.median is several times slower on few values
