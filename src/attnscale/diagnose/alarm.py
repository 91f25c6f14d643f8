"""Alarms of a training run: a layer's numbers at one step -> findings, by thresholds with a published meaning.

Of one layer and step there is at most one alarm of a code. A model that came trained is judged by where it began: what
it was like then is its nature, and an alarm is what became worse since.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from attnscale.diagnose.cause import Change
from attnscale.diagnose.finding import SEVERITIES, Finding
from attnscale.diagnose.forecast import Ceiling, Crossing, Outlook, forecast
from attnscale.diagnose.scores import DEAD_GAIN, EXPLODING, threshold_reached
from attnscale.measure.uncertainty import NORMAL
from attnscale.plain import readable

# Of ln n, mean of a layer. Runs whose attention entropy collapsed are those that became unstable (Zhai et al. 2023,
# arXiv:2303.06296); they name no number. At 0.05 a row of 1,024 keys looks at 1.4 of them.
ENTROPY_FLOOR = 0.05
HARMFUL = 1e3  # forecasts are alarms from the threshold on at which losses deteriorate
WORSE = 1.25  # times where a trained model began: less is no change
MOVED = 0.1  # of a logarithm: a factor that grew by less is not what moved
LAPSED = 2.0  # times a threshold or a floor: an alarm stands until its number is as far on the other side
FLOORS = {
    "entropy_ratio": "of ln n is the mean entropy of its rows",
    "gradient_gain": "of the gradient passes its softmax",
}


@dataclass(frozen=True)
class Thresholds:
    """When to raise an alarm; a limit of None is not looked at."""

    entropy_ratio: float | None = ENTROPY_FLOOR
    gradient_gain: float | None = DEAD_GAIN
    forecast: bool = True


@dataclass(frozen=True)
class Began:
    """The numbers of a layer of a trained model when it was first seen."""

    max: float
    entropy_ratio: float
    gradient_gain: float


@dataclass(frozen=True)
class Vital:
    """What alarms are raised by: of one layer, what softmax feels of its largest score, and the means of its heads."""

    layer: str
    max: float
    max_head: int
    entropy_ratio: float
    gradient_gain: float
    broken_heads: int  # with scores that are NaN or infinite
    ceiling: Ceiling = field(default_factory=Ceiling)
    error: Callable[[str], float] = lambda name: 0.0  # standard error of one of its means, where rows were sampled
    change: Callable[[], Change | None] = lambda: None  # of the factors of its scores since it was first seen
    began: Began | None = None  # of a trained model
    clips: bool = False  # QK-Clip is at work on it
    largest: float = math.nan  # the score itself, where softmax feels less of it

    @property
    def cause(self) -> str:
        """A sentence: which factor moved."""
        change = self.change()
        return "" if change is None or not math.isfinite(change.total) else f"Since it was first seen: {change}."

    @property
    def moved(self) -> str:
        """The factor that grew most since the beginning: `multiplier`, `norms`, `alignment`; empty where none did."""
        change = self.change()
        if change is None:
            return ""
        grown = {
            "multiplier": change.multiplier, "norms": change.query_norm + change.key_norm, "alignment": change.alignment
        }  # fmt: skip
        name = max(grown, key=lambda factor: grown[factor] if math.isfinite(grown[factor]) else -math.inf)
        return name if grown[name] > MOVED else ""

    @property
    def told(self) -> str:
        """The largest score in words: as it is, and what softmax feels of it where that makes a difference."""
        if math.isnan(self.largest) or threshold_reached(self.largest) == threshold_reached(self.max):
            return readable(self.max if math.isnan(self.largest) else self.largest, 4)
        return f"{readable(self.largest, 4)}, and {readable(self.max, 4)} above the mean of its row"


@dataclass(frozen=True)
class Alarm:
    """A finding, and by what it is known to be the same at a later step."""

    finding: Finding
    reasons: tuple[str, ...]


def alarms(vital: Vital, ahead: Outlook | None, limits: Thresholds) -> Iterator[Finding]:
    """What is wrong with one layer now, and what will be if it goes on."""
    return (alarm.finding for alarm in raised(vital, ahead, limits))


def raised(vital: Vital, ahead: Outlook | None, limits: Thresholds) -> Iterator[Alarm]:
    """The same with their reasons; at most one of a code."""
    if vital.broken_heads:
        yield Alarm(
            _finding(
                vital, None, "non_finite", "error", f"{vital.broken_heads} heads have scores that are NaN or infinite.",
                None, None, "Stop, go back to the last checkpoint, and lower the learning rate or add a QK-norm.",
            ),
            ("non_finite",),
        )  # fmt: skip
        return
    yield from _exploding(vital, ahead if limits.forecast else None)
    yield from _saturated(vital, limits)


def stands(reason: str, vital: Vital, ahead: Outlook | None, limits: Thresholds) -> bool:
    """Whether an alarm of an earlier step is not over, though it may not be raised now."""
    what, _, level = reason.partition(" ")
    if what == "reached":
        return vital.max * LAPSED >= float(level)
    if what == "ahead":
        return ahead is not None and ahead.rate > 0
    floor = getattr(limits, what, None)
    return floor is not None and getattr(vital, what) < LAPSED * floor


def next_threshold(value: float, clips: bool = False) -> float | None:
    """The first published threshold above a score; None beyond the last. The least is where QK-Clip acts, if it can."""
    return min((limit for limit, _, _ in EXPLODING[: -1 if clips else None] if limit > value), default=None)


def _exploding(vital: Vital, ahead: Outlook | None) -> Iterator[Alarm]:
    """A threshold that is passed, and the next that is within reach, as one."""
    told, severities, reasons, limits = [], [], [], []
    reached = threshold_reached(vital.max)
    if reached is not None and _is_told(reached, vital):
        limit, severity, known = reached
        told.append(f"The largest score is {vital.told}; {known}.")
        severities, reasons, limits = [severity], [f"reached {limit:g}"], [limit]
    crossing = forecast(ahead, vital.ceiling, next_threshold(max(vital.max, HARMFUL / 2)))
    if crossing is not None and ahead is not None:
        known = next(known for threshold, _, known in EXPLODING if threshold == crossing.threshold)
        subject = "It" if told else f"The largest score, {vital.told},"
        told.append(
            f"{subject} {_grew(ahead)}; if this goes on, it will pass {crossing.threshold:,.0f} "
            f"{when(crossing)}. {known[0].upper()}{known[1:]}."
        )
        severities.append("warning")
        reasons.append(f"ahead {crossing.threshold:g}")
        limits.append(crossing.threshold)
    if told:
        severity = max(severities, key=SEVERITIES.index)
        finding = _finding(
            vital, vital.max_head, "exploding", severity, " ".join(told), vital.max, limits[-1],
            f"{vital.cause} {_mend(vital)}".strip(),
        )  # fmt: skip
        yield Alarm(finding, tuple(reasons))


def _is_told(reached: tuple[float, str, str], vital: Vital) -> bool:
    """Not where a trained model was as high from the start, nor that QK-Clip would act where it does."""
    if reached[1] == "note" and vital.clips:
        return False
    return vital.began is None or not vital.max < WORSE * vital.began.max


def _grew(ahead: Outlook) -> str:
    """By how much, over the samples that it is told from."""
    factor = math.exp(min(ahead.rate * ahead.seen, 700.0))
    return f"grew {factor:{'.3g' if factor < 1000 else ',.0f'}}-fold in the last {ahead.seen:,.0f} steps"


def _saturated(vital: Vital, limits: Thresholds) -> Iterator[Alarm]:
    """Entropy and gradient that are below their floors beyond doubt, as one."""
    low = [name for name in FLOORS if _is_below(vital, name, getattr(limits, name))]
    if low:
        told = ", and ".join(
            f"{getattr(vital, name):.2g} {FLOORS[name]}, under {getattr(limits, name):g}" for name in low
        )
        finding = _finding(
            vital, None, "saturated", "warning", f"Only {told}.", getattr(vital, low[0]), getattr(limits, low[0]),
            f"{vital.cause} {_mend(vital)}".strip(),
        )  # fmt: skip
        yield Alarm(finding, tuple(low))


def _is_below(vital: Vital, name: str, floor: float | None) -> bool:
    value = getattr(vital, name)
    if floor is None or not value < floor:
        return False
    if vital.began is not None:
        floor = min(floor, getattr(vital.began, name) / WORSE)
    return bool(value + NORMAL * vital.error(name) < floor)


def _mend(vital: Vital) -> str:
    """What helps against what moved, and is not there yet."""
    if vital.moved == "multiplier":
        return "What multiplies the scores has grown: bound it, or train it at a lower rate."
    if vital.clips:
        return "QK-Clip is at work on it: let it act at every step, and lower the learning rate."
    if vital.ceiling.softcap is not None:
        return "Its soft-cap bounds the scores and not what makes them: lower the learning rate, or add a QK-norm."
    if vital.moved == "alignment":
        return "Queries and keys have turned towards each other: lower the learning rate, or add a soft-cap."
    return "Lower the learning rate, add a QK-norm, or clip the projections (QK-Clip at 100)."


def when(crossing: Crossing) -> str:
    """When, in words."""
    return f"about step {crossing.step:.0f} and not before {crossing.earliest:.0f}"


def _finding(
    vital: Vital, head: int | None, code: str, severity: str, message: str, measured: float | None,
    expected: float | None, advice: str,
) -> Finding:  # fmt: skip
    return Finding(vital.layer, head, code, severity, message, measured, expected, advice)
