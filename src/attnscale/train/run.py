"""Run: a log as a whole. How every layer began, where it is, how fast it grows, and where that leads."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attnscale.diagnose.alarm import next_threshold
from attnscale.diagnose.finding import Finding, worst
from attnscale.diagnose.forecast import Ceiling, Crossing, Growth, growth
from attnscale.train.history import WINDOW
from attnscale.train.record import NUMBERS, Record


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

    @property
    def worst(self) -> str | None:
        """The worst severity among its alarms."""
        return worst(alarm for _, alarm in self.alarms)

    def to_dict(self) -> dict[str, Any]:
        """The run as JSON takes it."""
        return {
            "first_step": self.first_step,
            "last_step": self.last_step,
            "records": self.records,
            "damaged_lines": self.damaged,
            "worst": self.worst,
            "layers": [_finite(asdict(layer)) for layer in self.layers],
            "alarms": [{"step": step, **alarm.to_dict()} for step, alarm in self.alarms],
        }


def summarise(records: Sequence[Record], damaged: int = 0) -> Run:
    """A run from its records, in order of steps; at least one."""
    layers = dict.fromkeys(name for record in records for name in record.layers)
    alarms = [(record.step, alarm) for record in records for alarm in record.alarms]
    runs = [_layer_run(name, [record for record in records if name in record.layers]) for name in layers]
    return Run(records[0].step, records[-1].step, len(records), damaged, runs, alarms)


def _layer_run(name: str, records: Sequence[Record]) -> LayerRun:
    maxima = [record.layers[name].whole("max") for record in records]
    found = growth([record.step for record in records[-WINDOW:]], maxima[-WINDOW:])
    threshold = next_threshold(maxima[-1])
    crossing = found.passes(threshold) if found is not None and found.is_growing and threshold is not None else None
    last = records[-1].layers[name]
    bounds = [record.layers[name].whole("max_bound") for record in records[-WINDOW:]]
    ceiling = Ceiling(last.softcap, growth([record.step for record in records[-WINDOW:]], bounds))
    crossing = crossing if crossing is not None and ceiling.allows(crossing) else None
    numbers = {number: last.whole(number) for number in NUMBERS if number in last.numbers}
    known = [value for value in maxima if not math.isnan(value)]
    return LayerRun(name, maxima[0], maxima[-1], max(known, default=math.nan), numbers, found, crossing)


def _finite(plain: Any) -> Any:
    """The same with None for a number that JSON has no word for."""
    if isinstance(plain, dict):
        return {key: _finite(value) for key, value in plain.items()}
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain
