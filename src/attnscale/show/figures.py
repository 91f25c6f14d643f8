"""Figures: numbers, names and what to notice; templates/report draws them. Names are data, and drawn as text."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from attnscale.plain import rounded
from attnscale.show.text import by_pattern

Number = float | int | None
DIGITS = 4  # of a number in the page


@dataclass(frozen=True)
class Axis:
    """Title and range of an axis; `ticks` names the positions from 0 on."""

    title: str
    log: bool = False
    ticks: tuple[str, ...] | None = None
    range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Series:
    """y against x, with a band from `low` to `high` if they are given; one `tone` for all that belongs together."""

    name: str
    x: Sequence[Number]
    y: Sequence[Number] = ()  # empty: a band alone
    low: Sequence[Number] = ()
    high: Sequence[Number] = ()
    tone: int | str = 0  # of eight; or "ink" for what is not measured
    dashed: bool = False
    marks: bool = False  # at each point
    points: tuple[str, ...] = ()  # a name for each


@dataclass(frozen=True)
class Chart:
    """Series over one pair of axes, and in one line what to notice."""

    series: tuple[Series, ...]
    x: Axis
    y: Axis
    notice: str = ""
    kind: str = "chart"


@dataclass(frozen=True)
class Heat:
    """values[row][column], coloured from `low` to `high`; by their logarithm where few are far above the others."""

    values: Sequence[Sequence[Number]]
    x: Axis
    y: Axis
    unit: str
    rows: tuple[str, ...]  # names in full
    low: float
    high: float
    notice: str = ""
    log: bool = False
    diverging: bool = False  # around zero: one colour up, another down
    errors: Sequence[Sequence[Number]] | None = None  # standard errors
    bounds: Sequence[Sequence[Number]] | None = None  # upper bounds, where the value is a lower one
    columns: tuple[str, ...] | None = None  # names; numbered from 0 where None
    column: str = "head"
    kind: str = "heat"


@dataclass(frozen=True)
class Figure:
    """One view, or several to choose between."""

    name: str
    views: Mapping[str, Chart | Heat]
    choose: str = "Show"
    caption: str = ""

    @property
    def is_map(self) -> bool:
        """True if it can be read field by field."""
        return any(isinstance(view, Heat) for view in self.views.values())

    def to_json(self) -> list[Any]:
        """Return what the page's script takes: numbers of a few digits, None for those that JSON does not know."""
        return [_plain(view) for view in self.views.values()]


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {name: _plain(own) for name, own in vars(value).items()}
    if isinstance(value, list | tuple):
        return [_plain(own) for own in value]
    return rounded(value, DIGITS) if isinstance(value, float) else value


def ticks(names: Iterable[str]) -> tuple[str, ...]:
    """Return the number of each layer where those differ, else its name."""
    names = tuple(names)
    numbers = {name: index for _, members in by_pattern(names) for index, name in members}
    differ = all(numbers.values()) and len(set(numbers.values())) == len(names)
    return tuple(numbers[name] for name in names) if differ else names


def legend(names: Iterable[str]) -> dict[str, str]:
    """Return what the curve of each layer is called: `layer 3` where a number identifies it, else its name."""
    names = tuple(names)
    return {name: name if tick == name else f"layer {tick}" for name, tick in zip(names, ticks(names), strict=True)}


def known_values(values: Iterable[Number]) -> list[float]:
    """Return the numbers among values."""
    return [value for value in values if value is not None and math.isfinite(value)]


def mean(values: Iterable[Number]) -> float:
    """Return the mean of the numbers among values; NaN if there are none."""
    known = known_values(values)
    return math.fsum(known) / len(known) if known else math.nan
