"""The catalogue of statistics: what is known of each, for whoever computes, keeps, shows or explains it.

A new statistic is a property of ScoreStats and one entry here. Logs, tables, reports, sinks and the guide to
the statistics take it from there.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Flag, auto
from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from attnscale.measure.stats import ScoreStats

ANY, POSITIVE, SHARE = (-math.inf, math.inf), (0.0, math.inf), (0.0, 1.0)


class Place(Flag):
    """Place where a statistic is kept or shown."""

    LOG = auto()  # records of a training run, and the sinks that draw them as curves
    LIVE = auto()  # the table that follows a run; of what is in the log
    SEEN = auto()  # print(seen)
    CHECK = auto()  # `attnscale check`: terminal, JSON and report
    RUN = auto()  # `attnscale watch-log`; of what is in the log
    MAP = auto()  # reports: the map of heads and the curves of a run; of what is in the log
    NOWHERE = 0


@dataclass(frozen=True)
class Statistic:
    """One number a head."""

    name: str
    short: str  # heading of a narrow table, with the line breaks it needs
    long: str  # heading where there is room
    meaning: str
    reading: str = ""  # what its values say
    word: str = ""  # heading of a table with one line for it, where that is not the short one
    attribute: str | None = None  # of ScoreStats; None: of the layer, and known to its record alone
    unit: str = ""
    bad: Literal["large", "small"] = "large"  # the end that a report names, and its curves keep
    heads: Literal["mean", "max", "sum"] = "mean"  # what makes one number of a layer
    range: tuple[float, float] = POSITIVE
    format: Literal["number", "share", "percent"] = "number"
    places: Place = Place.NOWHERE
    has_error: bool = False  # where rows were sampled: ScoreStats.stderr knows it
    bounded_by: str = ""  # where rows were sampled: the statistic that it cannot exceed
    may_be_unknown: bool = False  # left out of a record in which no head has it

    def of(self, stats: "ScoreStats") -> "Tensor":
        """Return the values of all heads; the statistic must be one of ScoreStats."""
        assert self.attribute is not None, f"{self.name} is known to the record of a layer alone"
        values: Tensor = getattr(stats, self.attribute)
        return values

    def whole(self, stats: "ScoreStats") -> float:
        """Return the number of the layer that has these heads."""
        return self.over_heads(self.of(stats).tolist())

    def error(self, stats: "ScoreStats") -> float:
        """Return the standard error of the number of the layer from sampled rows; NaN where it has none.

        Infinite where the rows cannot tell it of some head. Heads look at the same rows, so that their errors do not
        cancel in a mean.
        """
        if stats.exact or not self.has_error or self.attribute is None:
            return math.nan
        errors = stats.stderr(self.attribute)[stats.rows > 0]
        return math.inf if bool(errors.isnan().any()) else self.over_heads(errors.tolist())

    def over_heads(self, values: Iterable[float]) -> float:
        """Return the number of the layer, from those of its heads; NaN where none is known."""
        known = [value for value in values if value == value]  # not NaN
        if not known:
            return math.nan
        return max(known) if self.heads == "max" else sum(known) / (len(known) if self.heads == "mean" else 1)

    @property
    def highest(self) -> float | None:
        """The most it can be, where there is such a number."""
        return self.range[1] if math.isfinite(self.range[1]) else None

    @property
    def factor(self) -> float:
        """Multiplier of the value in tables and figures: 100 where they show a percentage."""
        return 100.0 if self.format == "percent" else 1.0

    @property
    def one_line(self) -> str:
        """A short heading without line breaks.

        >>> [STATISTICS[name].one_line for name in ("spread", "entropy_ratio", "jacobian_trace")]
        ['spread', 'entropy (% of max)', '1−Σp²']
        """
        return self.word or self.short


EVERYWHERE = Place.LOG | Place.LIVE | Place.SEEN | Place.CHECK | Place.RUN | Place.MAP

_ENTRIES = (
    Statistic(
        "rows", "rows", "rows", "rows looked at, with at least one visible key",
        attribute="rows", unit="rows", heads="sum",
    ),
    Statistic(
        "count", "scores", "scores", "scores looked at: visible keys of all those rows",
        attribute="count", unit="scores", heads="sum",
    ),
    Statistic(
        "mean", "mean", "mean score", "mean of the scores",
        "far from 0 it does no harm by itself: softmax does not see a shift",
        attribute="mean", range=ANY, has_error=True,
    ),
    Statistic("variance", "variance", "variance", "variance of all scores", attribute="variance", has_error=True),
    Statistic(
        "total_spread", "total\nspread", "total spread", "standard deviation of all scores",
        "it also counts what softmax does not see, a shift of a whole row: where it is far above the spread, rows are "
        "shifted, which does no harm by itself",
        word="total spread", attribute="std", has_error=True, places=Place.LOG,
    ),
    Statistic(
        "variance_within_rows", "variance\nin rows", "variance within rows",
        "mean square of the scores about the mean of their row, σ²",
        word="variance in rows", attribute="variance_within_rows", has_error=True,
    ),
    Statistic(
        "spread", "spread", "spread", "standard deviation of the scores about the mean of their row, σ",
        "what softmax sees, since it does not see a shift of a whole row. About 1 at the start; the critical "
        "spread is √(2 ln n): 3.7 over 1,024 keys",
        attribute="std_within_rows", has_error=True, places=EVERYWHERE,
    ),
    Statistic(
        "max", "max", "largest score", "the largest of all visible scores before softmax",
        "past 100 QK-Clip would act, past 1,000 losses suffer. Where only some rows were looked at, a lower bound",
        attribute="max", heads="max", range=ANY, bounded_by="max_bound", places=Place.LOG | Place.LIVE | Place.MAP,
    ),
    Statistic(
        "max_bound", "max ≤", "bound of the largest score", "a score that none can exceed",
        "the largest score lies between `max` and this; the two are one where every row was looked at",
        attribute="max_bound", heads="max", range=ANY, places=Place.LOG | Place.LIVE,
    ),
    Statistic(
        "max_above_mean", "max over\nmean", "largest score above its row’s mean",
        "the largest score above the mean of its row",
        "what softmax sees of the largest score. Where only some rows were looked at, a lower bound",
        word="max over mean", attribute="max_above_mean", heads="max", range=POSITIVE, places=Place.LOG,
    ),
    Statistic(
        "entropy", "entropy", "entropy", "−Σ p ln p of a row",
        "ln n when all keys weigh the same, 0 when one takes all",
        attribute="entropy", unit="nats", bad="small", has_error=True,
    ),
    Statistic(
        "entropy_ratio", "entropy\n% of max", "entropy (% of max)",
        "entropy of a row’s weights over that of uniform weights, ln n",
        "comparable across lengths and causal rows: 1 uniform, 0 one-hot. Rows that see one key are left out",
        word="entropy (% of max)", attribute="entropy_ratio", bad="small", range=SHARE, format="percent",
        has_error=True,
        places=EVERYWHERE,
    ),
    Statistic(
        "top1", "top-1", "top-1 weight", "the largest weight of a row", "near 1: one key takes all",
        attribute="top1", range=SHARE, format="share", has_error=True, places=EVERYWHERE & ~Place.RUN,
    ),
    Statistic(
        "saturated", "saturated\nrows", "saturated rows",
        "share of rows that give one key more than 0.99 of their weight",
        "these rows pass almost no gradient", word="saturated rows", attribute="saturated", range=SHARE, format="share",
        has_error=True, places=Place.LOG | Place.LIVE | Place.CHECK,
    ),
    Statistic(
        "jacobian_trace", "1−Σp²", "1−Σp²", "trace of the softmax Jacobian, 1 − Σp²",
        "0 if one key has all the weight of a row; near 1 if many keys share it",
        word="1−Σp²", attribute="jacobian_trace", bad="small", range=SHARE, format="share", has_error=True,
        places=EVERYWHERE,
    ),
    Statistic(
        "effective_keys", "keys", "effective keys", "1/Σp² of a row", "how many keys share the weight",
        attribute="effective_keys", unit="keys", bad="small", range=(1.0, math.inf), has_error=True,
    ),
    Statistic(
        "sink", "sink", "weight on the first key", "mean weight on the first visible key of a row",
        "near 1: the head attends to the start of its sequence, an attention sink, and passes on little else",
        attribute="sink", range=SHARE, format="share", has_error=True, places=Place.LOG | Place.CHECK | Place.MAP,
    ),
    Statistic(
        "learned_sink", "learned\nsink", "weight of the learned sink",
        "mean weight that a learned sink logit takes from the keys of a row",
        "known where a model has such a logit in the denominator of its softmax",
        word="learned sink", attribute="learned_sink", range=SHARE, format="share", may_be_unknown=True,
        places=Place.LOG,
    ),
    Statistic(
        "scale_applied", "scale", "scale", "slope of the softmax’s real input on q·k",
        "1/√d_k is expected where the model’s configuration names none", places=Place.LOG,
    ),
    Statistic("query_norm", "‖q‖", "query norm", "root mean square of ‖q‖ over rows", places=Place.LOG),
    Statistic("key_norm", "‖k‖", "key norm", "root mean square of ‖k‖ over keys", places=Place.LOG),
    Statistic(
        "alignment", "alignment", "alignment", "root mean square of the scores over scale · ‖q‖ · ‖k‖",
        "1/√d_k for directions that have nothing to do with each other, 1 where queries point along keys",
        places=Place.LOG,
    ),
    Statistic(
        "query_gradient", "‖∂q‖", "gradient of queries", "norm of the gradient that reaches the queries",
        "of the loss averaged over ranks, as data-parallel training averages it",
        heads="max", places=Place.LOG, may_be_unknown=True,
    ),
    Statistic(
        "key_gradient", "‖∂k‖", "gradient of keys", "norm of the gradient that reaches the keys",
        "of the loss averaged over ranks, as data-parallel training averages it",
        heads="max", places=Place.LOG, may_be_unknown=True,
    ),
)  # fmt: skip
STATISTICS = {entry.name: entry for entry in _ENTRIES}


@cache
def of_scores() -> dict[str, Statistic]:
    """Return the statistics of ScoreStats, by the name of the attribute."""
    return {entry.attribute: entry for entry in STATISTICS.values() if entry.attribute is not None}


def in_place(place: Place) -> list[Statistic]:
    """Return the statistics that are kept or shown in a place."""
    return [entry for entry in STATISTICS.values() if entry.places & place]


def logged() -> dict[str, Statistic]:
    """Return the statistics that a record keeps of every head, by name."""
    return {entry.name: entry for entry in in_place(Place.LOG)}
