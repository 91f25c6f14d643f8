"""Data of the figures that templates/report draws. Names come from users and are drawn as text."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from attnscale.plain import rounded
from attnscale.show.text import by_pattern

Number = float | int | None
DIGITS = 4  # significant digits of numbers in the page


@dataclass(frozen=True)
class Axis:
    """Title and range of an axis; `ticks` names the positions from 0 on."""

    title: str
    log: bool = False
    ticks: tuple[str, ...] | None = None
    range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Series:
    """Curve of y against x, with a band from `low` to `high` if both are set; related series share a `tone`."""

    name: str
    x: Sequence[Number]
    y: Sequence[Number] = ()  # empty: draw only the band
    low: Sequence[Number] = ()
    high: Sequence[Number] = ()
    tone: int | str = 0  # one of eight colours; "ink" for values that are not measured
    dashed: bool = False
    marks: bool = False  # draw a mark at each point
    points: tuple[str, ...] = ()  # a name for each point


@dataclass(frozen=True)
class Chart:
    """Series over one pair of axes, and a `notice` that states the main result."""

    series: tuple[Series, ...]
    x: Axis
    y: Axis
    notice: str = ""
    kind: str = "chart"


@dataclass(frozen=True)
class Heat:
    """Map of values[row][column], coloured from `low` to `high`; `log` colours by the logarithm."""

    values: Sequence[Sequence[Number]]
    x: Axis
    y: Axis
    unit: str
    rows: tuple[str, ...]  # full names
    low: float
    high: float
    notice: str = ""
    log: bool = False
    diverging: bool = False  # one colour above zero, another below
    errors: Sequence[Sequence[Number]] | None = None  # standard errors
    bounds: Sequence[Sequence[Number]] | None = None  # upper bounds, if the values are lower bounds
    columns: tuple[str, ...] | None = None  # names; None numbers them from 0
    column: str = "head"
    kind: str = "heat"


@dataclass(frozen=True)
class Figure:
    """Figure with one view, or with several and a switch between them."""

    name: str
    views: Mapping[str, Chart | Heat]
    choose: str = "Show"
    caption: str = ""

    @property
    def is_map(self) -> bool:
        """True if the figure has a map, whose fields can be read with the pointer or the keyboard."""
        return any(isinstance(view, Heat) for view in self.views.values())

    def to_json(self) -> list[Any]:
        """Return the views as JSON for the page's script; numbers are rounded, NaN and infinity become None."""
        return [_plain(view) for view in self.views.values()]


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {name: _plain(own) for name, own in vars(value).items()}
    if isinstance(value, list | tuple):
        return [_plain(own) for own in value]
    return rounded(value, DIGITS) if isinstance(value, float) else value


def ticks(names: Iterable[str]) -> tuple[str, ...]:
    """Return a label for each layer: its number if all numbers differ, else its name."""
    names = tuple(names)
    numbers = {name: index for _, members in by_pattern(names) for index, name in members}
    differ = all(numbers.values()) and len(set(numbers.values())) == len(names)
    return tuple(numbers[name] for name in names) if differ else names


def legend(names: Iterable[str]) -> dict[str, str]:
    """Return the legend entry of each layer: `layer 3` if its number is unique, else its name."""
    names = tuple(names)
    return {name: name if tick == name else f"layer {tick}" for name, tick in zip(names, ticks(names), strict=True)}


def known_values(values: Iterable[Number]) -> list[float]:
    """Return the finite numbers among values."""
    return [value for value in values if value is not None and math.isfinite(value)]


def mean(values: Iterable[Number]) -> float:
    """Return the mean of the finite numbers among values; NaN if there are none."""
    known = known_values(values)
    return math.fsum(known) / len(known) if known else math.nan
