"""Summary of a recorded run: the first and last numbers of each layer, its growth, and a forecast.

A log is summarised while it is read, so memory does not grow with its length, except for 16 bytes per record.
"""

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from attnscale.diagnose.alarm import next_threshold
from attnscale.diagnose.finding import Finding, Group, grouped, severity_rank, worst
from attnscale.diagnose.forecast import Crossing, Growth
from attnscale.errors import InputError, SettingError
from attnscale.measure.statistics import logged
from attnscale.plain import plain
from attnscale.train.history import Sample, append, trend
from attnscale.train.log import LogReader
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
    """Group alarms by layer and code, then merge groups of equal code and severity over layers."""
    worst_of, steps = dict[tuple[str, str], Finding](), dict[tuple[str, str], set[int]]()
    for step, alarm in alarms:
        key = alarm.layer, alarm.code
        before = worst_of.setdefault(key, alarm)
        if severity_rank(alarm.severity) >= severity_rank(before.severity):
            worst_of[key] = alarm
        steps.setdefault(key, set()).add(step)
    return tuple(
        AlarmGroup(group, tuple(sorted({step for layer in group.layers for step in steps[layer, group.first.code]})))
        for group in grouped(list(worst_of.values()))
    )


class LoggedRun:
    """One run of a log, summarised while its records are read; it keeps 16 bytes per record."""

    def __init__(self, number: int, name: str | None) -> None:
        self.number, self.name = number, name  # from 1, in the order of the log; None if its lines have no run name
        self.steps, self.positions = array("q"), array("q")  # of each record; its position is that in the log
        self.began = self.ended = 0.0  # seconds since the epoch
        self._layers: dict[str, _LayerSummary] = {}
        self._alarms: list[tuple[int, Finding]] = []
        self._losses: list[float] = []  # the first and the last

    def add(self, record: Record, position: int) -> None:
        """Add a record; remove earlier records from its step on, because a resumed run repeats them."""
        while self.steps and self.steps[-1] >= record.step:
            self.steps.pop()
            self.positions.pop()
        while self._alarms and self._alarms[-1][0] >= record.step:
            self._alarms.pop()
        self.steps.append(record.step)
        self.positions.append(position)
        self.began, self.ended = self.began or record.time, record.time
        if record.loss is not None:
            self._losses = [*self._losses[:1], record.loss]
        self._alarms += [(record.step, alarm) for alarm in record.alarms]
        for name, layer in record.layers.items():
            self._layers.setdefault(name, _LayerSummary(layer)).add(record.step, layer)

    def summary(self, damaged: int = 0, damage: Sequence[str] = ()) -> Run:
        """Return the summary of the run."""
        if not self.steps:
            raise InputError("Expected at least one record to summarise, got none.")
        return Run(
            self.steps[0],
            self.steps[-1],
            len(self.steps),
            damaged,
            [layer.run(name) for name, layer in self._layers.items()],
            self._alarms,
            self.name,
            tuple(damage),
            (self._losses[0], self._losses[-1]) if self._losses else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain values for JSON."""
        return {
            "number": self.number,
            "name": self.name,
            "first_step": self.steps[0],
            "last_step": self.steps[-1],
            "records": len(self.steps),
            "began": self.began,
            "ended": self.ended,
        }


def summarise(records: Iterable[Record], damaged: int = 0) -> Run:
    """Summarise a run from its records, at least one, in order of steps."""
    run = LoggedRun(1, None)
    for position, record in enumerate(records):
        run.add(record, position)
    return run.summary(damaged)


class _LayerSummary:
    def __init__(self, first: LayerRecord) -> None:
        self._first_max = self._highest = first.whole("max")
        self._samples: list[Sample] = []
        self._last = first

    def add(self, step: int, layer: LayerRecord) -> None:
        append(self._samples, Sample.of(step, layer))
        self._highest = float(np.fmax(layer.whole("max"), self._highest))  # ignores NaN
        self._last = layer

    def run(self, name: str) -> LayerRun:
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
    """All runs of a log, and the summary of the chosen one."""

    path: Path
    runs: list[LoggedRun]
    chosen: LoggedRun
    run: Run

    def to_dict(self) -> dict[str, Any]:
        """Return the chosen run and the list of all runs as plain values for JSON."""
        return {**self.run.to_dict(), "number": self.chosen.number, "runs": [run.to_dict() for run in self.runs]}

    def records(self) -> Iterator[Record]:
        """Read the log again and yield the records of the chosen run, in order of steps."""
        positions = iter(self.chosen.positions)
        awaited = next(positions, None)
        for position, record in enumerate(LogReader(self.path)):
            if position == awaited:
                yield record
                awaited = next(positions, None)

    def curves(self) -> list[Record]:
        """Read the log again for about CURVE_POINTS records of the run, and all records with an alarm.

        The first and the last record are complete; the others have one number per layer instead of one per head.
        """
        stride, last = math.ceil(self.run.records / CURVE_POINTS), self.run.records - 1
        return [
            record if number in (0, last) else _without_heads(record)
            for number, record in enumerate(self.records())
            if number % stride == 0 or number == last or record.alarms
        ]


def survey(path: Path, wanted: str | None = None) -> Survey:
    """Read a log once and summarise the run with this name or number, or the last one written."""
    reader, runs, newest = LogReader(path), dict[str | None, LoggedRun](), None
    for position, record in enumerate(reader):
        newest = runs.setdefault(record.run, LoggedRun(len(runs) + 1, record.run))
        newest.add(record, position)
    if newest is None:
        raise SettingError(f"Expected records of attnscale.Monitor in {reader.path}, and found none in it.")
    chosen = newest if wanted is None else _chosen(list(runs.values()), wanted)
    return Survey(reader.path, list(runs.values()), chosen, chosen.summary(reader.damaged, reader.damage))


def _chosen(runs: Sequence[LoggedRun], wanted: str) -> LoggedRun:
    for run in runs:
        if wanted in (run.name, str(run.number)):
            return run
    known = ", ".join(f"{run.number}{'' if run.name is None else f' ({run.name})'}" for run in runs[:10])
    more = f" and {len(runs) - 10} more" if len(runs) > 10 else ""
    raise SettingError(f"Unknown run {wanted!r}. Expected the number or the name of one: {known}{more}.")


def _without_heads(record: Record) -> Record:
    layers = {
        name: replace(layer, numbers={number: [layer.whole(number)] for number in layer.numbers}, clipped=None)
        for name, layer in record.layers.items()
    }
    return replace(record, layers=layers, alarms=[])
