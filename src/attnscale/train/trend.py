"""Trend: how the largest score of a layer grew over its latest samples, and what limits it.

Growth is what the optimiser does. A factor by which QK-Clip lowered scores is applied to all earlier samples as well,
so that a layer that is clipped back to its threshold again and again is seen to grow, and is not forecast to pass it.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from attnscale.diagnose.forecast import Ceiling, Growth, Outlook, growth, outlook
from attnscale.train.record import LayerRecord

WINDOW = 32  # samples a growth is fitted to: the latest, since growth changes with the learning rate


class Sample(NamedTuple):
    """Largest score of a layer at a step as softmax sees it, its upper bound, and the factor that clipping applied."""

    step: int
    largest: float
    bound: float
    lowered: float = 1.0

    @classmethod
    def of(cls, step: int, layer: LayerRecord) -> "Sample":
        """Return the sample of a record."""
        return cls(step, layer.effective_max[0], layer.whole("max_bound"), layer.lowered)


@dataclass(frozen=True)
class Trend:
    """Growth and forecast of the largest score, None where there are too few samples, and what limits it."""

    steps: Sequence[int]
    largest: Sequence[float]
    bounds: Sequence[float]
    softcap: float | None
    is_clipped: bool

    @cached_property
    def growth(self) -> Growth | None:
        """Growth of the largest score."""
        return growth(self.steps, self.largest)

    @cached_property
    def ahead(self) -> Outlook | None:
        """Forecast of the largest score; none while QK-Clip holds it."""
        return None if self.is_clipped else outlook(self.steps, self.largest)

    @property
    def ceiling(self) -> Ceiling:
        """Limits of the largest score."""
        return Ceiling(self.softcap, lambda: outlook(self.steps, self.bounds), self.is_clipped)


def append(samples: list[Sample], sample: Sample) -> None:
    """Add a sample to the latest ones, in place of those that a resumed run repeats."""
    while samples and samples[-1].step >= sample.step:
        samples.pop()
    samples.append(sample)
    del samples[:-WINDOW]


def latest(samples: Iterable[Sample]) -> list[Sample]:
    """Return the latest samples in order of steps."""
    found: list[Sample] = []
    for sample in samples:
        append(found, sample)
    return found


def trend(samples: Sequence[Sample], softcap: float | None) -> Trend:
    """Return the trend of samples in order of steps, under the soft-cap of the layer."""
    steps, largest, bounds, lowered = zip(*samples, strict=True) if samples else ((), (), (), ())
    if any(factor < 1 for factor in lowered):
        since = [1.0]  # what clipping multiplied each sample by since then
        for factor in reversed(lowered[1:]):
            since.append(since[-1] * factor)
        largest, bounds = (tuple(map(operator.mul, each, reversed(since))) for each in (largest, bounds))
    return Trend(steps, largest, bounds, softcap, is_held(samples))


def is_held(samples: Sequence[Sample]) -> bool:
    """Return True if QK-Clip acted just now, or has acted on scores as large as the last."""
    clipped = [index for index, sample in enumerate(samples) if sample.lowered < 1]
    if not clipped:
        return False
    clipped_at = max(sample.largest for index in clipped for sample in samples[max(0, index - 1) : index + 1])
    return clipped[-1] == len(samples) - 1 or samples[-1].largest <= clipped_at
