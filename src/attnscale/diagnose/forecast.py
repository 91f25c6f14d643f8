"""Measure how a score grows, and forecast where it may go: robust lines through its logarithm.

Scores that run away grow by a factor a step. `growth()` fits a line to their logarithm: its slope is the median of the
slopes between all pairs of samples (Theil 1950, Sen 1968), which a third of wild samples does not move. The interval
of the slope is Sen's, from the variance of Kendall's tau, widened where neighbouring residuals resemble each other.

`outlook()` extends the trend of the latest samples, damped (Gardner & McKenzie 1985): each sample ahead adds four
fifths of what the sample before added, so growth is followed for a while, and never extrapolated as an exponential. The
90% interval reaches from growth that ends now to growth that goes on, with the scatter of the samples on both sides. A
forecast covers at most half as many samples ahead as there are, and at most eight.

Damping and widths were chosen on recorded runs, healthy and diverging: `python benchmarks/forecasts.py` measures how
often they hold. Growth may end at any time, and in one forecast of ten it does, so a threshold has a step before which
it is not expected to be passed, and none by which it must have been.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

GROWTH_SAMPLES = 6  # five slopes from each: fewer have no interval worth naming
RECENT = 6  # samples by which a score still grows, or falls
NORMAL_QUANTILE = 1.645  # of a 90% interval
LARGEST_CORRELATION = 0.9  # of neighbouring residuals that is still believed
MAD_TO_STD = 1.4826  # of a normal distribution
LATEST = 8  # samples that a trend is taken from
LEAST_SAMPLES = 4  # runs that diverge at once are over after some more
FARTHEST = 8  # samples ahead: trends of recorded runs say little of what is beyond
DAMPING = 0.8
LEAST_SCATTER = 0.03  # of a logarithm: no run is smoother for long
BELOW, ABOVE = 1.45, 1.5  # scatters to the ends of the interval; above, times the root of the samples ahead
FEW = 4.0  # the scatter of n samples may be larger than measured, by this over n
LARGEST_LOG = 700.0  # whose exponential is a float


@dataclass(frozen=True)
class Growth:
    """A line through the logarithm of a series, at its last step."""

    step: float
    level: float  # ln of the value, on the line
    rate: float  # of the logarithm, a step
    low: float
    high: float
    samples: int
    span: float  # steps from the first sample to the last
    recent_rate: float  # of the latest samples alone
    recent_span: float  # steps over which those lie

    @property
    def is_growing(self) -> bool:
        """True if the whole interval of the rate is above zero, and the latest samples do not fall."""
        return self.low > 0 and self.recent_rate > 0

    @property
    def grown(self) -> float:
        """Factor by which the value grew over all samples."""
        return self.factor(self.span)

    @property
    def recently_grown(self) -> float:
        """Factor by which the value grew over the latest samples."""
        return math.exp(min(self.recent_rate * self.recent_span, LARGEST_LOG))

    def factor(self, steps: float) -> float:
        """Return the factor of growth in so many steps, or over all samples where those span fewer."""
        return math.exp(min(self.rate * min(steps, self.span), LARGEST_LOG))


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
    if len(set(x.tolist())) < GROWTH_SAMPLES:
        return None
    line, recent = _robust_line(x, y), _robust_line(x[-RECENT:], y[-RECENT:])
    low, high = _interval(line)
    numbers = line.level, line.rate, low, high
    span, recent_span = float(x[-1] - x[0]), float(x[-1] - x[-RECENT:][0])
    return Growth(float(x[-1]), *numbers, len(x), span, recent.rate, recent_span)


@dataclass(frozen=True)
class Crossing:
    """The step at which a threshold is passed if growth goes on, and the earliest step at which it may be."""

    threshold: float
    step: float
    earliest: float


@dataclass(frozen=True)
class Outlook:
    """Forecast of the logarithm of a score, from its latest samples."""

    step: float
    level: float  # ln of the last value, without outliers
    rate: float  # of the logarithm, a step
    scatter: float
    spacing: float  # steps from sample to sample
    observed: float  # steps over which the rate was measured
    horizon: float  # steps ahead that the forecast covers

    def likely(self, steps: float) -> float:
        """Return the value so many steps ahead if growth goes on."""
        return self.level + self._grown(steps)

    def lowest(self, steps: float) -> float:
        """Return the lower end of the interval: growth has ended, or a fall goes on."""
        return self.level + min(self._grown(steps), 0.0) - BELOW * self.scatter

    def highest(self, steps: float) -> float:
        """Return the upper end of the interval."""
        return self.level + max(self._grown(steps), 0.0) + ABOVE * self.scatter * math.sqrt(steps / self.spacing)

    def passes(self, threshold: float) -> Crossing | None:
        """Return when it would pass a threshold; None where it has, or would not within the horizon."""
        aim = math.log(threshold)
        if self.rate <= 0 or not self.level < aim <= self.likely(self.horizon):
            return None
        added = self.rate * self.spacing * DAMPING / (1 - DAMPING)
        ahead = math.log1p(-(aim - self.level) / added) / math.log(DAMPING) * self.spacing
        return Crossing(threshold, self.step + ahead, self.step + self._first_within(aim, ahead))

    def _grown(self, steps: float) -> float:
        samples = steps / self.spacing
        return self.rate * self.spacing * DAMPING * (1 - math.pow(DAMPING, samples)) / (1 - DAMPING)

    def _first_within(self, aim: float, ahead: float) -> float:
        """Return the first step at which the interval holds the threshold, by bisection: its upper end only rises."""
        low, high = 0.0, ahead
        while high - low > self.spacing / 100:
            middle = (low + high) / 2
            low, high = (low, middle) if self.highest(middle) >= aim else (middle, high)
        return high


@dataclass(frozen=True)
class Ceiling:
    """Limits of a score whatever its growth: a soft-cap, its upper bound and the forecast of that, and QK-Clip.

    A soft-cap is never passed. Scores that QK-Clip holds are clipped again when they grow again. The bound
    |a| · max‖q‖ · max‖k‖ is above every score: under a QK-norm it follows the gains alone, and scores that grow towards
    it stop there.
    """

    softcap: float | None = None
    bound: Outlook | Callable[[], Outlook | None] | None = None  # or a function that returns it
    is_clipped: bool = False

    def allows(self, crossing: Crossing) -> bool:
        """Return True if a score can pass this threshold at that time."""
        if self.is_clipped:
            return False
        if self.softcap is not None and crossing.threshold >= self.softcap:
            return False
        bound = self.bound() if callable(self.bound) else self.bound
        return bound is None or bound.highest(max(crossing.step - bound.step, 0.0)) >= math.log(crossing.threshold)


def forecast(ahead: Outlook | None, ceiling: Ceiling, threshold: float | None) -> Crossing | None:
    """Return when a score would pass a threshold; None where that is beyond the horizon, or a ceiling prevents it."""
    if ahead is None or threshold is None:
        return None
    crossing = ahead.passes(threshold)
    return crossing if crossing is not None and ceiling.allows(crossing) else None


def outlook(steps: Sequence[float], values: Sequence[float]) -> Outlook | None:
    """Forecast a positive series; None where fewer than four of its samples are positive and finite.

    >>> steps = range(0, 1000, 100)
    >>> found = outlook(steps, [10 * 1.002**step for step in steps])
    >>> round(found.passes(100).step), found.passes(1000)
    (1347, None)
    """
    x, y = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    usable = np.isfinite(y) & (y > 0)
    x, y = x[usable], np.log(y[usable])
    if len(set(x.tolist())) < LEAST_SAMPLES:
        return None
    line, moves = _robust_line(x[-LATEST:], y[-LATEST:]), np.diff(y)
    noise, move = _deviation(line.residuals), _deviation(moves - _median(moves))
    scatter = math.sqrt(LEAST_SCATTER**2 + (noise**2 + move**2) / 2) * (1 + FEW / len(x))
    level = min(max(float(y[-1]), line.level - scatter), line.level + scatter)
    spacing = _median(np.diff(x)[-LATEST:])
    horizon = spacing * min(len(x) // 2, FARTHEST)
    return Outlook(float(x[-1]), level, line.rate, scatter, spacing, float(x[-1] - x[-LATEST:][0]), horizon)


@dataclass(frozen=True)
class _Line:
    """A line that outliers do not move."""

    rate: float
    level: float  # at the last sample
    residuals: NDArray[np.float64]
    slopes: NDArray[np.float64]  # of all pairs, in order


def _robust_line(x: NDArray[np.float64], y: NDArray[np.float64]) -> _Line:
    """Fit the line of Theil and Sen."""
    first, second = np.triu_indices(len(x), 1)
    run, rise = x[second] - x[first], y[second] - y[first]
    slopes = np.sort(rise[run != 0] / run[run != 0])
    rate = _median(slopes)
    offsets = y - rate * (x - x[-1])
    level = _median(offsets)
    return _Line(rate, level, offsets - level, slopes)


def _deviation(residuals: NDArray[np.float64]) -> float:
    """Return the standard deviation about zero, by the median."""
    return MAD_TO_STD * _median(np.abs(residuals))


def _median(values: NDArray[np.float64]) -> float:
    return float(median(values.tolist()))  # np.median takes several times as long on so few


def _interval(line: _Line) -> tuple[float, float]:
    """Return the ranks of the slopes between which the true one lies (Sen 1968).

    √((1 + ρ)/(1 − ρ)) widens the interval: neighbours that are alike make the samples fewer than they seem.
    """
    residuals, samples = line.residuals, len(line.residuals)
    power, correlation = float(residuals @ residuals), 0.0
    if power > 0:  # about a fitted line the correlation comes out too low, by about (2 + 4ρ)/n (Kendall 1954)
        correlation = (float(residuals[1:] @ residuals[:-1]) / power + 2 / samples) / (1 - 4 / samples)
        correlation = min(max(correlation, 0.0), LARGEST_CORRELATION)
    tau_deviation = math.sqrt(samples * (samples - 1) * (2 * samples + 5) / 18)
    width = NORMAL_QUANTILE * tau_deviation * math.sqrt((1 + correlation) / (1 - correlation))
    low = max(0, math.floor((len(line.slopes) - width) / 2))
    high = min(len(line.slopes) - 1, math.ceil((len(line.slopes) + width) / 2))
    return float(line.slopes[low]), float(line.slopes[high])
