"""Run: a log as a whole. How every layer began, where it is, how fast it grows, and where that leads."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attnscale.diagnose.alarm import next_threshold
from attnscale.diagnose.finding import Finding, worst
from attnscale.diagnose.forecast import Crossing, Growth, forecast
from attnscale.measure.statistics import logged
from attnscale.plain import plain
from attnscale.train.record import Record
from attnscale.train.trend import Sample, latest, trend


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
            "layers": [plain(asdict(layer)) for layer in self.layers],
            "alarms": [{"step": step, **alarm.to_dict()} for step, alarm in self.alarms],
        }


def summarise(records: Sequence[Record], damaged: int = 0) -> Run:
    """A run from its records, in order of steps; at least one."""
    layers = dict.fromkeys(name for record in records for name in record.layers)
    alarms = [(record.step, alarm) for record in records for alarm in record.alarms]
    runs = [_layer_run(name, [record for record in records if name in record.layers]) for name in layers]
    return Run(records[0].step, records[-1].step, len(records), damaged, runs, alarms)


def _layer_run(name: str, records: Sequence[Record]) -> LayerRun:
    samples = [Sample.of(record.step, record.layers[name]) for record in records]
    last = records[-1].layers[name]
    found = trend(latest(samples), last.softcap)
    first_max, last_max = samples[0].largest, samples[-1].largest
    highest = max((sample.largest for sample in samples if not math.isnan(sample.largest)), default=math.nan)
    numbers = {number: last.whole(number) for number in logged() if number in last.numbers}
    crossing = forecast(found.growth, found.ceiling, next_threshold(last_max))
    return LayerRun(name, first_max, last_max, highest, numbers, found.growth, crossing)
