"""Trend: how the largest score of a layer grew over its latest samples, and what keeps it down."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from attnscale.diagnose.forecast import Ceiling, Growth, growth
from attnscale.train.record import LayerRecord

Entry = TypeVar("Entry")
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
    steps = [sample.step for sample in samples]
    bound = growth(steps, [sample.bound for sample in samples])
    return Trend(growth(steps, [sample.largest for sample in samples]), Ceiling(softcap, bound))
