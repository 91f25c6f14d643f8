"""History: what a monitor remembers between sampled steps, to tell growth, its cause, and which alarms are new."""

import math
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn

from attnscale.diagnose.alarm import Began, Thresholds, Vital, raised, stands
from attnscale.diagnose.cause import Change
from attnscale.diagnose.finding import Finding
from attnscale.diagnose.forecast import Ceiling
from attnscale.diagnose.growth import Growth
from attnscale.diagnose.trained import is_trained
from attnscale.measure.statistics import STATISTICS
from attnscale.measure.stats import ScoreStats
from attnscale.train.record import LayerRecord
from attnscale.train.trend import Sample, aheads, append, trend

FACTORS = ("scale", "query_norm", "key_norm", "alignment")


class History:
    """The largest score of every layer over time, where each layer began, and the alarms that stand.

    Of a model that came `trained`, each layer is judged by what it was like when it was first seen.
    """

    def __init__(self, limits: Thresholds, trained: bool = False) -> None:
        self.limits, self.trained = limits, trained
        self._series: dict[str, list[Sample]] = {}
        self._began: dict[str, list[float]] = {}  # logarithms of FACTORS
        self._baseline: dict[str, Began] = {}  # of a trained model
        self._standing: set[tuple[str, str]] = set()  # layer and reason

    @classmethod
    def of(cls, model: nn.Module, limits: Thresholds) -> "History":
        """That of a model, trained or not, before its first step."""
        return cls(limits, is_trained(model))

    def add(
        self, step: int, layers: dict[str, LayerRecord], seen: Mapping[str, ScoreStats] = MappingProxyType({})
    ) -> list[Finding]:
        """Remember a sampled step; the alarms that were not standing before.

        `seen` are the statistics of the layers, which know how far sampled numbers may be off.
        """
        new = []
        for name, layer in layers.items():
            append(self._series.setdefault(name, []), Sample.of(step, layer))
        trends = {name: trend(self._series[name], layer.softcap) for name, layer in layers.items()}
        outlooks = aheads(trends)
        for name, layer in layers.items():
            if name not in self._began and self.trained:
                self._baseline[name] = Began(
                    layer.effective_max[0], layer.whole("entropy_ratio"), layer.whole("gradient_gain")
                )
            if not all(map(math.isfinite, self._began.get(name, [math.nan]))):  # of a call that was not followed
                self._began[name] = _factors(layer)
            ahead, vital = outlooks[name], self._vital(name, layer, trends[name].ceiling, seen.get(name))
            before = {reason for place, reason in self._standing if place == name}
            after = {reason for reason in before if stands(reason, vital, ahead, self.limits)}
            for alarm in raised(vital, ahead, self.limits):
                new += [] if before.issuperset(alarm.reasons) else [alarm.finding]
                after.update(alarm.reasons)
            self._standing = {entry for entry in self._standing if entry[0] != name}
            self._standing |= {(name, reason) for reason in after}
        return new

    def growth(self, layer: str) -> Growth | None:
        """The growth of a layer's largest score over the latest samples."""
        return trend(self._series.get(layer, []), None).growth

    def state_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for a checkpoint."""
        return {
            "series": {name: [list(entry) for entry in series] for name, series in self._series.items()},
            "began": {name: list(factors) for name, factors in self._began.items()},
            "baseline": {name: list(vars(began).values()) for name, began in self._baseline.items()},
            "standing": [list(key) for key in sorted(self._standing)],
            "trained": self.trained,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What state_dict() gave, also by way of JSON."""
        self._series = {name: [_sample(*entry) for entry in entries] for name, entries in state["series"].items()}
        self._began = {name: [float(factor) for factor in factors] for name, factors in state["began"].items()}
        self._baseline = {name: Began(*map(float, numbers)) for name, numbers in state.get("baseline", {}).items()}
        self._standing = {(key[0], key[1]) for key in state["standing"] if len(key) == 2}
        self.trained = bool(state.get("trained", self.trained))

    def _vital(self, name: str, layer: LayerRecord, ceiling: Ceiling, seen: ScoreStats | None) -> Vital:
        largest, head = layer.effective_max
        return Vital(
            name,
            largest,
            head,
            layer.whole("entropy_ratio"),
            layer.whole("gradient_gain"),
            layer.broken,
            ceiling,
            partial(_error, seen),
            partial(_change, self._began[name], layer),
            self._baseline.get(name),
            layer.clipped is not None,
            layer.numbers["max"][head],
        )


def _change(began: list[float], layer: LayerRecord) -> Change:
    return Change(*(now - then for now, then in zip(_factors(layer), began, strict=True)))


def _sample(step: float, largest: float, bound: float = math.nan, lowered: float = 1.0) -> Sample:
    return Sample(int(step), float(largest), float(bound), float(lowered))


def _error(stats: ScoreStats | None, name: str) -> float:
    """Standard error of a number of a layer; 0 where every row was looked at, and where it is not known."""
    error = 0.0 if stats is None else STATISTICS[name].error(stats)
    return error if math.isfinite(error) else 0.0


def _factors(layer: LayerRecord) -> list[float]:
    """Logarithms of the means of FACTORS; their sum is, but for the spread of heads, that of the scores."""
    return [math.log(max(layer.whole(name), 1e-300)) for name in FACTORS]
