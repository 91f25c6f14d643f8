"""Figures: numbers, names and what to notice; templates/report draws them. Names are data, and drawn as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnscale.plain import rounded

Number = float | int | None
LABEL = 22  # characters of a name in a legend
DIGITS = 4  # of a number in the page


@dataclass(frozen=True)
class Axis:
    """What it counts; `ticks` name positions, where those are names."""

    title: str
    log: bool = False
    ticks: tuple[str, ...] | None = None  # at 0, 1, 2, …
    range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Series:
    """y against x, of the same `tone` as others that belong to it; a band where there is a `low` and a `high`."""

    name: str
    x: Sequence[Number]
    y: Sequence[Number] = ()  # empty: a band alone
    low: Sequence[Number] = ()
    high: Sequence[Number] = ()
    mode: str = "lines"  # or points, bars, steps
    tone: int | str = 0  # a number, or "ink" for what is not measured
    dashed: bool = False
    points: tuple[str, ...] = ()  # a name for each
    legend: bool = True


@dataclass(frozen=True)
class Chart:
    """Series over one pair of axes, and in one line what to notice."""

    series: tuple[Series, ...]
    x: Axis
    y: Axis
    notice: str = ""


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
    errors: Sequence[Sequence[Number]] | None = None  # standard errors
    bounds: Sequence[Sequence[Number]] | None = None  # upper bounds, where the value is a lower one
    columns: tuple[str, ...] | None = None  # names; numbered from 0 where None
    column: str = "head"


@dataclass(frozen=True)
class Figure:
    """One view, or several to choose between; one that `follows` another shows what that one does."""

    name: str
    views: Mapping[str, Chart | Heat]
    choose: str = "Show"
    caption: str = ""
    follows: str | None = None

    @property
    def is_map(self) -> bool:
        """Whether it can be read field by field."""
        return any(isinstance(view, Heat) for view in self.views.values())

    def to_dict(self) -> dict[str, Any]:
        """What the page's script takes."""
        views = [_heat(view) if isinstance(view, Heat) else _chart(view) for view in self.views.values()]
        return {"views": views, "follows": self.follows}


def short(name: str) -> str:
    """The end of a name, which tells layers apart."""
    return name if len(name) <= LABEL else f"…{name[1 - LABEL :]}"


def short_numbers(values: Sequence[Number]) -> list[Number]:
    """Numbers of a few digits; None where there is none, or none that JSON knows."""
    return [None if value is None else rounded(value, DIGITS) for value in values]


def _axis(axis: Axis) -> dict[str, Any]:
    return {"title": axis.title, "log": axis.log, "ticks": axis.ticks, "range": axis.range}


def _chart(chart: Chart) -> dict[str, Any]:
    return {
        "kind": "chart",
        "series": [_series(one) for one in chart.series],
        "x": _axis(chart.x),
        "y": _axis(chart.y),
        "notice": chart.notice,
    }


def _series(series: Series) -> dict[str, Any]:
    return {
        "name": series.name,
        "x": short_numbers(series.x),
        "y": short_numbers(series.y),
        "low": short_numbers(series.low),
        "high": short_numbers(series.high),
        "mode": series.mode,
        "tone": series.tone,
        "dashed": series.dashed,
        "points": list(series.points),
        "legend": series.legend,
    }


def _heat(heat: Heat) -> dict[str, Any]:
    return {
        "kind": "heat",
        "values": [short_numbers(row) for row in heat.values],
        "errors": None if heat.errors is None else [short_numbers(row) for row in heat.errors],
        "bounds": None if heat.bounds is None else [short_numbers(row) for row in heat.bounds],
        "x": _axis(heat.x),
        "y": _axis(heat.y),
        "unit": heat.unit,
        "rows": list(heat.rows),
        "columns": heat.columns,
        "column": heat.column,
        "low": heat.low,
        "high": heat.high,
        "log": heat.log,
        "notice": heat.notice,
    }
