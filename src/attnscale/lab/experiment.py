"""Experiment: a question, a grid of cells, what one cell computes, and what all of them together say."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attnscale.lab.cell import Cell, Outcome, Settings
from attnscale.lab.outcomes import Outcomes
from attnscale.lab.result import Check, Heatmap, Plot, Table


@dataclass(frozen=True)
class Conclusion:
    """What the outcomes say: one paragraph composed from them, and what it rests on."""

    text: str
    checks: tuple[Check, ...]
    tables: tuple[Table, ...]
    plots: tuple[Plot | Heatmap, ...]


@dataclass(frozen=True)
class Experiment:
    """`grid(quick)` lists the settings, `run(**settings, seed=…)` computes one cell, `conclude` reads them all.

    What run() computes is the same wherever it runs: it draws everything from its seed, on one thread. `version` rises
    whenever it computes something else, so that no cell of before is taken for one of now.
    """

    name: str
    question: str
    grid: Callable[[bool], Sequence[Settings]]
    run: Callable[..., Outcome]
    conclude: Callable[[Outcomes], Conclusion]
    seeds: int = 8
    quick_seeds: int = 4
    trains: bool = False  # a model, which may be put on a GPU
    version: int = 1
    core_minutes: float = 0.0  # of all cells together, as docs/results has them recorded

    def cells(self, quick: bool = False, seeds: int | None = None, device: str = "cpu") -> list[Cell]:
        """The grid, once a seed: all settings of one seed before the next, so that an early stop leaves whole grids."""
        seeds = (self.quick_seeds if quick else self.seeds) if seeds is None else seeds
        on = {"device": device} if self.trains and device != "cpu" else {}
        grid = self.grid(quick)
        return [
            Cell(self.name, self.version, {**settings, **on, "seed": seed})
            for seed in range(seeds)
            for settings in grid
        ]
