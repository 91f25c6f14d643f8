"""History: what a monitor remembers between sampled steps: scores, losses, where each layer began, standing alarms."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from attnscale.diagnose.alarm import (
    Baseline,
    LayerSnapshot,
    ScaleError,
    Thresholds,
    diverged_from,
    layer_alarm,
    loss_alarm,
)
from attnscale.diagnose.cause import Change
from attnscale.diagnose.finding import Finding
from attnscale.diagnose.forecast import Ceiling, Growth, Outlook, growth, outlook
from attnscale.diagnose.trained import is_trained
from attnscale.measure.statistics import STATISTICS
from attnscale.measure.stats import ScoreStats
from attnscale.train.record import LayerRecord

FACTORS = ("scale_applied", "query_norm", "key_norm", "alignment")
LOSSES = 128  # the latest losses, and the first, by which a divergence is judged
WHOLE_RUN = ""  # in place of a layer, for the standing alarm of the loss
WINDOW = 32  # samples a growth is fitted to: the latest, since growth changes with the learning rate


class Sample(NamedTuple):
    """Largest score of a layer at a step as softmax sees it, its upper bound, and the factor that clipping applied."""

    step: int
    largest: float
    bound: float
    lowered: float = 1.0

    @classmethod
    def of(cls, step: int, layer: LayerRecord) -> "Sample":
        """Return the sample of a record."""
        return cls(step, layer.effective_max[0], layer.whole("max_bound"), layer.lowered)


@dataclass(frozen=True)
class Trend:
    """Growth and forecast of the largest score, None where there are too few samples, and what limits it."""

    steps: Sequence[int]
    largest: Sequence[float]
    bounds: Sequence[float]
    softcap: float | None
    is_clipped: bool

    @cached_property
    def growth(self) -> Growth | None:
        """Growth of the largest score."""
        return growth(self.steps, self.largest)

    @cached_property
    def ahead(self) -> Outlook | None:
        """Forecast of the largest score; none while QK-Clip holds it."""
        return None if self.is_clipped else outlook(self.steps, self.largest)

    @property
    def ceiling(self) -> Ceiling:
        """Limits of the largest score."""
        return Ceiling(self.softcap, lambda: outlook(self.steps, self.bounds), self.is_clipped)


def append(samples: list[Sample], sample: Sample) -> None:
    """Add a sample to the latest ones, in place of those that a resumed run repeats."""
    while samples and samples[-1].step >= sample.step:
        samples.pop()
    samples.append(sample)
    del samples[:-WINDOW]


def latest(samples: Iterable[Sample]) -> list[Sample]:
    """Return the latest samples in order of steps."""
    found: list[Sample] = []
    for sample in samples:
        append(found, sample)
    return found


def trend(samples: Sequence[Sample], softcap: float | None) -> Trend:
    """Return the trend of samples in order of steps, under the soft-cap of the layer."""
    steps, largest, bounds, lowered = zip(*samples, strict=True) if samples else ((), (), (), ())
    if any(factor < 1 for factor in lowered):
        since = [1.0]  # what clipping multiplied each sample by since then
        for factor in reversed(lowered[1:]):
            since.append(since[-1] * factor)
        largest, bounds = (tuple(map(operator.mul, each, reversed(since))) for each in (largest, bounds))
    return Trend(steps, largest, bounds, softcap, is_held(samples))


def is_held(samples: Sequence[Sample]) -> bool:
    """Return True if QK-Clip acted just now, or has acted on scores as large as the last."""
    clipped = [index for index, sample in enumerate(samples) if sample.lowered < 1]
    if not clipped:
        return False
    clipped_at = max(sample.largest for index in clipped for sample in samples[max(0, index - 1) : index + 1])
    return clipped[-1] == len(samples) - 1 or samples[-1].largest <= clipped_at


class History:
    """The largest score of every layer over time, the first numbers of each layer, losses, and standing alarms.

    Where the model was `trained` before, each layer is compared with its numbers at its first sampled step.
    """

    def __init__(self, limits: Thresholds, trained: bool = False) -> None:
        self.limits, self.trained = limits, trained
        self._series: dict[str, list[Sample]] = {}
        self._first: dict[str, list[float]] = {}  # logarithms of FACTORS
        self._baseline: dict[str, Baseline] = {}  # of a trained model
        self._scale_errors: dict[str, ScaleError] = {}
        self._standing: dict[str, dict[str, int]] = {}  # by layer: reasons of its alarm, and the step each began at
        self._losses: list[float] = []

    @classmethod
    def of(cls, model: nn.Module, limits: Thresholds) -> "History":
        """Return the history of a model, trained or not, before its first step."""
        return cls(limits, is_trained(model))

    @property
    def is_empty(self) -> bool:
        """True before the first sampled step of a run."""
        return not self._series

    @property
    def is_calm(self) -> bool:
        """True if no alarm stands."""
        return not self._standing

    def add(
        self,
        step: int,
        layers: Mapping[str, LayerRecord],
        stats: Mapping[str, ScoreStats] = MappingProxyType({}),
        *,
        loss: float | None = None,
        audit: Iterable[Finding] = (),
        scale_errors: Mapping[str, ScaleError] = MappingProxyType({}),
        rescaled: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> list[Finding]:
        """Add a sampled step, and return the alarms that were not standing before.

        `stats` tell the errors of sampled numbers. `audit` are findings about the step's forward, and alarms of the
        first step; `scale_errors` are the layers whose multiplier they accuse. `rescaled` are the sides of each layer
        that pass a norm or a temperature after their projection.
        """
        new = list(audit)
        audited = {finding.layer for finding in new}  # more about those would be a symptom
        self._scale_errors |= scale_errors
        snapshots = []
        for name, layer in layers.items():
            append(self._series.setdefault(name, []), Sample.of(step, layer))
            if name not in self._first and self.trained:
                self._baseline[name] = Baseline(
                    layer.effective_max[0], layer.whole("entropy_ratio"), layer.whole("jacobian_trace")
                )
            if not all(map(math.isfinite, self._first.get(name, [math.nan]))):  # of a call that was not followed
                self._first[name] = _factors(layer)
            found = trend(self._series[name], layer.softcap)
            snapshot = LayerSnapshot(
                name,
                *layer.effective_max,
                layer.whole("entropy_ratio"),
                layer.whole("jacobian_trace"),
                layer.broken,
                found.ceiling,
                partial(_error, stats.get(name)),
                partial(_change, self._first[name], layer),
                self._baseline.get(name),
                layer.clipped is not None,
                layer.numbers["max"][layer.effective_max[1]],
                step,
                self._scale_errors.get(name),
                rescaled.get(name, ()),
            )
            snapshots.append(snapshot)
            alarm, standing = layer_alarm(snapshot, found.ahead, self.limits, self._standing.pop(name, {}))
            if standing:
                self._standing[name] = standing
            if alarm is not None and name not in audited:
                new.append(alarm)
        return new + self._loss_alarms(step, loss, snapshots)

    def growth(self, layer: str) -> Growth | None:
        """Return the growth of a layer's largest score over the latest samples."""
        return trend(self._series.get(layer, []), None).growth

    def state_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers, for a checkpoint."""
        return {
            "series": {name: [list(entry) for entry in series] for name, series in self._series.items()},
            "began": {name: list(factors) for name, factors in self._first.items()},
            "baseline": {name: list(vars(baseline).values()) for name, baseline in self._baseline.items()},
            "scale_errors": {name: [error.code, error.correction] for name, error in self._scale_errors.items()},
            "standing": {layer: dict(reasons) for layer, reasons in self._standing.items()},
            "losses": list(self._losses),
            "trained": self.trained,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what state_dict() returned, also by way of JSON."""
        self._series = {
            name: [Sample(int(step), *map(float, numbers)) for step, *numbers in entries]
            for name, entries in state["series"].items()
        }
        self._first = {name: [float(factor) for factor in factors] for name, factors in state["began"].items()}
        self._baseline = {name: Baseline(*map(float, numbers)) for name, numbers in state.get("baseline", {}).items()}
        self._scale_errors = {
            name: ScaleError(str(code), float(factor)) for name, (code, factor) in state.get("scale_errors", {}).items()
        }
        self._standing = {layer: dict(reasons) for layer, reasons in dict(state["standing"]).items()}
        self._losses = [float(loss) for loss in state.get("losses", ())]
        self.trained = bool(state.get("trained", self.trained))

    def _loss_alarms(self, step: int, loss: float | None, layers: list[LayerSnapshot]) -> list[Finding]:
        """Return the alarm of a loss that diverges while no layer has an alarm or a wrong scale."""
        if loss is None or not self.limits.loss:
            return []
        self._losses.append(loss)
        del self._losses[1 : len(self._losses) - LOSSES]
        level = diverged_from(self._losses)
        was_standing = WHOLE_RUN in self._standing
        self._standing.pop(WHOLE_RUN, None)
        attention_is_healthy = not self._standing and not self._scale_errors
        if level is None or not (was_standing or attention_is_healthy):
            return []
        self._standing[WHOLE_RUN] = {"loss": step}
        return [] if was_standing else [loss_alarm(loss, level, step, layers)]


def _change(first: list[float], layer: LayerRecord) -> Change:
    return Change(*(now - then for now, then in zip(_factors(layer), first, strict=True)))


def _error(stats: ScoreStats | None, name: str) -> float:
    """Return the standard error of a number of a layer; 0 where every row was measured, or where it is not known."""
    error = 0.0 if stats is None else STATISTICS[name].error(stats)
    return error if math.isfinite(error) else 0.0


def _factors(layer: LayerRecord) -> list[float]:
    """Logarithms of the means of FACTORS; their sum is, but for the spread of heads, that of the scores."""
    return [math.log(max(layer.whole(name), 1e-300)) for name in FACTORS]
