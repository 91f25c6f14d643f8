"""Experiments: a question, a grid of seeded cells, the computation of one cell, and a conclusion from all of them."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnscale.lab.result import Check, Heatmap, Plot, Table

if TYPE_CHECKING:
    from attnscale.lab.outcomes import Outcomes

Setting = str | float | int | bool | None
Settings = Mapping[str, Setting]
Outcome = dict[str, Any]  # plain values, as JSON has them


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
class Conclusion:
    """A paragraph composed from the outcomes, with its checks, tables and plots."""

    text: str
    checks: tuple[Check, ...]
    tables: tuple[Table, ...]
    plots: tuple[Plot | Heatmap, ...]


@dataclass(frozen=True)
class Experiment:
    """`grid(quick)` lists the settings, `run(**settings, seed=…)` computes one cell, `conclude` reads all of them.

    A cell draws all its random numbers from its seed, on one thread, so it gives the same result wherever it runs.
    `version` must rise whenever run() computes something else, so that stored cells of an older version are not used.
    """

    name: str
    question: str
    grid: Callable[[bool], Sequence[Settings]]
    run: Callable[..., Outcome]
    conclude: "Callable[[Outcomes], Conclusion]"
    seeds: int = 8
    quick_seeds: int = 4
    trains: bool = False  # models, which may be trained on a GPU
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
