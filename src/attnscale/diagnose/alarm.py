"""Alarms of a training run: numbers of a layer, and losses, become findings by thresholds with a published meaning.

A layer has at most one alarm of a code at a step. A trained model is compared with its first sampled step: the numbers
it had then are normal for it, and an alarm is what has become worse since.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from attnscale.diagnose.cause import Change
from attnscale.diagnose.finding import SEVERITIES, Finding
from attnscale.diagnose.forecast import MAD_TO_STD, Ceiling, Crossing, Outlook, forecast
from attnscale.diagnose.scores import DEAD_GAIN, EXPLODING, threshold_reached
from attnscale.measure.uncertainty import NORMAL
from attnscale.plain import readable

# Of ln n, mean of a layer. Runs whose attention entropy collapsed are those that became unstable (Zhai et al. 2023,
# arXiv:2303.06296); they name no number. At 0.05 a row of 1,024 keys looks at 1.4 of them.
ENTROPY_FLOOR = 0.05
HARMFUL = 1e3  # forecasts are alarms from the threshold on at which losses deteriorate
WORSE = 1.25  # times the baseline of a trained model: less is no change
GROWN = 0.1  # of a logarithm: a factor that grew by less is not the cause
OVER = 2.0  # times a threshold or a floor: an alarm is over when its number is as far on the other side
FLOORS = {
    "entropy_ratio": "Mean row entropy is {:.2g}% of its maximum (alarm below {:g}%).",
    "jacobian_trace": "The softmax passes {:.2g}% of the gradient (alarm below {:g}%).",
}
# A loss diverges when this many samples in a row lie above the lowest level it had by all of: so many standard
# deviations of its noise, this share of what training had gained, and this share of the level itself.
LOSS_SAMPLES, LOSS_NOISE, LOSS_GAIN, LOSS_LEVEL = 3, 8.0, 0.5, 0.5


@dataclass(frozen=True)
class Thresholds:
    """When to raise an alarm; a limit of None raises none."""

    entropy_ratio: float | None = ENTROPY_FLOOR
    jacobian_trace: float | None = DEAD_GAIN
    forecast: bool = True
    loss: bool = True


@dataclass(frozen=True)
class Baseline:
    """The numbers of a layer of a trained model at its first sampled step."""

    max: float
    entropy_ratio: float
    jacobian_trace: float


@dataclass(frozen=True)
class ScaleError:
    """A wrong multiplier that the audit of the first sampled step found in a layer."""

    code: str
    correction: float  # factor that takes the multiplier to what it should be


@dataclass(frozen=True)
class LayerSnapshot:
    """Numbers of one layer at one step, by which alarms are raised."""

    layer: str
    max: float  # largest score as far as softmax sees it
    max_head: int
    entropy_ratio: float  # means of its heads
    jacobian_trace: float
    broken_heads: int  # with scores that are NaN or infinite
    ceiling: Ceiling = field(default_factory=Ceiling)
    error: Callable[[str], float] = lambda name: 0.0  # standard error of one of its means, where rows were sampled
    change: Callable[[], Change | None] = lambda: None  # of the factors of its scores since the first sampled step
    baseline: Baseline | None = None  # of a trained model
    is_clipped: bool = False  # by QK-Clip
    largest: float = math.nan  # the score itself, where softmax sees less of it
    step: int | None = None
    scale_error: ScaleError | None = None
    rescaled: tuple[str, ...] = ()  # "queries", "keys": normalised, or given a temperature, after their projection

    @property
    def cause(self) -> str:
        """A sentence that says how the factors of the scores changed; empty where none grew, or it is not known."""
        change = self.change()
        if change is None or not math.isfinite(change.total) or not self.grown_factor:
            return ""
        after = f" (of {' and '.join(self.rescaled)} after their norm or temperature)" if self._is_rescaled else ""
        return f"Since the first sampled step: {change}{after}. "

    @property
    def grown_factor(self) -> str:
        """The factor that grew most: `multiplier`, `norms`, `temperature` or `alignment`; empty where none did."""
        change = self.change()
        if change is None:
            return ""
        grown = {
            "multiplier": change.multiplier, "norms": change.query_norm + change.key_norm, "alignment": change.alignment
        }  # fmt: skip
        name = max(grown, key=lambda factor: grown[factor] if math.isfinite(grown[factor]) else -math.inf)
        return "" if grown[name] <= GROWN else "temperature" if name == "norms" and self._is_rescaled else name

    @property
    def _is_rescaled(self) -> bool:
        """True if the side whose norm grew most is rescaled after its projection, which may be what grew."""
        change = self.change()
        if change is None or max(change.query_norm, change.key_norm) <= GROWN:
            return False
        return ("queries" if change.query_norm >= change.key_norm else "keys") in self.rescaled

    @property
    def largest_score(self) -> str:
        """The largest score in words: itself, and its height above the mean of its row where that is less serious."""
        if math.isnan(self.largest) or threshold_reached(self.largest) == threshold_reached(self.max):
            value = readable(self.max if math.isnan(self.largest) else self.largest, 4)
        else:
            value = f"{readable(self.largest, 4)}, and {readable(self.max, 4)} above the mean of its row"
        return value if self.step is None else f"{value} at step {self.step:,}"


@dataclass(frozen=True)
class Alarm:
    """A finding, and the reasons by which it is recognised at a later step."""

    finding: Finding
    reasons: tuple[str, ...]


def alarms(snapshot: LayerSnapshot, outlook: Outlook | None, limits: Thresholds) -> Iterator[Finding]:
    """Yield what is wrong with one layer now, and what will be if its growth goes on."""
    return (alarm.finding for alarm in alarms_with_reasons(snapshot, outlook, limits))


def alarms_with_reasons(snapshot: LayerSnapshot, outlook: Outlook | None, limits: Thresholds) -> Iterator[Alarm]:
    """Yield the alarms of one layer with their reasons, at most one of a code.

    Where its multiplier is wrong, only scores that would be too large under the right one as well raise an alarm.
    """
    if snapshot.broken_heads:
        message = f"{snapshot.broken_heads} heads have scores that are NaN or infinite{_at(snapshot.step)}."
        advice = "Stop, go back to the last checkpoint, and lower the learning rate or add a QK-norm."
        if snapshot.scale_error is not None:
            advice = f"The scale is wrong ({snapshot.scale_error.code}): correct it and start again."
        yield Alarm(Finding(snapshot.layer, None, "non_finite", "error", message, None, None, advice), ("non_finite",))
        return
    yield from _exploding(snapshot, outlook if limits.forecast and snapshot.scale_error is None else None)
    if snapshot.scale_error is None:
        yield from _sharp(snapshot, limits)


def is_standing(reason: str, snapshot: LayerSnapshot, outlook: Outlook | None, limits: Thresholds) -> bool:
    """Return True if an alarm of an earlier step is not over, though it may not be raised now."""
    kind, _, level = reason.partition(" ")
    if kind == "reached":
        return snapshot.max * OVER >= float(level)
    if kind == "ahead":
        return outlook is not None and outlook.rate > 0
    floor = getattr(limits, kind, None)
    return floor is not None and getattr(snapshot, kind) < OVER * floor


def next_threshold(value: float, is_clipped: bool = False) -> float | None:
    """Return the first published threshold above a score, without the one where QK-Clip acts if it is in use."""
    return min((limit for limit, _, _ in EXPLODING[: -1 if is_clipped else None] if limit > value), default=None)


def diverged_from(losses: Sequence[float]) -> float | None:
    """Return the lowest level of a loss that diverges; None where it does not.

    >>> diverged_from([10, 8, 7, 6, 5.5, 5.2, 5.1, 5.0, 4.9, 4.8, 9, 9.5, 10])
    4.9
    """
    if not losses or not math.isfinite(losses[-1]):
        return min((loss for loss in losses if math.isfinite(loss)), default=math.nan) if losses else None
    known = [loss for loss in losses if math.isfinite(loss)]
    before, latest = known[:-LOSS_SAMPLES], known[-LOSS_SAMPLES:]
    if len(before) < LOSS_SAMPLES:
        return None
    level = min(median(before[at : at + LOSS_SAMPLES]) for at in range(len(before) - LOSS_SAMPLES + 1))
    noise = MAD_TO_STD * median(abs(after - one) for one, after in pairwise(before)) / math.sqrt(2)
    margin = max(LOSS_NOISE * noise, LOSS_GAIN * (known[0] - level), LOSS_LEVEL * abs(level))
    return level if min(latest) > level + margin else None


def loss_alarm(loss: float, level: float, step: int, layers: Sequence[LayerSnapshot]) -> Finding:
    """Return the alarm of a loss that diverges while the scores of all layers are in range."""
    largest = max((each.max for each in layers if math.isfinite(each.max)), default=math.nan)
    entropy = min((each.entropy_ratio for each in layers if math.isfinite(each.entropy_ratio)), default=math.nan)
    value = "NaN" if math.isnan(loss) else readable(loss, 4)
    now = f"{value} at step {step:,}{'' if math.isnan(level) else f', from {readable(level, 4)} before'}"
    return Finding(
        "",
        None,
        "loss_diverges",
        "error",
        f"The loss diverges, and attention is not the cause. The loss is {now}; the scores are in range: the largest "
        f"is {readable(largest, 4)}, and mean row entropy at least {100 * entropy:.2g}% of its maximum.",
        loss if math.isfinite(loss) else None,
        None if math.isnan(level) else level,
        "Look elsewhere: at the learning rate, the data, the loss and its precision, or activations outside attention.",
    )


def when(crossing: Crossing) -> str:
    """Return in words when a threshold is passed."""
    return f"about step {crossing.step:.0f} and not before {crossing.earliest:.0f}"


def _exploding(snapshot: LayerSnapshot, outlook: Outlook | None) -> Iterator[Alarm]:
    """Yield one alarm for a threshold that is passed and for the next one, if it is forecast."""
    sentences, severities, reasons, limits = [], [], [], []
    error, corrected = snapshot.scale_error, snapshot.max
    if error is not None:
        corrected *= min(1.0, error.correction)
    reached = threshold_reached(corrected)
    if reached is not None and _is_news(reached, snapshot):
        limit, severity, known = reached
        sentences.append(f"The largest score is {snapshot.largest_score}; {known}.")
        severities, reasons, limits = [severity], [f"reached {limit:g}"], [limit]
    crossing = forecast(outlook, snapshot.ceiling, next_threshold(max(snapshot.max, HARMFUL / 2)))
    if crossing is not None and outlook is not None:
        known = next(known for threshold, _, known in EXPLODING if threshold == crossing.threshold)
        factor = math.exp(min(outlook.rate * outlook.observed, 700.0))
        subject = "It" if sentences else f"The largest score, {snapshot.largest_score},"
        sentences.append(
            f"{subject} grew {factor:{'.3g' if factor < 1000 else ',.0f'}}-fold in the last {outlook.observed:,.0f} "
            f"steps; if this goes on, it will pass {crossing.threshold:,.0f} {when(crossing)}. "
            f"{known[0].upper()}{known[1:]}."
        )
        severities.append("warning")
        reasons.append(f"ahead {crossing.threshold:g}")
        limits.append(crossing.threshold)
    if sentences:
        severity = max(severities, key=SEVERITIES.index)
        message, head = f"{snapshot.cause}{' '.join(sentences)}", snapshot.max_head
        numbers = snapshot.max, limits[-1]
        yield Alarm(
            Finding(snapshot.layer, head, "exploding", severity, message, *numbers, _advice(snapshot)), tuple(reasons)
        )


def _is_news(reached: tuple[float, str, str], snapshot: LayerSnapshot) -> bool:
    """Return False where a trained model was as high from the start, or QK-Clip would act and does."""
    if reached[1] == "note" and snapshot.is_clipped:
        return False
    return snapshot.baseline is None or not snapshot.max < WORSE * snapshot.baseline.max


def _sharp(snapshot: LayerSnapshot, limits: Thresholds) -> Iterator[Alarm]:
    """Yield one alarm for entropy and gradient that are below their floors beyond doubt."""
    low = [name for name in FLOORS if _is_below(snapshot, name, getattr(limits, name))]
    if low:
        numbers = [(getattr(snapshot, name), getattr(limits, name)) for name in low]
        sentences = (
            FLOORS[name].format(100 * value, 100 * floor) for name, (value, floor) in zip(low, numbers, strict=True)
        )
        message = f"{snapshot.cause}{' '.join(sentences)}"
        yield Alarm(
            Finding(snapshot.layer, None, "sharp", "warning", message, *numbers[0], _advice(snapshot)), tuple(low)
        )


def _is_below(snapshot: LayerSnapshot, name: str, floor: float | None) -> bool:
    value = getattr(snapshot, name)
    if floor is None or not value < floor:
        return False
    if snapshot.baseline is not None:
        floor = min(floor, getattr(snapshot.baseline, name) / WORSE)
    return bool(value + NORMAL * snapshot.error(name) < floor)


def _advice(snapshot: LayerSnapshot) -> str:
    """Return what helps against the factor that grew, and is not in use yet."""
    grown = snapshot.grown_factor
    if snapshot.scale_error is not None:
        return f"The scale is wrong too ({snapshot.scale_error.code}): correct it first."
    if grown == "multiplier":
        return "The scale has grown: bound it, or train it at a lower rate."
    if grown == "temperature":
        return "The gain of a norm, or a temperature, may have grown: bound it, or train it at a lower rate."
    if snapshot.is_clipped:
        return "QK-Clip is at work on it: let it act at every step, and lower the learning rate."
    if snapshot.ceiling.softcap is not None:
        return "Its soft-cap bounds the scores and not what makes them: lower the learning rate, or add a QK-norm."
    if grown == "alignment":
        return "Queries and keys have turned towards each other: lower the learning rate, or add a soft-cap."
    return "Lower the learning rate, add a QK-norm, or clip the projections (QK-Clip at 100)."


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step:,}"
