"""Where a score may be going: a damped trend with a 90% interval, and the step at which it would pass a threshold.

The trend of the latest samples is damped (Gardner & McKenzie 1985): each sample ahead it adds four fifths of what it
added the sample before, so growth that goes on is followed for a while, and none is drawn out as an exponential. The
interval reaches from growth that ends now to growth that goes on, with what the samples scatter on both sides. Nothing
is said of more than half as many samples ahead as were seen, nor of more than eight.

Damping and widths were chosen on recorded runs, healthy and diverging: `python benchmarks/forecasts.py` says how often
they hold. Growth may end at any time, and in one forecast of ten it does, so a threshold has a step before which it is
not expected, and none by which it must have been passed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from attnscale.diagnose.growth import deviation, middle, robust_line

LATEST = 8  # samples that a trend is taken from
LEAST_SAMPLES = 4  # runs that diverge at once are over after some more
FARTHEST = 8  # samples ahead: trends of recorded runs say little of what is beyond
DAMPING = 0.8
LEAST_SCATTER = 0.03  # of a logarithm: no run is smoother for long
BELOW, ABOVE = 1.45, 1.5  # scatters to the ends of the interval; above, times the root of the samples ahead
FEW = 4.0  # a scatter told by n samples may be more, by this over n


@dataclass(frozen=True)
class Crossing:
    """The step at which a threshold is passed if growth goes on, and the one before which it is not expected to be."""

    threshold: float
    step: float
    earliest: float


@dataclass(frozen=True)
class Outlook:
    """The logarithm of a score some steps ahead, from what its latest samples were."""

    step: float
    level: float  # ln of the last value, as far as that is not wild
    rate: float  # of the logarithm, a step
    scatter: float
    spacing: float  # steps from sample to sample
    seen: float  # steps over which its rate was seen
    reach: float  # steps ahead that it bears

    def likely(self, steps: float) -> float:
        """What it comes to in so many steps if its growth goes on."""
        return self.level + self._grown(steps)

    def lowest(self, steps: float) -> float:
        """The lower end of the interval: growth has ended, or a fall goes on."""
        return self.level + min(self._grown(steps), 0.0) - BELOW * self.scatter

    def highest(self, steps: float) -> float:
        """The upper end of the interval."""
        return self.level + max(self._grown(steps), 0.0) + ABOVE * self.scatter * math.sqrt(steps / self.spacing)

    def passes(self, threshold: float) -> Crossing | None:
        """When it would pass a threshold; None where it does not within reach, or has."""
        aim = math.log(threshold)
        if self.rate <= 0 or not self.level < aim <= self.likely(self.reach):
            return None
        added = self.rate * self.spacing * DAMPING / (1 - DAMPING)
        ahead = math.log1p(-(aim - self.level) / added) / math.log(DAMPING) * self.spacing
        return Crossing(threshold, self.step + ahead, self.step + self._first_within(aim, ahead))

    def _grown(self, steps: float) -> float:
        samples = steps / self.spacing
        return self.rate * self.spacing * DAMPING * (1 - math.pow(DAMPING, samples)) / (1 - DAMPING)

    def _first_within(self, aim: float, ahead: float) -> float:
        """The first step at which the interval holds it, by halving: its upper end only rises."""
        low, high = 0.0, ahead
        while high - low > self.spacing / 100:
            middle = (low + high) / 2
            low, high = (low, middle) if self.highest(middle) >= aim else (middle, high)
        return high


@dataclass(frozen=True)
class Ceiling:
    """What keeps a score down whatever its growth: a soft-cap, where its upper bound is going, and QK-Clip.

    A soft-cap is never passed. Scores that QK-Clip holds are clipped again when they grow again. The bound
    |a| · max‖q‖ · max‖k‖ is above every score: under a QK-norm it follows the gains alone, and scores that grow towards
    it stop there.
    """

    softcap: float | None = None
    bound: Outlook | Callable[[], Outlook | None] | None = None  # or how to tell it, where it is asked for
    is_clipped: bool = False

    def allows(self, crossing: Crossing) -> bool:
        """Whether a score can pass this threshold, and at that time."""
        if self.is_clipped:
            return False
        if self.softcap is not None and crossing.threshold >= self.softcap:
            return False
        bound = self.bound() if callable(self.bound) else self.bound
        return bound is None or bound.highest(max(crossing.step - bound.step, 0.0)) >= math.log(crossing.threshold)


def forecast(ahead: Outlook | None, ceiling: Ceiling, threshold: float | None) -> Crossing | None:
    """When a score would pass a threshold; None where that is beyond reach, or something keeps it below."""
    if ahead is None or threshold is None:
        return None
    crossing = ahead.passes(threshold)
    return crossing if crossing is not None and ceiling.allows(crossing) else None


def outlook(steps: Sequence[float], values: Sequence[float]) -> Outlook | None:
    """Where a positive series may be going; None where fewer than four of its samples are positive and finite.

    >>> steps = range(0, 1000, 100)
    >>> found = outlook(steps, [10 * 1.002**step for step in steps])
    >>> round(found.passes(100).step), found.passes(1000)
    (1347, None)
    """
    return outlooks(steps, [values])[0]


def outlooks(steps: Sequence[float], series: Sequence[Sequence[float]]) -> list[Outlook | None]:
    """The outlook of each of several series over the same steps, in as many array operations as one takes."""
    x = np.asarray(steps, dtype=np.float64)
    values = np.asarray(series, dtype=np.float64).reshape(len(series), len(x))
    usable = np.isfinite(values) & (values > 0)
    if not usable.all():
        if len(values) > 1:  # series that lack samples have steps of their own
            lacking = [not own.all() for own in usable]
            whole = iter(outlooks(steps, [each for each, lacks in zip(series, lacking, strict=True) if not lacks]))
            return [outlook(steps, each) if lacks else next(whole) for each, lacks in zip(series, lacking, strict=True)]
        x, values = x[usable[0]], values[:, usable[0]]
    if len(set(x.tolist())) < LEAST_SAMPLES:
        return [None] * len(values)
    y = np.log(values)
    line, moves = robust_line(x[-LATEST:], y[:, -LATEST:]), y[:, 1:] - y[:, :-1]
    moved = deviation(moves - middle(np.sort(moves))[:, None])
    spacing = float(middle(np.sort((x[1:] - x[:-1])[-LATEST:])))
    last, seen, reach = float(x[-1]), float(x[-1] - x[-LATEST:][0]), spacing * min(len(x) // 2, FARTHEST)
    numbers = np.stack([y[:, -1], line.level, line.rate, line.noise, moved], -1)
    found: list[Outlook | None] = []
    for latest, on_line, rate, noise, move in numbers.tolist():
        scatter = math.sqrt(LEAST_SCATTER**2 + (noise**2 + move**2) / 2) * (1 + FEW / len(x))
        level = min(max(latest, on_line - scatter), on_line + scatter)
        found.append(Outlook(last, level, rate, scatter, spacing, seen, reach))
    return found
