"""Run: a log as a whole. How every layer began, where it is, how fast it grows, and where that leads."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attnscale.diagnose.alarm import next_threshold
from attnscale.diagnose.finding import Finding, worst
from attnscale.diagnose.forecast import Crossing, Growth, forecast
from attnscale.errors import InputError
from attnscale.measure.statistics import logged
from attnscale.plain import plain
from attnscale.train.record import LayerRecord, Record
from attnscale.train.trend import WINDOW, Sample, trend


@dataclass(frozen=True)
class LayerRun:
    """One layer over a run."""

    name: str
    first_max: float
    last_max: float
    highest: float  # the largest score of the whole run
    numbers: dict[str, float]  # at the last record, over its heads
    growth: Growth | None
    crossing: Crossing | None  # of the next published threshold, where it is growing


@dataclass(frozen=True)
class Run:
    """A recorded run."""

    first_step: int
    last_step: int
    records: int
    damaged: int  # lines that were no records
    layers: list[LayerRun]
    alarms: list[tuple[int, Finding]]  # with the step each was raised at
    name: str | None = None  # by which its log knows it
    damage: tuple[str, ...] = ()  # the first of the damaged lines, in words

    @property
    def worst(self) -> str | None:
        """The worst severity among its alarms."""
        return worst(alarm for _, alarm in self.alarms)

    def to_dict(self) -> dict[str, Any]:
        """The run as JSON takes it."""
        return {
            "run": self.name,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "records": self.records,
            "damaged_lines": self.damaged,
            "damage": list(self.damage),
            "worst": self.worst,
            "layers": [plain(asdict(layer)) for layer in self.layers],
            "alarms": [{"step": step, **alarm.to_dict()} for step, alarm in self.alarms],
        }


class Summary:
    """A run while its records go by, in order of steps: what is known of it so far."""

    def __init__(self) -> None:
        self._layers: dict[str, _Following] = {}
        self._alarms: list[tuple[int, Finding]] = []
        self._steps: tuple[int, int] | None = None
        self._records = 0

    def add(self, record: Record) -> None:
        """Look at a record, and keep none of it but what a run is told by."""
        self._steps = (self._steps[0] if self._steps else record.step, record.step)
        self._records += 1
        self._alarms += [(record.step, alarm) for alarm in record.alarms]
        for name, layer in record.layers.items():
            self._layers.setdefault(name, _Following()).add(record.step, layer)

    def run(self, damaged: int = 0, damage: Sequence[str] = (), name: str | None = None) -> Run:
        """The run as a whole."""
        if self._steps is None:
            raise InputError("Expected at least one record to summarise, got none.")
        layers = [following.concluded(layer) for layer, following in self._layers.items()]
        return Run(*self._steps, self._records, damaged, layers, self._alarms, name, tuple(damage))


def summarise(records: Iterable[Record], damaged: int = 0) -> Run:
    """A run from its records, in order of steps; at least one."""
    summary = Summary()
    for record in records:
        summary.add(record)
    return summary.run(damaged)


class _Following:
    """What is kept of one layer while its records go by."""

    def __init__(self) -> None:
        self._first: Sample | None = None
        self._samples: deque[Sample] = deque(maxlen=WINDOW)
        self._highest = math.nan
        self._last = LayerRecord(0, {})

    def add(self, step: int, layer: LayerRecord) -> None:
        sample = Sample.of(step, layer)
        self._first = self._first or sample
        while self._samples and self._samples[-1].step >= step:
            self._samples.pop()
        self._samples.append(sample)
        self._highest = max(sample.largest, self._highest) if self._highest == self._highest else sample.largest
        self._last = layer

    def concluded(self, name: str) -> LayerRun:
        assert self._first is not None  # it was seen
        last_max = self._samples[-1].largest
        found = trend(list(self._samples), self._last.softcap)
        numbers = {number: self._last.whole(number) for number in logged() if number in self._last.numbers}
        crossing = forecast(found.growth, found.ceiling, next_threshold(last_max))
        return LayerRun(name, self._first.largest, last_max, self._highest, numbers, found.growth, crossing)
