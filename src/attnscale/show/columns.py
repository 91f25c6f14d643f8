"""Columns of tables that stand in the terminal and on a page alike."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from attnscale.measure.statistics import Statistic
from attnscale.show.numbers import formatted

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column: its heading in the terminal, that on a page, and what is told of a row."""

    short: str
    long: str
    cell: Callable[[Row], str]

    @classmethod
    def of(
        cls, statistic: Statistic, value: Callable[[Row], float], error: Callable[[Row], float] = lambda row: math.nan
    ) -> "Column[Row]":
        """The column of a statistic, with the headings and the format that the catalogue gives it."""
        return cls(statistic.short, statistic.long, lambda row: formatted(statistic, value(row), error(row)))
