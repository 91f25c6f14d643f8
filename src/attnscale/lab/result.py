"""The result of an experiment: checks, tables and plots that the terminal, the page and JSON show."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from attnscale.plain import finite, plain

Value = str | float | int | bool | None


@dataclass(frozen=True)
class Table:
    """Rows under named columns; numbers are rounded when they are shown."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True)
class Curve:
    """y against x, with intervals over seeds if measured; `is_theory` marks a prediction."""

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...] | None = None
    high: tuple[float | None, ...] | None = None
    is_theory: bool = False


@dataclass(frozen=True)
class Plot:
    """Curves over one pair of axes; `notice` says in one line what to look at."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    notice: str
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Heatmap:
    """Coloured values[row][column]; `low` and `high` fix the colours where several maps are compared."""

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
    """A statement of theory or of a source, compared with a measurement."""

    statement: str
    holds: bool | None  # None: undecided, the measurement is not precise enough
    evidence: str


@dataclass(frozen=True)
class Result:
    """Everything that an experiment found; the conclusion is composed from the numbers."""

    experiment: str
    question: str
    conclusion: str
    checks: tuple[Check, ...]
    tables: tuple[Table, ...]
    plots: tuple[Plot | Heatmap, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the run, with versions and seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; each plot names its kind."""
        plots = [{"kind": type(plot).__name__.lower(), **asdict(plot)} for plot in self.plots]
        found: dict[str, Any] = plain({**asdict(self), "plots": plots})
        return found


def column(values: Sequence[float]) -> tuple[float | None, ...]:
    """Return numbers for a curve or a table, with None for those that are not finite, which JSON cannot write."""
    return tuple(finite(float(value)) for value in values)


def expected_curve(name: str, x: Sequence[float], y: Sequence[float]) -> Curve:
    """Return the prediction that belongs to the measured curve of this name."""
    return Curve(f"{name}, expected", tuple(map(float, x)), column(y), is_theory=True)
