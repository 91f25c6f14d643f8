"""Trend: how the largest score of a layer grew over its latest samples, and what keeps it down."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attnscale.diagnose.forecast import Ceiling, Growth, growth
from attnscale.train.log import without_repeats
from attnscale.train.record import LayerRecord

WINDOW = 32  # samples a growth is fitted to: the latest, since growth changes with the learning rate


class Sample(NamedTuple):
    """The largest score of a layer at a step, and its upper bound."""

    step: int
    largest: float
    bound: float

    @classmethod
    def of(cls, step: int, layer: LayerRecord) -> "Sample":
        """What a record has of it."""
        return cls(step, layer.whole("max"), layer.whole("max_bound"))


@dataclass(frozen=True)
class Trend:
    """The growth of the largest score, None where too little is known, and what keeps it down."""

    growth: Growth | None
    ceiling: Ceiling


def latest(samples: Iterable[Sample]) -> list[Sample]:
    """The last of them in order of steps; those that a resumed run repeats are taken from it."""
    return without_repeats(samples, lambda sample: sample.step)[-WINDOW:]


def trend(samples: Sequence[Sample], softcap: float | None) -> Trend:
    """The trend of what latest() gave, under the soft-cap of the layer."""
    steps = [sample.step for sample in samples]
    bound = growth(steps, [sample.bound for sample in samples])
    return Trend(growth(steps, [sample.largest for sample in samples]), Ceiling(softcap, bound))
