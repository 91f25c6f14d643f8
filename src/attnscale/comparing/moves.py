"""Move: one statistic of one head, before and after, with the error of the change."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscale.comparing.portrait import RATIOS, Numbers
from attnscale.comparing.student import standing_out, tail
from attnscale.measure.statistics import STATISTICS
from attnscale.plain import finite, readable

if TYPE_CHECKING:
    from attnscale.comparing.comparison import HeadChange

LEVEL = 0.05  # that anything is named where nothing changed: over all heads and statistics together
READ = "scale"  # read off the operations and not sampled: one sequence tells it
LEAST_ERROR = 0.001  # that is told as a number
JUDGED = ("spread", "entropy_ratio", "gradient_gain")  # whose bad end is known; norms and scales are what they are


@dataclass(frozen=True)
class Move:
    """The means over samples; `change` is the logarithm of their ratio, or, of a share, their difference."""

    statistic: str
    before: float
    after: float
    change: float
    error: float  # its standard error; NaN where one sample cannot tell it
    chance: float  # of a change as large where there is none
    is_beyond: bool = False  # the chance is too small, among all that were compared, and the change no trifle

    @property
    def size(self) -> float:
        """How far it moved, up or down."""
        return abs(self.change) if math.isfinite(self.change) else 0.0

    @property
    def is_worse(self) -> bool:
        """Whether it moved towards its bad end; what has none never does."""
        if self.statistic not in JUDGED:
            return False
        return self.change > 0 if STATISTICS[self.statistic].bad == "large" else self.change < 0

    @property
    def told(self) -> str:
        """The change: `× 1.52 ± 0.03`, or of a share `+0.12 ± 0.01`."""
        if self.statistic in RATIOS:
            factor = math.exp(min(self.change, 700.0)) if self.change == self.change else math.nan
            return f"× {readable(factor)}{_give_or_take(factor * self.error)}"
        return f"{self.change:+.2g}{_give_or_take(self.error)}"

    def __str__(self) -> str:
        return f"{STATISTICS[self.statistic].long} {readable(self.before)} to {readable(self.after)} ({self.told})"

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {name: finite(each) if isinstance(each, float) else each for name, each in asdict(self).items()}


def move_of(name: str, before: Numbers, after: Numbers, paired: bool) -> Move:
    """What a statistic did between two sets of samples; paired, they are of the same inputs, one by one."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = name in RATIOS
        one, other = (np.log(np.abs(each)) if logs else each for each in (before, after))
    if paired:
        differences = _known(other - one)
        change, variance, freedom = _mean(differences), _squared_error(differences), float(len(differences) - 1)
    else:
        one, other = _known(one), _known(other)
        change = _mean(other) - _mean(one)
        first, second = _squared_error(one), _squared_error(other)
        variance, freedom = first + second, _freedom(first, len(one), second, len(other))
    error = math.sqrt(variance) if variance >= 0 else math.nan
    return Move(
        name,
        _mean(_known(before)),
        _mean(_known(after)),
        change,
        error,
        _chance(name, change, error, freedom),
    )


def judged(heads: "Sequence[HeadChange]", tolerance: float) -> "list[HeadChange]":
    """The same heads, with what is beyond its error marked: by one level for all that was compared."""
    moves = [move for head in heads for move in head.moves.values()]
    beyond = iter(standing_out([move.chance for move in moves], LEVEL).tolist())
    return [
        replace(
            head,
            moves={
                name: replace(move, is_beyond=next(beyond) and move.size > tolerance)
                for name, move in head.moves.items()
            },
        )
        for head in heads
    ]


def _give_or_take(error: float) -> str:
    if not math.isfinite(error):
        return ""
    return f" ± {error:.1g}" if error >= LEAST_ERROR else f" ± <{LEAST_ERROR}"


def _chance(name: str, change: float, error: float, freedom: float) -> float:
    if not math.isfinite(change) or change == 0:
        return 1.0
    if not math.isfinite(error):
        return 0.0 if name == READ else 1.0
    return 0.0 if error == 0 else tail(change / error, freedom)


def _freedom(first: float, count: int, second: float, other: int) -> float:
    """Welch's degrees of freedom for the difference of two means."""
    if not first + second > 0:
        return 1.0
    parts = first**2 / max(count - 1, 1) + second**2 / max(other - 1, 1)
    return (first + second) ** 2 / parts


def _known(values: Numbers) -> Numbers:
    return values[np.isfinite(values)]


def _mean(values: Numbers) -> float:
    return float(values.mean()) if len(values) else math.nan


def _squared_error(values: Numbers) -> float:
    return float(values.var(ddof=1)) / len(values) if len(values) > 1 else math.nan
