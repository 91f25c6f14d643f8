"""Run: a log as a whole. How every layer began, where it is, how fast it grows, and where that leads."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attnscale.diagnose.alarm import next_threshold
from attnscale.diagnose.finding import Finding, Group, grouped, severity_rank, worst
from attnscale.diagnose.forecast import Crossing, Growth, Outlook, forecast
from attnscale.errors import InputError
from attnscale.measure.statistics import logged
from attnscale.plain import plain
from attnscale.train.record import LayerRecord, Record
from attnscale.train.trend import Sample, append, trend


@dataclass(frozen=True)
class Raised:
    """Alarms that say the same, of one layer or of several, over a run: the latest of the worst speaks for all."""

    group: Group
    steps: tuple[int, ...]  # at which one of them was raised

    @property
    def when(self) -> str:
        """The step, or the first and the last of several."""
        first, last = self.steps[0], self.steps[-1]
        return f"step {first}" if len(self.steps) == 1 else f"{len(self.steps)} steps from {first} to {last}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {**self.group.first.to_dict(), "layers": list(self.group.layers), "steps": list(self.steps)}


@dataclass(frozen=True)
class LayerRun:
    """One layer over a run."""

    name: str
    first_max: float
    last_max: float
    highest: float  # the largest score of the whole run
    felt: float  # what softmax sees of the largest score at the last record
    numbers: dict[str, float]  # at the last record, over its heads
    growth: Growth | None
    ahead: Outlook | None  # where it may be going
    crossing: Crossing | None  # of the next published threshold, where that is within reach
    is_clipped: bool = False  # QK-Clip keeps it down


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
    losses: tuple[float, float] | None = None  # the first and the last that are in its records

    @property
    def worst(self) -> str | None:
        """The worst severity among its alarms."""
        return worst(alarm for _, alarm in self.alarms)

    @property
    def raised(self) -> tuple[Raised, ...]:
        """Its alarms by layer and cause, those that say the same of several layers together; the worst first."""
        return raised_alarms(self.alarms)

    def to_dict(self) -> dict[str, Any]:
        """The run as JSON takes it."""
        return {
            "run": self.name,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "records": self.records,
            "losses": None if self.losses is None else plain(list(self.losses)),
            "damaged_lines": self.damaged,
            "damage": list(self.damage),
            "worst": self.worst,
            "layers": [plain(asdict(layer)) for layer in self.layers],
            "alarms": [{"step": step, **alarm.to_dict()} for step, alarm in self.alarms],
            "raised": [raised.to_dict() for raised in self.raised],
        }


def raised_alarms(alarms: Sequence[tuple[int, Finding]]) -> tuple[Raised, ...]:
    """Alarms with their steps, grouped: of one layer and code one, and those of one code and severity together."""
    spoken, steps = dict[tuple[str, str], Finding](), dict[tuple[str, str], set[int]]()
    for step, alarm in alarms:
        key = alarm.layer, alarm.code
        before = spoken.get(key)
        if before is None or severity_rank(alarm.severity) >= severity_rank(before.severity):
            spoken[key] = alarm
        steps.setdefault(key, set()).add(step)
    return tuple(
        Raised(group, tuple(sorted({step for layer in group.layers for step in steps[layer, group.first.code]})))
        for group in grouped(list(spoken.values()))
    )


class Summary:
    """A run while its records go by, in order of steps: what is known of it so far."""

    def __init__(self) -> None:
        self._layers: dict[str, _Following] = {}
        self._alarms: list[tuple[int, Finding]] = []
        self._steps: tuple[int, int] | None = None
        self._records = 0
        self._losses: tuple[float, float] | None = None

    def add(self, record: Record) -> None:
        """Look at a record, and keep none of it but what a run is told by."""
        self._steps = (self._steps[0] if self._steps else record.step, record.step)
        self._records += 1
        if record.loss is not None:
            self._losses = (self._losses[0] if self._losses else record.loss, record.loss)
        self._alarms += [(record.step, alarm) for alarm in record.alarms]
        for name, layer in record.layers.items():
            self._layers.setdefault(name, _Following()).add(record.step, layer)

    def run(self, damaged: int = 0, damage: Sequence[str] = (), name: str | None = None) -> Run:
        """The run as a whole."""
        if self._steps is None:
            raise InputError("Expected at least one record to summarise, got none.")
        layers = [following.concluded(layer) for layer, following in self._layers.items()]
        return Run(*self._steps, self._records, damaged, layers, self._alarms, name, tuple(damage), self._losses)


def summarise(records: Iterable[Record], damaged: int = 0) -> Run:
    """A run from its records, in order of steps; at least one."""
    summary = Summary()
    for record in records:
        summary.add(record)
    return summary.run(damaged)


class _Following:
    """What is kept of one layer while its records go by."""

    def __init__(self) -> None:
        self._first_max: float | None = None
        self._samples: list[Sample] = []
        self._highest = math.nan
        self._last = LayerRecord(0, {})

    def add(self, step: int, layer: LayerRecord) -> None:
        largest = layer.whole("max")
        self._first_max = largest if self._first_max is None else self._first_max
        append(self._samples, Sample.of(step, layer))
        self._highest = max(largest, self._highest) if self._highest == self._highest else largest
        self._last = layer

    def concluded(self, name: str) -> LayerRun:
        assert self._first_max is not None  # it was seen
        last_max, felt = self._last.whole("max"), self._samples[-1].largest
        found = trend(self._samples, self._last.softcap)
        numbers = {number: self._last.whole(number) for number in logged() if number in self._last.numbers}
        crossing = forecast(found.ahead, found.ceiling, next_threshold(felt, self._last.clipped is not None))
        return LayerRun(
            name, self._first_max, last_max, self._highest, felt, numbers, found.growth,
            found.ahead, crossing, found.ceiling.is_clipped,
        )  # fmt: skip
