"""Catalogue of statistics: the name, meaning, range and format of each.

To add a statistic, add a property to ScoreStats and one entry here. Logs, tables, reports, sinks and the guide to the
statistics read this catalogue.
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
    """Place where a statistic is stored or shown; LIVE, RUN and MAP show only statistics of the log."""

    LOG = auto()  # records of a training run, and the sinks that plot them
    LIVE = auto()  # live table of a training run
    SEEN = auto()  # printed result of watching()
    CHECK = auto()  # `attnscale check`: terminal, JSON and report
    RUN = auto()  # `attnscale watch-log`
    MAP = auto()  # reports: the map of heads and the curves of a run
    NOWHERE = 0


@dataclass(frozen=True)
class Statistic:
    """Description of one number per head."""

    name: str
    short: str  # heading of a narrow table, with line breaks
    long: str  # heading of a wide table
    meaning: str
    reading: str = ""  # how to interpret its values
    word: str = ""  # heading on one line, if it differs from `short`
    attribute: str | None = None  # attribute of ScoreStats; None if only the record of a layer has it
    unit: str = ""
    bad: Literal["large", "small"] = "large"  # which extreme reports and curves show
    heads: Literal["mean", "max", "sum"] = "mean"  # how the heads of a layer combine
    range: tuple[float, float] = POSITIVE
    format: Literal["number", "share", "percent"] = "number"
    places: Place = Place.NOWHERE
    has_error: bool = False  # True if ScoreStats.stderr() supports it
    bounded_by: str = ""  # if rows were sampled: the statistic that is its upper bound
    may_be_unknown: bool = False  # omitted from a record if no head has a value

    def of(self, stats: "ScoreStats") -> "Tensor":
        """Return the values of all heads; the statistic must be one of ScoreStats."""
        assert self.attribute is not None, f"only the record of a layer has {self.name}"
        values: Tensor = getattr(stats, self.attribute)
        return values

    def whole(self, stats: "ScoreStats") -> float:
        """Return the value of the whole layer."""
        return self.over_heads(self.of(stats).tolist())

    def error(self, stats: "ScoreStats") -> float:
        """Return the standard error of the layer's value if rows were sampled, otherwise NaN.

        It is infinite if the error of a head cannot be estimated. All heads use the same rows, so their errors do not
        cancel in a mean: the error of the layer is the mean error of its heads.
        """
        if stats.exact or not self.has_error or self.attribute is None:
            return math.nan
        errors = stats.stderr(self.attribute)[stats.rows > 0]
        return math.inf if bool(errors.isnan().any()) else self.over_heads(errors.tolist())

    def over_heads(self, values: Iterable[float]) -> float:
        """Combine the values of the heads into one value of the layer, ignoring NaN; NaN if all are NaN."""
        known = [value for value in values if value == value]  # not NaN
        if not known:
            return math.nan
        return max(known) if self.heads == "max" else sum(known) / (len(known) if self.heads == "mean" else 1)

    @property
    def highest(self) -> float | None:
        """Upper end of its range; None if unlimited."""
        return self.range[1] if math.isfinite(self.range[1]) else None

    @property
    def factor(self) -> float:
        """Multiplier of the value in tables and figures: 100 where they show a percentage."""
        return 100.0 if self.format == "percent" else 1.0

    @property
    def one_line(self) -> str:
        """Short heading without line breaks.

        >>> [STATISTICS[name].one_line for name in ("spread", "entropy_ratio", "jacobian_trace")]
        ['spread', 'entropy (% of max)', '1−Σp²']
        """
        return self.word or self.short


EVERYWHERE = Place.LOG | Place.LIVE | Place.SEEN | Place.CHECK | Place.RUN | Place.MAP

_ENTRIES = (
    Statistic(
        "rows", "rows", "rows", "measured rows with at least one visible key",
        attribute="rows", unit="rows", heads="sum",
    ),
    Statistic(
        "count", "scores", "scores", "measured scores: the visible keys of all measured rows",
        attribute="count", unit="scores", heads="sum",
    ),
    Statistic(
        "mean", "mean", "mean score", "mean of the scores",
        "a mean far from 0 is harmless: softmax ignores a shift of all scores",
        attribute="mean", range=ANY, has_error=True,
    ),
    Statistic("variance", "variance", "variance", "variance of all scores", attribute="variance", has_error=True),
    Statistic(
        "total_spread", "total\nspread", "total spread", "standard deviation of all scores",
        "includes shifts of whole rows, which softmax ignores. If it is far above the spread, rows are shifted, which "
        "is harmless",
        word="total spread", attribute="std", has_error=True, places=Place.LOG,
    ),
    Statistic(
        "variance_within_rows", "variance\nin rows", "variance within rows",
        "mean squared difference between a score and the mean of its row, σ²",
        word="variance in rows", attribute="variance_within_rows", has_error=True,
    ),
    Statistic(
        "spread", "spread", "spread", "standard deviation of the scores around the mean of their row, σ",
        "the spread that matters to softmax, which ignores a shift of a whole row. About 1 at initialisation; the "
        "critical spread is √(2 ln n): 3.7 for 1,024 keys",
        attribute="std_within_rows", has_error=True, places=EVERYWHERE,
    ),
    Statistic(
        "max", "max", "largest score", "the largest of all visible scores before softmax",
        "above 100 QK-Clip would act; above 1,000 training losses get worse. A lower bound if rows were sampled",
        attribute="max", heads="max", range=ANY, bounded_by="max_bound", places=Place.LOG | Place.LIVE | Place.MAP,
    ),
    Statistic(
        "max_bound", "max ≤", "bound of the largest score", "upper bound of all scores",
        "the largest score lies between `max` and this bound; they are equal if every row was measured",
        attribute="max_bound", heads="max", range=ANY, places=Place.LOG | Place.LIVE,
    ),
    Statistic(
        "max_above_mean", "max over\nmean", "largest score above its row’s mean",
        "the largest score above the mean of its row",
        "the part of the largest score that matters to softmax. A lower bound if rows were sampled",
        word="max over mean", attribute="max_above_mean", heads="max", range=POSITIVE, places=Place.LOG,
    ),
    Statistic(
        "entropy", "entropy", "entropy", "−Σ p ln p of a row",
        "ln n if all n keys have equal weight, 0 if one key has all the weight",
        attribute="entropy", unit="nats", bad="small", has_error=True,
    ),
    Statistic(
        "entropy_ratio", "entropy\n% of max", "entropy (% of max)",
        "entropy of a row’s weights divided by that of uniform weights, ln n",
        "comparable across lengths and causal rows: 1 if uniform, 0 if one-hot. Rows with one visible key do not count",
        word="entropy (% of max)", attribute="entropy_ratio", bad="small", range=SHARE, format="percent",
        has_error=True,
        places=EVERYWHERE,
    ),
    Statistic(
        "top1", "top-1", "top-1 weight", "the largest weight of a row", "near 1: one key has almost all the weight",
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
        "near 1: the head is an attention sink: it attends to the start of its sequence and to little else",
        attribute="sink", range=SHARE, format="share", has_error=True, places=Place.LOG | Place.CHECK | Place.MAP,
    ),
    Statistic(
        "learned_sink", "learned\nsink", "weight of the learned sink",
        "mean weight that a learned sink logit takes from the keys of a row",
        "present only if the model has such a logit in the denominator of its softmax",
        word="learned sink", attribute="learned_sink", range=SHARE, format="share", may_be_unknown=True,
        places=Place.LOG,
    ),
    Statistic(
        "scale_applied", "scale", "scale", "slope of the actual softmax input as a function of q·k",
        "1/√d_k is expected if the model’s configuration sets no other scale", places=Place.LOG,
    ),
    Statistic("query_norm", "‖q‖", "query norm", "root mean square of ‖q‖ over rows", places=Place.LOG),
    Statistic("key_norm", "‖k‖", "key norm", "root mean square of ‖k‖ over keys", places=Place.LOG),
    Statistic(
        "alignment", "alignment", "alignment", "root mean square of the scores divided by scale · ‖q‖ · ‖k‖",
        "1/√d_k for unrelated directions, 1 if queries are parallel to keys",
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
    """Return the statistics of ScoreStats, by attribute name."""
    return {entry.attribute: entry for entry in STATISTICS.values() if entry.attribute is not None}


def in_place(place: Place) -> list[Statistic]:
    """Return the statistics that are stored or shown in a place."""
    return [entry for entry in STATISTICS.values() if entry.places & place]


def logged() -> dict[str, Statistic]:
    """Return the statistics that a log record stores for every head, by name."""
    return {entry.name: entry for entry in in_place(Place.LOG)}
