"""Raise alarms in a training run when the scores of a layer, or the loss, cross a published threshold.

A layer has one alarm at a time; a second alarm follows only when the layer gets worse. A trained model is compared with
its first sampled step: its numbers count as normal, and an alarm reports numbers that became worse since.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from attnscale.diagnose.cause import Change
from attnscale.diagnose.finding import Finding, severity_rank
from attnscale.diagnose.forecast import MAD_TO_STD, Trend
from attnscale.diagnose.scores import DEAD_GAIN, EXPLODING, threshold_reached
from attnscale.measure.uncertainty import NORMAL
from attnscale.plain import readable

# Mean row entropy of a layer, divided by ln n. Training becomes unstable when entropy collapses (Zhai et al. 2023,
# arXiv:2303.06296); the paper gives no threshold. At 0.05 a row of 1,024 keys attends to 1.4 of them.
ENTROPY_FLOOR = 0.05
HARMFUL = 1e3  # a forecast raises an alarm only for this threshold and higher ones: losses deteriorate here
NO_SAMPLES = Trend((), (), ())
WORSE = 1.25  # a trained model got worse if a number exceeds its baseline by this factor
GROWN = 0.1  # a factor whose logarithm grew by less is not the cause
OVER = 2.0  # an alarm ends when its number is back on the good side of the threshold by this factor
FLOORS = {
    "entropy_ratio": "Mean row entropy is {:.2g}% of its maximum (alarm below {:g}%).",
    "jacobian_trace": "The softmax passes {:.2g}% of the gradient (alarm below {:g}%).",
}
# Seriousness of each reason for an alarm; scores that explode are more serious than the sharp rows that they cause.
RANKS = {
    "reached 100": 0.0, "entropy_ratio": 1.0, "jacobian_trace": 1.0, "ahead 1000": 1.5, "ahead 10000": 1.5,
    "reached 1000": 1.5, "reached 10000": 2.0, "non_finite": 2.0,
}  # fmt: skip
# A loss diverges when this many consecutive samples exceed its lowest level by all three: this many standard deviations
# of its noise, this share of the loss that training had gained, and this share of the level itself.
LOSS_SAMPLES, LOSS_NOISE, LOSS_GAIN, LOSS_LEVEL = 3, 8.0, 0.5, 0.5


@dataclass(frozen=True)
class Thresholds:
    """Limits at which alarms are raised; None disables a limit."""

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
    correction: float  # right multiplier / applied multiplier


@dataclass(frozen=True)
class LayerSnapshot:
    """Numbers of one layer at one sampled step."""

    layer: str
    max: float  # largest score, without a shift of the whole row
    max_head: int
    entropy_ratio: float  # mean over heads, as is jacobian_trace
    jacobian_trace: float
    broken_heads: int  # number of heads with NaN or infinite scores
    trend: Trend = NO_SAMPLES
    error: Callable[[str], float] = lambda name: 0.0  # standard error of a mean; 0 if all rows were measured
    change: Callable[[], Change | None] = lambda: None  # since the first sampled step
    baseline: Baseline | None = None  # None for a model that is not trained
    is_clipped: bool = False  # QK-Clip acts on this layer
    largest: float = math.nan  # largest score with the shift of its row, if that is larger than `max`
    step: int = 0
    scale_error: ScaleError | None = None
    rescaled: tuple[str, ...] = ()  # "queries", "keys": sides with a norm or temperature after the projection

    @property
    def largest_score(self) -> str:
        """Largest score and its step, with its height above the row mean if that is less serious."""
        largest = self.max if math.isnan(self.largest) else self.largest
        is_shifted = threshold_reached(largest) != threshold_reached(self.max)
        height = f", {readable(self.max, 4)} above the mean of its row," if is_shifted else ""
        return f"{readable(largest, 4)}{height} at step {self.step:,}"


@dataclass(frozen=True)
class Reason:
    """One reason for an alarm. `name` identifies it at later steps: `reached 100`, `ahead 1000`, `entropy_ratio`."""

    name: str
    code: str
    severity: str
    sentence: str
    measured: float | None = None
    expected: float | None = None


def layer_alarm(
    snapshot: LayerSnapshot, limits: Thresholds, standing: Mapping[str, int]
) -> tuple[Finding | None, dict[str, int]]:
    """Return the alarm of a layer at a step, and the active reasons, each with the step at which it began.

    `standing` holds the reasons that were active before. One alarm lists all reasons of a layer. A new alarm is raised
    only when the layer gets worse: entropy that falls because scores explode is not a second alarm.
    """
    reasons = list(_reasons(snapshot, limits, standing))
    kept = {name: since for name, since in standing.items() if _is_active(name, snapshot, limits)}
    after = {reason.name: snapshot.step for reason in reasons} | kept
    rank = max((RANKS[reason.name] for reason in reasons), default=-1.0)
    if rank <= max((RANKS.get(name, 1.0) for name in kept), default=-1.0):
        return None, after
    severity, first = max((reason.severity for reason in reasons), key=severity_rank), reasons[0]
    head = snapshot.max_head if first.code == "exploding" else None
    grown, cause = _grown(snapshot)
    message = cause + " ".join(reason.sentence for reason in reasons)
    numbers = first.measured, first.expected
    return Finding(snapshot.layer, head, first.code, severity, message, *numbers, _advice(snapshot, grown)), after


def _grown(snapshot: LayerSnapshot) -> tuple[str, str]:
    """Return the factor of the scores that grew most, and a sentence with all that grew; both empty if none grew.

    Norms that grew on a side that is rescaled after its projection may have grown by a gain or a temperature.
    """
    change = snapshot.change()
    factor = "" if change is None else change.grown_factor(GROWN)
    if change is None or not factor:
        return "", ""
    side, norm = max(("queries", change.query_norm), ("keys", change.key_norm), key=lambda found: found[1])
    is_rescaled = norm > GROWN and side in snapshot.rescaled
    factors = zip(("scale", "‖q‖", "‖k‖", "alignment"), vars(change).values(), strict=True)
    grown = sorted((found for found in factors if found[1] > GROWN), key=lambda found: -found[1])
    named = ", ".join(f"{name} × {readable(math.exp(growth))}" for name, growth in grown)
    after = f" ({' and '.join(snapshot.rescaled)} after their norm or temperature)" if is_rescaled else ""
    sentence = f"{named} since the first sampled step{after}. " if math.isfinite(change.total) else ""
    return "temperature" if factor == "norms" and is_rescaled else factor, sentence


def next_threshold(value: float, is_clipped: bool = False) -> float | None:
    """Return the first published threshold above a score; skip the threshold of QK-Clip if it is in use."""
    return min((limit for limit, _, _ in EXPLODING[: -1 if is_clipped else None] if limit > value), default=None)


def diverged_from(losses: Sequence[float]) -> float | None:
    """Return the lowest level of a diverging loss; None if the loss does not diverge.

    >>> diverged_from([10, 8, 7, 6, 5.5, 5.2, 5.1, 5.0, 4.9, 4.8, 9, 9.5, 10])
    4.9
    """
    if not losses or not math.isfinite(losses[-1]):
        return min((loss for loss in losses if math.isfinite(loss)), default=math.nan) if losses else None
    finite = [loss for loss in losses if math.isfinite(loss)]
    before, latest = finite[:-LOSS_SAMPLES], finite[-LOSS_SAMPLES:]
    if len(before) < LOSS_SAMPLES:
        return None
    level = min(median(before[at : at + LOSS_SAMPLES]) for at in range(len(before) - LOSS_SAMPLES + 1))
    noise = MAD_TO_STD * median(abs(after - one) for one, after in pairwise(before)) / math.sqrt(2)
    margin = max(LOSS_NOISE * noise, LOSS_GAIN * (finite[0] - level), LOSS_LEVEL * abs(level))
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


def _reasons(snapshot: LayerSnapshot, limits: Thresholds, standing: Mapping[str, int]) -> Iterator[Reason]:
    """Yield the reasons for an alarm now, and the reasons that a forecast predicts.

    If the multiplier is wrong, only scores that would be too large at the right scale count.
    """
    if snapshot.broken_heads:
        sentence = f"{snapshot.broken_heads} heads have scores that are NaN or infinite at step {snapshot.step:,}."
        yield Reason("non_finite", "non_finite", "error", sentence)
        return
    error = snapshot.scale_error
    reached = threshold_reached(snapshot.max * (1.0 if error is None else min(1.0, error.correction)))
    if reached is not None and _is_news(reached, snapshot):
        limit, severity, published = reached
        name = f"reached {limit:g}"
        since = standing.get(name, snapshot.step)
        passed = f"passed {limit:,.0f} at step {since:,} and " if since < snapshot.step else ""
        sentence = f"The largest score {passed}is {snapshot.largest_score}; {published}."
        yield Reason(name, "exploding", severity, sentence, snapshot.max, limit)
    if limits.forecast and error is None:
        yield from _forecast(snapshot, "It" if reached else f"The largest score, {snapshot.largest_score},")
    for name, sentence in FLOORS.items() if error is None else ():
        value, floor = getattr(snapshot, name), getattr(limits, name)
        if _is_below(snapshot, name, floor):
            yield Reason(name, "sharp", "warning", sentence.format(100 * value, 100 * floor), value, floor)


def _forecast(snapshot: LayerSnapshot, subject: str) -> Iterator[Reason]:
    crossing = snapshot.trend.passes(next_threshold(max(snapshot.max, HARMFUL / 2)))
    growth = None if crossing is None else snapshot.trend.growth
    if growth is None or crossing is None:
        return
    limit, _, published = next(entry for entry in EXPLODING if entry[0] == crossing.threshold)
    factor = f"{growth.factor:{'.3g' if growth.factor < 1000 else ',.0f'}}"
    sentence = (
        f"{subject} grew × {factor} in the last {growth.observed:,.0f} steps; if this goes on, it will pass "
        f"{limit:,.0f} {crossing}: {published}."
    )
    yield Reason(f"ahead {limit:g}", "exploding", "warning", sentence, snapshot.max, limit)


def _is_active(name: str, snapshot: LayerSnapshot, limits: Thresholds) -> bool:
    """Return True if a reason of an earlier alarm is still active."""
    kind, _, level = name.partition(" ")
    if kind == "reached":
        return snapshot.max * OVER >= float(level)
    if kind == "ahead":
        growth = snapshot.trend.growth
        return not snapshot.trend.is_clipped and growth is not None and growth.rate > 0
    if kind == "non_finite":
        return snapshot.broken_heads > 0
    floor = getattr(limits, kind, None)
    return floor is not None and getattr(snapshot, kind) < OVER * floor


def _is_news(reached: tuple[float, str, str], snapshot: LayerSnapshot) -> bool:
    """Return False if a trained model started as high, or if the threshold is that of QK-Clip and QK-Clip is in use."""
    if reached[1] == "note" and snapshot.is_clipped:
        return False
    return snapshot.baseline is None or not snapshot.max < WORSE * snapshot.baseline.max


def _is_below(snapshot: LayerSnapshot, name: str, floor: float | None) -> bool:
    value = getattr(snapshot, name)
    if floor is None or not value < floor:
        return False
    if snapshot.baseline is not None:
        floor = min(floor, getattr(snapshot.baseline, name) / WORSE)
    return bool(value + NORMAL * snapshot.error(name) < floor)


def _advice(snapshot: LayerSnapshot, grown: str) -> str:
    """Return advice against the factor that grew; do not advise a remedy that is already in use."""
    if snapshot.scale_error is not None:
        return f"The scale is wrong ({snapshot.scale_error.code}): correct it first, and start again."
    if snapshot.broken_heads:
        return "Stop, go back to the last checkpoint, and lower the learning rate or add a QK-norm."
    if grown == "multiplier":
        return "The scale has grown: bound it, or train it at a lower rate."
    if grown == "temperature":
        return "The gain of a norm, or a temperature, may have grown: bound it, or train it at a lower rate."
    if snapshot.is_clipped:
        return "QK-Clip is in use: apply it at every step, and lower the learning rate."
    if snapshot.trend.softcap is not None:
        return "Its soft-cap bounds the scores, not the queries and keys: lower the learning rate, or add a QK-norm."
    if grown == "alignment":
        return "Queries and keys have turned towards each other: lower the learning rate, or add a soft-cap."
    return "Lower the learning rate, or clip: attnscale.QKClip(model).attach(optimizer)."
