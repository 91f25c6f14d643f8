"""Trend: how the largest score of a layer grew over its latest samples, and what keeps it down.

Growth is what the optimiser does. What QK-Clip took off since is taken off earlier samples as well, so that a layer
that is clipped back to its threshold again and again is seen to grow, and is not forecast to pass what holds it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

from attnscale.diagnose.forecast import Ceiling, Outlook, outlook
from attnscale.diagnose.growth import Growth, growth
from attnscale.train.record import LayerRecord

Entry = TypeVar("Entry")
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
        return cls(step, layer.felt[0], layer.whole("max_bound"), layer.lowered)


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
    return without_repeats(samples, lambda sample: sample.step)[-WINDOW:]


def without_repeats(entries: Iterable[Entry], step: Callable[[Entry], int]) -> list[Entry]:
    """In order of steps: those that a resumed run repeats are taken from it.

    >>> without_repeats([(0, "a"), (5, "b"), (10, "c"), (5, "d")], lambda entry: entry[0])
    [(0, 'a'), (5, 'd')]
    """
    kept: list[Entry] = []
    for entry in entries:
        while kept and step(kept[-1]) >= step(entry):
            kept.pop()
        kept.append(entry)
    return kept


def trend(samples: Sequence[Sample], softcap: float | None) -> Trend:
    """The trend of what latest() gave, under the soft-cap of the layer."""
    steps, lowered = [sample.step for sample in samples], _lowered_since(samples)
    largest = [sample.largest * factor for sample, factor in zip(samples, lowered, strict=True)]
    bounds = [sample.bound * factor for sample, factor in zip(samples, lowered, strict=True)]
    return Trend(steps, largest, bounds, softcap, is_held(samples))


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
