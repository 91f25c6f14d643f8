"""Trend: how the largest score of a layer grew over its latest samples, and what keeps it down.

Growth is what the optimiser does. What QK-Clip took off since is taken off earlier samples as well, so that a layer
that is clipped back to its threshold again and again is seen to grow, and is not forecast to pass what holds it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import mul
from typing import NamedTuple

from attnscale.diagnose.forecast import Ceiling, Outlook, outlook, outlooks
from attnscale.diagnose.growth import Growth, growth
from attnscale.train.record import LayerRecord

WINDOW = 32  # samples a growth is fitted to: the latest, since growth changes with the learning rate


class Sample(NamedTuple):
    """What softmax feels of the largest score at a step, its upper bound, and what clipping multiplied it by."""

    step: int
    largest: float
    bound: float
    lowered: float = 1.0

    @classmethod
    def of(cls, step: int, layer: LayerRecord) -> "Sample":
        """What a record has of it."""
        return cls(step, layer.effective_max[0], layer.whole("max_bound"), layer.lowered)


@dataclass(frozen=True)
class Trend:
    """How the largest score grew and where it may go, None where too little is known, and what keeps it down.

    Each is worked out when it is asked for: of most layers of a step, where they may go is all that matters.
    """

    steps: Sequence[int]
    largest: Sequence[float]
    bounds: Sequence[float]
    softcap: float | None
    is_clipped: bool

    @cached_property
    def growth(self) -> Growth | None:
        """Of the largest score."""
        return growth(self.steps, self.largest)

    @cached_property
    def ahead(self) -> Outlook | None:
        """Where it may go; nowhere, while QK-Clip holds it."""
        return None if self.is_clipped else outlook(self.steps, self.largest)

    @property
    def ceiling(self) -> Ceiling:
        """What keeps it down."""
        return Ceiling(self.softcap, partial(outlook, self.steps, self.bounds), self.is_clipped)


def latest(samples: Iterable[Sample]) -> list[Sample]:
    """The last of them in order of steps; those that a resumed run repeats are taken from it."""
    kept: list[Sample] = []
    for sample in samples:
        append(kept, sample)
    return kept


def append(kept: list[Sample], sample: Sample) -> None:
    """Add a sample to what latest() gave."""
    while kept and kept[-1].step >= sample.step:
        kept.pop()
    kept.append(sample)
    del kept[:-WINDOW]


def trend(samples: Sequence[Sample], softcap: float | None) -> Trend:
    """The trend of what latest() gave, under the soft-cap of the layer."""
    steps, largest, bounds, lowered = zip(*samples, strict=True) if samples else ((), (), (), ())
    if set(lowered) <= {1.0}:  # nothing was clipped, as in most runs
        return Trend(steps, largest, bounds, softcap, is_clipped=False)
    since = _lowered_since(samples)
    largest, bounds = (tuple(map(mul, values, since)) for values in (largest, bounds))
    return Trend(steps, largest, bounds, softcap, is_held(samples))


def aheads(trends: Mapping[str, Trend]) -> dict[str, Outlook | None]:
    """The `ahead` of each layer, worked out at once for layers that were sampled at the same steps."""
    alike: dict[Sequence[int], list[str]] = {}
    for name, found in trends.items():
        if not found.is_clipped:
            alike.setdefault(found.steps, []).append(name)
    told: dict[str, Outlook | None] = dict.fromkeys(trends)
    for steps, names in alike.items():
        told |= zip(names, outlooks(steps, [trends[name].largest for name in names]), strict=True)
    return told


def is_held(samples: Sequence[Sample]) -> bool:
    """Whether QK-Clip keeps a layer down: it acted just now, or has acted on scores as large as those seen last."""
    acted = [index for index, sample in enumerate(samples) if sample.lowered < 1]
    if not acted:
        return False
    clipped_at = max(sample.largest for index in acted for sample in samples[max(0, index - 1) : index + 1])
    return acted[-1] == len(samples) - 1 or samples[-1].largest <= clipped_at


def _lowered_since(samples: Sequence[Sample]) -> list[float]:
    """By what clipping has multiplied each sample since it was seen; 1 for the last."""
    since = [1.0]
    for sample in reversed(samples[1:]):
        since.append(since[-1] * sample.lowered)
    return since[::-1] if samples else []
