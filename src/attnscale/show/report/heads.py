"""The map of layers and heads: one statistic at a time."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from torch import Tensor

from attnscale.measure.statistics import STATISTICS, Place, Statistic, in_place
from attnscale.plain import finite, plain
from attnscale.show.numbers import number
from attnscale.show.report.figures import Axis, Figure, Heat, Number
from attnscale.show.report.names import ticks
from attnscale.train.record import Record
from attnscale.watching import Layer

OUTLIERS = 20.0  # times the median: from here on colours follow the logarithm


Values = Sequence[Sequence[Number]]


def mapped() -> list[Statistic]:
    """What can be shown of a head, one at a time: means first, extremes last."""
    return sorted(in_place(Place.MAP), key=lambda entry: entry.heads == "max")


@dataclass(frozen=True)
class Grid:
    """One statistic of every layer and head; errors or upper bounds where only some rows were looked at."""

    statistic: Statistic
    values: Values
    errors: Values | None = None
    bounds: Values | None = None


def map_of_layers(name: str, layers: Mapping[str, Layer]) -> Figure:
    """The map of what was watched."""
    return map_of(name, tuple(layers), [_grid(layers.values(), entry) for entry in mapped()])


def map_of_record(name: str, record: Record) -> Figure:
    """The map of one sampled step."""
    grids = [
        Grid(entry, [record.layers[layer].numbers.get(entry.name, []) for layer in record.layers]) for entry in mapped()
    ]
    return map_of(name, tuple(record.layers), grids)


def map_of(name: str, names: tuple[str, ...], grids: Sequence[Grid]) -> Figure:
    """A map, each statistic in its range, or in that of the values where it has no highest."""
    width = max((len(row) for grid in grids for row in grid.values), default=0)
    views = {}
    for grid in grids:
        statistic, values = grid.statistic, _padded(grid.values, width)
        known = [value for row in values for value in row if value is not None]
        high = statistic.highest or max(known, default=1.0) or 1.0
        log = statistic.highest is None and bool(known) and min(known) > 0 and high > OUTLIERS * median(known)
        views[statistic.long] = Heat(
            values=values,
            x=Axis("head"),
            y=Axis("layer", ticks=ticks(names)),
            unit=statistic.long,
            rows=names,
            low=min(known) if log else min(0.0, *known) if known else 0.0,
            high=high,
            log=log,
            notice=_notice(statistic, names, values),
            errors=None if grid.errors is None else _padded(grid.errors, width),
            bounds=None if grid.bounds is None else _padded(grid.bounds, width),
        )
    return Figure(name, views, choose="Colour heads by")


def _grid(layers: Iterable[Layer], statistic: Statistic) -> Grid:
    seen = [layer.stats for layer in layers]
    values = [_numbers(statistic.of(stats)) for stats in seen]
    if all(stats.exact for stats in seen):
        return Grid(statistic, values)
    if statistic.bounded_by:
        return Grid(statistic, values, bounds=[_numbers(STATISTICS[statistic.bounded_by].of(stats)) for stats in seen])
    if not statistic.has_error or statistic.attribute is None:
        return Grid(statistic, values)
    return Grid(statistic, values, errors=[_numbers(stats.stderr(statistic.attribute)) for stats in seen])


def _notice(statistic: Statistic, names: Sequence[str], values: Values) -> str:
    known = [
        (value, row, head) for row, heads in enumerate(values) for head, value in enumerate(heads) if value is not None
    ]
    if not known:
        return f"No head has a {statistic.long} that is a number."
    extreme, (value, row, head) = ("highest", max(known)) if statistic.bad == "large" else ("lowest", min(known))
    middle = median(value for value, _, _ in known)
    return (
        f"The {extreme} {statistic.long} is {number(value)}, of head {head} in {names[row]}; half of the heads are "
        f"above {number(middle)}."
    )


def _numbers(values: Tensor) -> list[Number]:
    return list(map(finite, values.double().tolist()))


def _padded(values: Values, width: int) -> Values:
    return [[*plain(row), *[None] * (width - len(row))] for row in values]
