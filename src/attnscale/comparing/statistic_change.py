"""Change of one statistic of one head, with its error and its significance."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscale.comparing.profiles import RATIOS, Numbers
from attnscale.measure.statistics import STATISTICS
from attnscale.plain import finite, readable
from attnscale.theory.significance import holm, student_tail

if TYPE_CHECKING:
    from attnscale.comparing.comparison import HeadChange

LEVEL = 0.05  # probability of any report, over all heads and statistics, if nothing changed
EXACT = "scale_applied"  # has no sampling error, so one sequence is enough
LEAST_ERROR = 0.0005  # smaller errors are not shown
JUDGED = ("spread", "entropy_ratio", "jacobian_trace")  # statistics that can get worse
LARGEST_LOG = 700.0  # exp() of more overflows a float


@dataclass(frozen=True)
class StatisticChange:
    """Means over samples and their change: the logarithm of the ratio, or the difference for shares."""

    statistic: str
    before: float
    after: float
    change: float
    error: float  # standard error of the change; NaN for a single sample
    chance: float  # p-value
    is_significant: bool = False  # after correction for all comparisons, and above the tolerance

    @property
    def size(self) -> float:
        """Size of the change, up or down."""
        return abs(self.change) if math.isfinite(self.change) else 0.0

    @property
    def is_worse(self) -> bool:
        """True if the statistic changed for the worse."""
        if self.statistic not in JUDGED:
            return False
        return self.change > 0 if STATISTICS[self.statistic].bad == "large" else self.change < 0

    @property
    def text(self) -> str:
        """Change as text: `× 1.52 ± 0.03`, `+0.12 ± 0.01` for a share, `+12 ± 1` for a percentage, or `same`."""
        if self.change == 0:
            return "same"
        if self.statistic in RATIOS:
            factor = math.exp(min(self.change, LARGEST_LOG)) if self.change == self.change else math.nan
            return f"× {readable(factor)}{_plus_minus(factor * self.error)}"
        factor = STATISTICS[self.statistic].factor
        change, error = factor * self.change, factor * self.error
        decimals = _decimals(error) if LEAST_ERROR <= error < math.inf else _decimals(change)
        return f"{change:+.{decimals}f}{_plus_minus(error)}"

    def __str__(self) -> str:
        entry = STATISTICS[self.statistic]
        before, after = (readable(entry.factor * value) for value in (self.before, self.after))
        return f"{entry.long} {before} to {after} ({self.text})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {name: finite(each) if isinstance(each, float) else each for name, each in asdict(self).items()}


def statistic_change(name: str, before: Numbers, after: Numbers, paired: bool) -> StatisticChange:
    """Compare two sets of samples of a statistic; paired samples have the same inputs."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = name in RATIOS
        one, other = (np.log(np.abs(each)) if logs else each for each in (before, after))
        differences = _known(other - one) if paired else one
    if paired:
        change, variance, freedom = _mean(differences), _squared_error(differences), float(len(differences) - 1)
    else:
        one, other = _known(one), _known(other)
        change = _mean(other) - _mean(one)
        first, second = _squared_error(one), _squared_error(other)
        variance, freedom = first + second, _freedom(first, len(one), second, len(other))
    error = math.sqrt(variance) if variance >= 0 else math.nan
    chance = _chance(name, change, error, freedom)
    return StatisticChange(name, _mean(_known(before)), _mean(_known(after)), change, error, chance)


def mark_significant(heads: "Sequence[HeadChange]", tolerance: float) -> "list[HeadChange]":
    """Mark the significant changes, corrected for the number of comparisons."""
    moves = [move for head in heads for move in head.moves.values()]
    beyond = iter(holm([move.chance for move in moves], LEVEL).tolist())
    return [
        replace(
            head,
            moves={
                name: replace(move, is_significant=next(beyond) and move.size > tolerance)
                for name, move in head.moves.items()
            },
        )
        for head in heads
    ]


def _plus_minus(error: float) -> str:
    return f" ± {readable(error, 1)}" if LEAST_ERROR <= error < math.inf else ""


def _decimals(value: float) -> int:
    """Return the number of decimals that show the first significant digit.

    >>> _decimals(0.02), _decimals(0.5), _decimals(12)
    (2, 1, 0)
    """
    return max(0, -math.floor(math.log10(abs(value)))) if value and math.isfinite(value) else 2


def _chance(name: str, change: float, error: float, freedom: float) -> float:
    if not math.isfinite(change) or change == 0:
        return 1.0
    if not math.isfinite(error):
        return 0.0 if name == EXACT else 1.0
    return 0.0 if error == 0 else student_tail(change / error, freedom)


def _freedom(first: float, count: int, second: float, other: int) -> float:
    """Return Welch's degrees of freedom for the difference of two means."""
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
