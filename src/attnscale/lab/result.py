"""Result: what an experiment found, as tables, plots and checks that terminal, page and JSON all show."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from attnscale.plain import finite, plain

Value = str | float | int | bool | None


@dataclass(frozen=True)
class Table:
    """Named columns; numbers stay numbers, for whoever shows them to round."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True)
class Curve:
    """y against x; a band where there is one, over seeds; a prediction where no run was needed for it."""

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...] | None = None
    high: tuple[float | None, ...] | None = None
    is_theory: bool = False


@dataclass(frozen=True)
class Plot:
    """Curves over one pair of axes, and in one line what to notice."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    notice: str
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Heatmap:
    """values[row][column], coloured; from `low` to `high` where several are to be compared, else over what there is."""

    title: str
    x_label: str
    y_label: str
    columns: tuple[Value, ...]
    rows: tuple[Value, ...]
    values: tuple[tuple[float | None, ...], ...]
    notice: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Check:
    """One thing the theory or a source says, beside what was measured."""

    statement: str
    holds: bool
    evidence: str


@dataclass(frozen=True)
class Result:
    """Everything an experiment has to say. The conclusion is composed from the numbers."""

    experiment: str
    question: str
    conclusion: str
    checks: tuple[Check, ...]
    tables: tuple[Table, ...]
    plots: tuple[Plot | Heatmap, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)  # what it was run with, versions and seconds included

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; each plot says its kind."""
        plots = [{"kind": type(plot).__name__.lower(), **asdict(plot)} for plot in self.plots]
        found: dict[str, Any] = plain({**asdict(self), "plots": plots})
        return found


def column(values: Sequence[float]) -> tuple[float | None, ...]:
    """Numbers for a curve or a table: None where one is not finite, which JSON has no word for."""
    return tuple(finite(float(value)) for value in values)
