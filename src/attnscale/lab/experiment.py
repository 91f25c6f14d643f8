"""Experiments: a question, a grid of seeded cells, the computation of one cell, and a conclusion from all of them.

A conclusion has checks, tables and plots, which the terminal, the page and JSON show.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from attnscale.plain import plain

if TYPE_CHECKING:
    from attnscale.lab.outcomes import Outcomes

Setting = str | float | int | bool | None  # also the type of a cell in a table
Settings = Mapping[str, Setting]
Outcome = dict[str, Any]  # plain values for JSON


def product(**axes: Setting | Iterable[Setting]) -> list[Settings]:
    """List every combination of settings; each has one value or several.

    >>> product(rule="YaRN", length=[16, 64])
    [{'rule': 'YaRN', 'length': 16}, {'rule': 'YaRN', 'length': 64}]
    """
    values = [[axis] if axis is None or isinstance(axis, str | float | int) else axis for axis in axes.values()]
    return [dict(zip(axes, combination, strict=True)) for combination in itertools.product(*values)]


@dataclass(frozen=True)
class Table:
    """Rows under named columns; numbers are rounded when they are shown."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Setting, ...], ...]


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
    """Curves over one pair of axes; `notice` names the main feature in one line."""

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
    columns: tuple[Setting, ...]
    rows: tuple[Setting, ...]
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
class Conclusion:
    """A paragraph composed from the outcomes, with its checks, tables and plots."""

    text: str
    checks: Sequence[Check]
    tables: Sequence[Table]
    plots: Sequence[Plot | Heatmap]


@dataclass(frozen=True)
class Result:
    """Everything that an experiment found; the conclusion is composed from the numbers."""

    experiment: str
    question: str
    conclusion: str
    checks: Sequence[Check]
    tables: Sequence[Table]
    plots: Sequence[Plot | Heatmap]
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the run, with versions and seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; each plot names its kind."""
        plots = [{"kind": type(plot).__name__.lower(), **asdict(plot)} for plot in self.plots]
        found: dict[str, Any] = plain({**asdict(self), "plots": plots})
        return found


@dataclass(frozen=True)
class Cell:
    """One run of an experiment: its name, the version of its computation, and every setting including the seed.

    >>> cell = Cell("variance", 1, {"head_dim": 8, "seed": 0})
    >>> cell.digest == Cell("variance", 1, {"seed": 0, "head_dim": 8}).digest
    True
    """

    experiment: str
    version: int
    settings: Settings

    @property
    def digest(self) -> str:
        """Short hash of the whole configuration."""
        value = {"experiment": self.experiment, "version": self.version, "settings": dict(self.settings)}
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]

    def __str__(self) -> str:
        return f"{self.experiment} ({', '.join(f'{name}={value}' for name, value in self.settings.items())})"


@dataclass(frozen=True)
class Experiment:
    """A question. `grid(quick)` lists settings, `run(**settings, seed=…)` computes a cell, `conclude` takes all cells.

    A cell draws all its random numbers from its seed, on one thread, so it gives the same result wherever it runs.
    Increase `version` when run() changes its computation, so that stored cells of an older version are not used.
    """

    name: str
    question: str
    grid: Callable[[bool], Sequence[Settings]]
    run: Callable[..., Outcome]
    conclude: "Callable[[Outcomes], Conclusion]"
    seeds: int = 8
    quick_seeds: int = 4
    trains: bool = False  # trains models: may use a GPU, and a quick run decides nothing
    version: int = 1
    core_minutes: float = 0.0  # of all cells together, as recorded in docs/results

    def cells(self, quick: bool = False, seeds: int | None = None, device: str = "cpu") -> list[Cell]:
        """List the grid once for each seed, seed by seed, so that an early stop leaves complete grids."""
        seeds = (self.quick_seeds if quick else self.seeds) if seeds is None else seeds
        on = {"device": device} if self.trains and device != "cpu" else {}
        grid = self.grid(quick)
        return [
            Cell(self.name, self.version, {**settings, **on, "seed": seed})
            for seed in range(seeds)
            for settings in grid
        ]
