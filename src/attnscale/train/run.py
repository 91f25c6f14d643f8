"""Run: a recorded run as a whole, from its log: where each layer began, where it is, how fast it grows, and a forecast.

A log is summarised while it is read: what is kept of a run does not grow with its length, but for 16 bytes a record.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from attnscale.diagnose.alarm import next_threshold
from attnscale.diagnose.finding import Finding, Group, grouped, severity_rank, worst
from attnscale.diagnose.forecast import Crossing, Growth
from attnscale.errors import InputError
from attnscale.measure.statistics import logged
from attnscale.plain import plain
from attnscale.train.history import Sample, append, trend
from attnscale.train.log import LoggedRun, LogReader
from attnscale.train.record import LayerRecord, Record

CURVE_POINTS = 640  # twice as many as the picture of a curve shows


@dataclass(frozen=True)
class AlarmGroup:
    """Alarms that say the same, of one layer or of several, over a run: the latest of the worst speaks for all."""

    group: Group
    steps: tuple[int, ...]  # at which one of them was raised

    @property
    def when(self) -> str:
        """The step, or the first and the last of several."""
        first, last = self.steps[0], self.steps[-1]
        return f"step {first}" if len(self.steps) == 1 else f"{len(self.steps)} steps from {first} to {last}"

    def to_dict(self) -> dict[str, Any]:
        """Return the group as JSON takes it."""
        return {**self.group.first.to_dict(), "layers": list(self.group.layers), "steps": list(self.steps)}


@dataclass(frozen=True)
class LayerRun:
    """One layer over a run."""

    name: str
    first_max: float
    last_max: float
    highest: float  # the largest score of the whole run
    effective_max: float  # the largest score of the last record as far as softmax sees it
    numbers: dict[str, float]  # at the last record, over its heads
    growth: Growth | None  # of the largest score as far as softmax sees it
    crossing: Crossing | None  # of the next published threshold, where the forecast comes to it
    is_clipped: bool = False  # QK-Clip keeps it down

    def to_dict(self) -> dict[str, Any]:
        """Return the layer as JSON takes it."""
        return dict(plain(asdict(self)))


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
    def raised(self) -> tuple[AlarmGroup, ...]:
        """Its alarms by layer and cause, those that say the same of several layers together; the worst first."""
        return grouped_alarms(self.alarms)

    def to_dict(self) -> dict[str, Any]:
        """Return the run as JSON takes it."""
        return {
            "run": self.name,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "records": self.records,
            "losses": None if self.losses is None else plain(list(self.losses)),
            "damaged_lines": self.damaged,
            "damage": list(self.damage),
            "worst": self.worst,
            "layers": [layer.to_dict() for layer in self.layers],
            "alarms": [{"step": step, **alarm.to_dict()} for step, alarm in self.alarms],
            "raised": [group.to_dict() for group in self.raised],
        }


def grouped_alarms(alarms: Sequence[tuple[int, Finding]]) -> tuple[AlarmGroup, ...]:
    """Group alarms with their steps: by layer and code, and those of one code and severity together."""
    spoken, steps = dict[tuple[str, str], Finding](), dict[tuple[str, str], set[int]]()
    for step, alarm in alarms:
        key = alarm.layer, alarm.code
        before = spoken.get(key)
        if before is None or severity_rank(alarm.severity) >= severity_rank(before.severity):
            spoken[key] = alarm
        steps.setdefault(key, set()).add(step)
    return tuple(
        AlarmGroup(group, tuple(sorted({step for layer in group.layers for step in steps[layer, group.first.code]})))
        for group in grouped(list(spoken.values()))
    )


class Summary:
    """A run while its records are read, in order of steps."""

    def __init__(self) -> None:
        self._layers: dict[str, _LayerSummary] = {}
        self._alarms: list[tuple[int, Finding]] = []
        self._steps: tuple[int, int] | None = None
        self._losses: tuple[float, float] | None = None

    def add(self, record: Record) -> None:
        """Take what is needed from the next record, which replaces those from its step on."""
        while self._alarms and self._alarms[-1][0] >= record.step:
            self._alarms.pop()
        self._steps = (self._steps[0] if self._steps else record.step, record.step)
        if record.loss is not None:
            self._losses = (self._losses[0] if self._losses else record.loss, record.loss)
        self._alarms += [(record.step, alarm) for alarm in record.alarms]
        for name, layer in record.layers.items():
            self._layers.setdefault(name, _LayerSummary()).add(record.step, layer)

    def run(self, records: int, damaged: int = 0, damage: Sequence[str] = (), name: str | None = None) -> Run:
        """Return the run as a whole, of so many records."""
        if self._steps is None:
            raise InputError("Expected at least one record to summarise, got none.")
        layers = [layer.run(name) for name, layer in self._layers.items()]
        return Run(*self._steps, records, damaged, layers, self._alarms, name, tuple(damage), self._losses)


def summarise(records: Iterable[Record], damaged: int = 0) -> Run:
    """Summarise a run from its records, in order of steps; at least one."""
    summary, known = Summary(), list(records)
    for record in known:
        summary.add(record)
    return summary.run(len(known), damaged)


class _LayerSummary:
    """One layer while its records are read."""

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

    def run(self, name: str) -> LayerRun:
        assert self._first_max is not None  # a record was added
        last, effective_max = self._last, self._samples[-1].largest
        found = trend(self._samples, last.softcap)
        return LayerRun(
            name,
            self._first_max,
            last.whole("max"),
            self._highest,
            effective_max,
            {number: last.whole(number) for number in logged() if number in last.numbers},
            found.growth,
            found.passes(next_threshold(effective_max, last.clipped is not None)),
            found.is_clipped,
        )


@dataclass(frozen=True)
class Survey:
    """All runs of a log, and the chosen one."""

    reader: LogReader
    chosen: LoggedRun
    run: Run

    @property
    def runs(self) -> list[LoggedRun]:
        """All runs of the log."""
        return self.reader.runs

    def to_dict(self) -> dict[str, Any]:
        """Return the run as JSON takes it, and the list of all runs."""
        return {**self.run.to_dict(), "number": self.chosen.number, "runs": [run.to_dict() for run in self.runs]}

    def curves(self) -> list[Record]:
        """Read the log once more, for about CURVE_POINTS records of the run and all that have an alarm.

        The first and the last are whole, the others have one number a layer in place of one a head.
        """
        stride, last = math.ceil(self.chosen.records / CURVE_POINTS), self.chosen.records - 1
        return [
            record if number in (0, last) else _without_heads(record)
            for number, record in enumerate(self.reader.records_of(self.chosen))
            if number % stride == 0 or number == last or record.alarms
        ]


def survey(path: Path, wanted: str | None = None) -> Survey:
    """Read a log once: the run of a name or a number in it, or the one that was written last."""
    reader, summaries = LogReader(path), dict[int, Summary]()
    for run, record in reader:
        summaries.setdefault(run.number, Summary()).add(record)
    chosen = reader.choose(wanted)
    summary = summaries[chosen.number].run(chosen.records, reader.damaged, reader.damage, chosen.name)
    return Survey(reader, chosen, summary)


def _without_heads(record: Record) -> Record:
    layers = {
        name: replace(layer, numbers={number: [layer.whole(number)] for number in layer.numbers}, clipped=None)
        for name, layer in record.layers.items()
    }
    return replace(record, layers=layers, alarms=[])
