"""The map of layers and heads: one metric at a time."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from attnscale.show.numbers import number
from attnscale.show.report.figures import Axis, Figure, Heat, Number
from attnscale.show.report.names import ticks
from attnscale.train.record import Record
from attnscale.watching import Layer

OUTLIERS = 20.0  # times the median: from here on colours follow the logarithm


@dataclass(frozen=True)
class Metric:
    """What can be shown of a head: its name in ScoreStats and in a log, and its range, None for that of the values."""

    statistic: str
    recorded: str
    high: float | None
    extreme: str  # which end is worth naming, "highest" or "lowest"


METRICS = {
    "spread": Metric("std", "spread", None, "highest"),
    "entropy of ln n": Metric("entropy_ratio", "entropy_ratio", 1.0, "lowest"),
    "top-1 weight": Metric("top1", "top1", 1.0, "highest"),
    "gradient gain": Metric("gradient_gain", "gradient_gain", 1.0, "lowest"),
    "largest score": Metric("max", "max", None, "highest"),
}
Values = Sequence[Sequence[Number]]


@dataclass(frozen=True)
class Grid:
    """One metric of every layer and head; the errors or upper bounds that come of having looked at some rows only."""

    values: Values
    errors: Values | None = None
    bounds: Values | None = None


def map_of_layers(name: str, layers: Mapping[str, Layer]) -> Figure:
    """The map of what was watched."""
    return map_of(name, tuple(layers), {title: _grid(layers.values(), metric) for title, metric in METRICS.items()})


def map_of_record(name: str, record: Record) -> Figure:
    """The map of one sampled step."""
    grids = {
        title: Grid([record.layers[layer].numbers.get(metric.recorded, []) for layer in record.layers])
        for title, metric in METRICS.items()
    }
    return map_of(name, tuple(record.layers), grids)


def map_of(
    name: str, names: tuple[str, ...], grids: Mapping[str, Grid], highest: Mapping[str, float] | None = None
) -> Figure:
    """A map, each metric in the range of its values, or up to the `highest` of several maps."""
    width = max((len(row) for grid in grids.values() for row in grid.values), default=0)
    views = {}
    for title, grid in grids.items():
        metric, values = METRICS[title], _padded(grid.values, width)
        known = [value for row in values for value in row if value is not None]
        high = metric.high or (highest or {}).get(title) or max(known, default=1.0) or 1.0
        log = metric.high is None and bool(known) and min(known) > 0 and high > OUTLIERS * statistics.median(known)
        views[title] = Heat(
            values=values,
            x=Axis("head"),
            y=Axis("layer", ticks=ticks(names)),
            unit=title,
            rows=names,
            low=min(known) if log else min(0.0, *known) if known else 0.0,
            high=high,
            log=log,
            notice=_notice(title, metric, names, values),
            errors=None if grid.errors is None else _padded(grid.errors, width),
            bounds=None if grid.bounds is None else _padded(grid.bounds, width),
        )
    return Figure(name, views, choose="Colour heads by")


def _grid(layers: Iterable[Layer], metric: Metric) -> Grid:
    seen = [layer.stats for layer in layers]
    values = [_numbers(getattr(stats, metric.statistic)) for stats in seen]
    if all(stats.exact for stats in seen):
        return Grid(values)
    if metric.statistic == "max":
        return Grid(values, bounds=[_numbers(stats.max_bound) for stats in seen])
    return Grid(values, errors=[_numbers(stats.stderr(metric.statistic)) for stats in seen])


def _notice(title: str, metric: Metric, names: Sequence[str], values: Values) -> str:
    known = [
        (value, row, head) for row, heads in enumerate(values) for head, value in enumerate(heads) if value is not None
    ]
    if not known:
        return f"No head has a {title} that is a number."
    value, row, head = max(known) if metric.extreme == "highest" else min(known)
    middle = statistics.median(value for value, _, _ in known)
    return (
        f"The {metric.extreme} {title} is {number(value)}, of head {head} in {names[row]}; half of the heads are above "
        f"{number(middle)}."
    )


def _numbers(values: Tensor) -> list[Number]:
    return [value if math.isfinite(value) else None for value in values.double().tolist()]


def _padded(values: Values, width: int) -> Values:
    finite = ([value if value is not None and math.isfinite(value) else None for value in row] for row in values)
    return [row + [None] * (width - len(row)) for row in finite]
