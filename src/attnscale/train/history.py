"""History: what a monitor remembers between sampled steps, to tell growth, its cause, and which alarms are new."""

import math
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from attnscale.diagnose.alarm import Thresholds, Vital, alarms
from attnscale.diagnose.cause import Change
from attnscale.diagnose.finding import Finding
from attnscale.diagnose.forecast import Ceiling, Growth
from attnscale.measure.statistics import STATISTICS
from attnscale.measure.stats import ScoreStats
from attnscale.train.record import LayerRecord
from attnscale.train.trend import Sample, latest, trend

FACTORS = ("scale", "query_norm", "key_norm", "alignment")


class History:
    """The largest score of every layer over time, where each layer began, and the alarms that stand."""

    def __init__(self, limits: Thresholds) -> None:
        self.limits = limits
        self._series: dict[str, list[Sample]] = {}
        self._began: dict[str, list[float]] = {}  # logarithms of FACTORS
        self._standing: set[tuple[str, str, str]] = set()

    def add(
        self, step: int, layers: dict[str, LayerRecord], seen: Mapping[str, ScoreStats] = MappingProxyType({})
    ) -> list[Finding]:
        """Remember a sampled step; the alarms that were not standing before.

        `seen` are the statistics of the layers, which know how far sampled numbers may be off.
        """
        standing, new = set(), []
        for name, layer in layers.items():
            self._series[name] = latest([*self._series.get(name, ()), Sample.of(step, layer)])
            self._began.setdefault(name, _factors(layer))
            found = trend(self._series[name], layer.softcap)
            for alarm in alarms(self._vital(name, layer, found.ceiling, seen.get(name)), found.growth, self.limits):
                key = (name, alarm.code, f"{alarm.severity} {alarm.expected}")
                standing.add(key)
                if key not in self._standing:
                    new.append(alarm)
        self._standing = standing
        return new

    def growth(self, layer: str) -> Growth | None:
        """The growth of a layer's largest score over the latest samples."""
        return trend(self._series.get(layer, []), None).growth

    def state_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for a checkpoint."""
        return {
            "series": {name: [list(entry) for entry in series] for name, series in self._series.items()},
            "began": {name: list(factors) for name, factors in self._began.items()},
            "standing": [list(key) for key in sorted(self._standing)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What state_dict() gave, also by way of JSON."""
        self._series = {name: [_sample(*entry) for entry in entries] for name, entries in state["series"].items()}
        self._began = {name: [float(factor) for factor in factors] for name, factors in state["began"].items()}
        self._standing = {(layer, code, level) for layer, code, level in state["standing"]}

    def _vital(self, name: str, layer: LayerRecord, ceiling: Ceiling, seen: ScoreStats | None) -> Vital:
        largest = layer.numbers["max"]
        known = [head for head, value in enumerate(largest) if not math.isnan(value)]
        change = Change(*(now - then for now, then in zip(_factors(layer), self._began[name], strict=True)))
        return Vital(
            name,
            layer.whole("max"),
            max(known, key=lambda head: largest[head], default=0),
            layer.whole("entropy_ratio"),
            layer.whole("gradient_gain"),
            layer.broken,
            "" if not math.isfinite(change.total) else f"Since it was first seen: {change}.",
            ceiling,
            partial(_error, seen),
        )


def _sample(step: float, largest: float, bound: float = math.nan, lowered: float = 1.0) -> Sample:
    return Sample(int(step), float(largest), float(bound), float(lowered))


def _error(stats: ScoreStats | None, name: str) -> float:
    """Standard error of a number of a layer; 0 where every row was looked at, and where it is not known."""
    error = 0.0 if stats is None else STATISTICS[name].error(stats)
    return error if math.isfinite(error) else 0.0


def _factors(layer: LayerRecord) -> list[float]:
    """Logarithms of the means of FACTORS; their sum is, but for the spread of heads, that of the scores."""
    return [math.log(max(layer.whole(name), 1e-300)) for name in FACTORS]
