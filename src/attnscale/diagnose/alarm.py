"""Alarms of a training run: a layer's numbers at one step -> findings, by thresholds with a published meaning."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from attnscale.diagnose.finding import Finding
from attnscale.diagnose.forecast import Ceiling, Crossing, Growth, forecast
from attnscale.diagnose.scores import BOUND_THEM, DEAD_GAIN, EXPLODING, threshold_reached
from attnscale.measure.uncertainty import NORMAL

# Of ln n, mean of a layer. Runs whose attention entropy collapsed are those that became unstable (Zhai et al. 2023,
# arXiv:2303.06296); they name no number. At 0.05 a row of 1,024 keys looks at 1.4 of them.
ENTROPY_FLOOR = 0.05
HARMFUL = 1e3  # forecasts are alarms from the threshold on at which losses deteriorate


@dataclass(frozen=True)
class Thresholds:
    """When to raise an alarm; a limit of None is not looked at."""

    entropy_ratio: float | None = ENTROPY_FLOOR
    gradient_gain: float | None = DEAD_GAIN
    forecast: bool = True


@dataclass(frozen=True)
class Vital:
    """What alarms are raised by: of one layer, its largest score and the means of its heads."""

    layer: str
    max: float
    max_head: int
    entropy_ratio: float
    gradient_gain: float
    broken_heads: int  # with scores that are NaN or infinite
    cause: str = ""  # a sentence: which factor moved
    ceiling: Ceiling = field(default_factory=Ceiling)
    error: Callable[[str], float] = lambda name: 0.0  # standard error of one of its means, where rows were sampled


def alarms(vital: Vital, growth: Growth | None, limits: Thresholds) -> Iterator[Finding]:
    """What is wrong with one layer now, and what will be."""
    if vital.broken_heads:
        yield _finding(
            vital, None, "non_finite", "error", f"{vital.broken_heads} heads have scores that are NaN or infinite.",
            None, None, "Stop, go back to the last checkpoint, and lower the learning rate or add a QK-norm.",
        )  # fmt: skip
        return
    yield from _exploding(vital)
    if limits.forecast and growth is not None:
        yield from _forecast(vital, growth)
    for name, floor, meaning in (
        ("entropy_ratio", limits.entropy_ratio, "of ln n is the mean entropy of its rows"),
        ("gradient_gain", limits.gradient_gain, "of the gradient passes its softmax"),
    ):
        value = getattr(vital, name)
        if floor is not None and value < floor and value + NORMAL * vital.error(name) < floor:
            yield _finding(
                vital, None, "saturated", "warning", f"Only {value:.2g} {meaning}, under {floor:g}.", value, floor,
                f"{vital.cause} Lower the learning rate, add a QK-norm or a soft-cap, or clip (QK-Clip).".strip(),
            )  # fmt: skip


def next_threshold(value: float) -> float | None:
    """The first published threshold above a score; None beyond the last."""
    return min((limit for limit, _, _ in EXPLODING if limit > value), default=None)


def _exploding(vital: Vital) -> Iterator[Finding]:
    reached = threshold_reached(vital.max)
    if reached is not None:
        limit, severity, known = reached
        if severity == "note" and vital.ceiling.is_clipped:
            return  # it says that QK-Clip would act, and it does
        yield _finding(
            vital, vital.max_head, "exploding", severity, f"The largest score is {vital.max:.4g}; {known}.", vital.max,
            limit, f"{vital.cause} {BOUND_THEM}".strip(),
        )  # fmt: skip


def _forecast(vital: Vital, growth: Growth) -> Iterator[Finding]:
    """Growth that is certain, and harmful within as many steps as it was watched for."""
    limit = next_threshold(max(vital.max, HARMFUL / 2))
    crossing = forecast(growth, vital.ceiling, limit)
    if crossing is None or crossing.step - growth.step > growth.span:
        return
    known = next(known for threshold, _, known in EXPLODING if threshold == limit)
    yield _finding(
        vital, None, "exploding", "warning",
        f"The largest score, {vital.max:.4g}, grows {growth.factor(1000):.3g}-fold in 1,000 steps and will pass "
        f"{limit:g} {told(crossing)}; {known}.",
        vital.max, limit, f"{vital.cause} Lower the learning rate, or clip the projections (QK-Clip at 100).".strip(),
    )  # fmt: skip


def told(crossing: Crossing) -> str:
    """When, in words."""
    latest = f"{crossing.latest:.0f}" if math.isfinite(crossing.latest) else "∞"
    return f"about step {crossing.step:.0f} ({crossing.earliest:.0f}–{latest})"


def _finding(
    vital: Vital, head: int | None, code: str, severity: str, message: str, measured: float | None,
    expected: float | None, advice: str,
) -> Finding:  # fmt: skip
    return Finding(vital.layer, head, code, severity, message, measured, expected, advice)
