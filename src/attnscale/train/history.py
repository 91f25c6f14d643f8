"""History of a monitor: scores and losses of earlier samples, the first numbers of each layer, and active alarms."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

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
from attnscale.diagnose.forecast import Growth, Trend
from attnscale.measure.statistics import STATISTICS
from attnscale.measure.stats import ScoreStats
from attnscale.train.record import LayerRecord

FACTORS = ("scale_applied", "query_norm", "key_norm", "alignment")
LOSSES = 128  # number of losses used to detect a divergence: the first and the latest
WINDOW = 32  # latest samples used to fit a growth, which changes with the learning rate


class Sample(NamedTuple):
    """Largest effective score of a layer at a step, its upper bound, and the factor that clipping applied."""

    step: int
    largest: float
    bound: float
    lowered: float = 1.0

    @classmethod
    def of(cls, step: int, layer: LayerRecord) -> "Sample":
        """Return the sample of a record."""
        return cls(step, layer.effective_max[0], layer.whole("max_bound"), layer.lowered)


def append(samples: list[Sample], sample: Sample) -> None:
    """Add a sample; remove earlier samples from its step on, because a resumed run repeats them."""
    while samples and samples[-1].step >= sample.step:
        samples.pop()
    samples.append(sample)
    del samples[:-WINDOW]


def trend(samples: Sequence[Sample], softcap: float | None) -> Trend:
    """Return the trend of samples in order of steps, under the soft-cap of the layer."""
    steps, largest, bounds, lowered = zip(*samples, strict=True) if samples else ((), (), (), ())
    if any(factor < 1 for factor in lowered):
        since = [1.0]  # product of the clipping factors after each sample
        for factor in reversed(lowered[1:]):
            since.append(since[-1] * factor)
        largest, bounds = (tuple(map(operator.mul, each, reversed(since))) for each in (largest, bounds))
    return Trend(steps, largest, bounds, softcap, is_held(samples))


def is_held(samples: Sequence[Sample]) -> bool:
    """Return True if QK-Clip acted on the last sample, or on earlier scores that were at least as large."""
    clipped = [index for index, sample in enumerate(samples) if sample.lowered < 1]
    if not clipped:
        return False
    clipped_at = max(sample.largest for index in clipped for sample in samples[max(0, index - 1) : index + 1])
    return clipped[-1] == len(samples) - 1 or samples[-1].largest <= clipped_at


@dataclass
class LayerHistory:
    """Stored numbers of one layer."""

    samples: list[Sample] = field(default_factory=list)  # latest samples
    first: list[float] = field(default_factory=list)  # logarithms of FACTORS at its first step
    baseline: Baseline | None = None  # numbers at the first sampled step of a trained model
    scale_error: ScaleError | None = None
    standing: dict[str, int] = field(default_factory=dict)  # first step of each reason of its active alarm

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "LayerHistory":
        """Create it from the result of dataclasses.asdict(), also after a round trip through JSON."""
        baseline, error = state["baseline"], state["scale_error"]
        return cls(
            [Sample(*sample) for sample in state["samples"]],
            list(state["first"]),
            None if baseline is None else Baseline(**baseline),
            None if error is None else ScaleError(**error),
            dict(state["standing"]),
        )


class History:
    """Largest score of every layer over time, the first numbers of each layer, losses, and active alarms.

    If the model was already `trained`, each layer is compared with its numbers at its first sampled step.
    """

    def __init__(self, limits: Thresholds, trained: bool = False) -> None:
        self.limits, self.trained = limits, trained
        self._layers: dict[str, LayerHistory] = {}
        self._losses: list[float] = []
        self._loss_diverges = False

    @property
    def is_empty(self) -> bool:
        """True before the first sampled step of a run."""
        return not self._layers

    @property
    def is_calm(self) -> bool:
        """True if no alarm is active."""
        return not self._loss_diverges and not any(layer.standing for layer in self._layers.values())

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
        """Add a sampled step, and return the new alarms.

        `stats` gives the standard errors of sampled numbers. `audit` has findings about the first step, which become
        its alarms, and `scale_errors` has the layers with a wrong scale among them. `rescaled` has the sides of each
        layer, query or key, that pass a norm or a temperature after their projection.
        """
        new = list(audit)
        audited = {finding.layer for finding in new}  # a further alarm of these layers would only be a symptom
        snapshots = []
        for name, layer in layers.items():
            known = self._layers.setdefault(name, LayerHistory())
            known.scale_error = scale_errors.get(name, known.scale_error)
            append(known.samples, Sample.of(step, layer))
            entropy, trace = layer.whole("entropy_ratio"), layer.whole("jacobian_trace")
            if not known.first and self.trained:
                known.baseline = Baseline(layer.effective_max[0], entropy, trace)
            if not known.first or not all(map(math.isfinite, known.first)):  # a factor was unknown
                known.first = _factors(layer)
            snapshot = LayerSnapshot(
                name,
                *layer.effective_max,
                entropy,
                trace,
                layer.broken,
                trend(known.samples, layer.softcap),
                partial(_error, stats.get(name)),
                partial(_change, known.first, layer),
                known.baseline,
                layer.clipped is not None,
                layer.numbers["max"][layer.effective_max[1]],
                step,
                known.scale_error,
                rescaled.get(name, ()),
            )
            snapshots.append(snapshot)
            alarm, known.standing = layer_alarm(snapshot, self.limits, known.standing)
            if alarm is not None and name not in audited:
                new.append(alarm)
        if loss is not None and self.limits.loss:
            new += self._loss_alarms(step, loss, snapshots)
        return new

    def growth(self, layer: str) -> Growth | None:
        """Return the growth of a layer's largest score over the latest samples."""
        return trend(self._layers[layer].samples, None).growth if layer in self._layers else None

    def state_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers, for a checkpoint."""
        layers = {name: asdict(layer) for name, layer in self._layers.items()}
        for layer in layers.values():
            layer["samples"] = list(map(list, layer["samples"]))
        return {
            "layers": layers,
            "losses": list(self._losses),
            "loss_diverges": self._loss_diverges,
            "trained": self.trained,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of state_dict(), also after a round trip through JSON."""
        self._layers = {name: LayerHistory.from_dict(layer) for name, layer in state.get("layers", {}).items()}
        self._losses, self.trained = list(map(float, state.get("losses", ()))), bool(state.get("trained", self.trained))
        self._loss_diverges = bool(state.get("loss_diverges", False))

    def _loss_alarms(self, step: int, loss: float, layers: list[LayerSnapshot]) -> list[Finding]:
        """Return the alarm of a loss that diverges while no layer has an alarm or a wrong scale."""
        self._losses.append(loss)
        del self._losses[1 : len(self._losses) - LOSSES]
        level, was_standing = diverged_from(self._losses), self._loss_diverges
        is_healthy = not any(layer.standing or layer.scale_error for layer in self._layers.values())
        self._loss_diverges = level is not None and (was_standing or is_healthy)
        if level is None or was_standing or not is_healthy:
            return []
        return [loss_alarm(loss, level, step, layers)]


def _change(first: list[float], layer: LayerRecord) -> Change:
    return Change(*(now - then for now, then in zip(_factors(layer), first, strict=True)))


def _error(stats: ScoreStats | None, name: str) -> float:
    """Return the standard error of a layer's statistic; 0 if every row was measured or the error is unknown."""
    error = 0.0 if stats is None else STATISTICS[name].error(stats)
    return error if math.isfinite(error) else 0.0


def _factors(layer: LayerRecord) -> list[float]:
    """Return the logarithms of the means of FACTORS; their sum is about the logarithm of the size of the scores."""
    return [math.log(max(layer.whole(name), 1e-300)) for name in FACTORS]
