"""Summary of a recorded run: the first and last numbers of each layer, its growth, and a forecast.

A log is summarised while it is read, so memory does not grow with its length, except for 16 bytes per record.
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

CURVE_POINTS = 640  # twice the number of points in a plotted curve


@dataclass(frozen=True)
class AlarmGroup:
    """Equal alarms of one or several layers over a run, shown as the latest of the most severe ones."""

    group: Group
    steps: tuple[int, ...]  # steps at which one of them was raised

    @property
    def when(self) -> str:
        """Step of the alarm, or the number of steps with the first and the last."""
        first, last = self.steps[0], self.steps[-1]
        return f"step {first}" if len(self.steps) == 1 else f"{len(self.steps)} steps from {first} to {last}"

    def to_dict(self) -> dict[str, Any]:
        """Return the group as plain values for JSON."""
        return {**self.group.first.to_dict(), "layers": list(self.group.layers), "steps": list(self.steps)}


@dataclass(frozen=True)
class LayerRun:
    """Summary of one layer over a run."""

    name: str
    first_max: float
    last_max: float
    highest: float  # largest score of the whole run
    effective_max: float  # largest effective score of the last record
    numbers: dict[str, float]  # statistics of the last record, combined over heads
    growth: Growth | None  # growth of the largest effective score
    crossing: Crossing | None  # forecast crossing of the next published threshold, if any
    is_clipped: bool = False  # True if QK-Clip limits its scores

    def to_dict(self) -> dict[str, Any]:
        """Return the layer as plain values for JSON."""
        return dict(plain(asdict(self)))


@dataclass(frozen=True)
class Run:
    """Summary of a recorded run."""

    first_step: int
    last_step: int
    records: int
    damaged: int  # number of lines that are not records
    layers: list[LayerRun]
    alarms: list[tuple[int, Finding]]  # each with its step
    name: str | None = None  # name of the run in its log
    damage: tuple[str, ...] = ()  # error messages of the first damaged lines
    losses: tuple[float, float] | None = None  # first and last recorded loss

    @property
    def worst(self) -> str | None:
        """Highest severity of its alarms."""
        return worst(alarm for _, alarm in self.alarms)

    @property
    def raised(self) -> tuple[AlarmGroup, ...]:
        """Its alarms, grouped over steps and layers, the most severe first."""
        return grouped_alarms(self.alarms)

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain values for JSON."""
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
    """Group alarms by layer and code, and then those of equal code and severity over layers."""
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
    """Summary of a run that is updated with its records, in order of steps."""

    def __init__(self) -> None:
        self._layers: dict[str, _LayerSummary] = {}
        self._alarms: list[tuple[int, Finding]] = []
        self._steps: tuple[int, int] | None = None
        self._losses: tuple[float, float] | None = None

    def add(self, record: Record) -> None:
        """Add the next record, replacing those from its step on."""
        while self._alarms and self._alarms[-1][0] >= record.step:
            self._alarms.pop()
        self._steps = (self._steps[0] if self._steps else record.step, record.step)
        if record.loss is not None:
            self._losses = (self._losses[0] if self._losses else record.loss, record.loss)
        self._alarms += [(record.step, alarm) for alarm in record.alarms]
        for name, layer in record.layers.items():
            self._layers.setdefault(name, _LayerSummary()).add(record.step, layer)

    def run(self, records: int, damaged: int = 0, damage: Sequence[str] = (), name: str | None = None) -> Run:
        """Return the summary of the run, with this number of records."""
        if self._steps is None:
            raise InputError("Expected at least one record to summarise, got none.")
        layers = [layer.run(name) for name, layer in self._layers.items()]
        return Run(*self._steps, records, damaged, layers, self._alarms, name, tuple(damage), self._losses)


def summarise(records: Iterable[Record], damaged: int = 0) -> Run:
    """Summarise a run from its records, at least one, in order of steps."""
    summary, known = Summary(), list(records)
    for record in known:
        summary.add(record)
    return summary.run(len(known), damaged)


class _LayerSummary:
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
        """Return the chosen run and the list of all runs as plain values for JSON."""
        return {**self.run.to_dict(), "number": self.chosen.number, "runs": [run.to_dict() for run in self.runs]}

    def curves(self) -> list[Record]:
        """Read the log again for about CURVE_POINTS records of the run, and all records with an alarm.

        The first and the last record are complete; the others have one number per layer instead of one per head.
        """
        stride, last = math.ceil(self.chosen.records / CURVE_POINTS), self.chosen.records - 1
        return [
            record if number in (0, last) else _without_heads(record)
            for number, record in enumerate(self.reader.records_of(self.chosen))
            if number % stride == 0 or number == last or record.alarms
        ]


def survey(path: Path, wanted: str | None = None) -> Survey:
    """Read a log once and summarise the run with this name or number, or the last one written."""
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
