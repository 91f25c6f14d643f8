"""Helpers for tests of experiments: outcomes of the quick grid, measured or made up, and their conclusions."""

from collections.abc import Callable
from functools import lru_cache

from attnscale.lab.experiment import Cell, Conclusion
from attnscale.lab.experiments import EXPERIMENTS
from attnscale.lab.outcomes import Outcomes
from attnscale.lab.sweep import run_cell


@lru_cache
def quick(name: str) -> Outcomes:
    """Run the quick grid of an experiment."""
    cells = EXPERIMENTS[name].cells(quick=True)
    return Outcomes([(cell.settings, run_cell(cell).outcome) for cell in cells])


@lru_cache
def sketch(name: str) -> Outcomes:
    """Run the quick grid of an experiment that trains with one seed and two steps, as if each seed gave the same."""
    found, outcomes = [], {}
    for cell in EXPERIMENTS[name].cells(quick=True):
        settings = {setting: value for setting, value in cell.settings.items() if setting != "seed"}
        short = settings | {"seed": 0} | ({"steps": 3} if "steps" in settings else {})
        key = str(short)
        if key not in outcomes:
            outcomes[key] = run_cell(Cell(name, 1, short)).outcome
        found.append((cell.settings, outcomes[key]))
    return Outcomes(found)


def rerun(name: str, **where: object) -> Outcomes:
    """Return the quick outcomes, with the cells of these settings run again under what a test has patched."""
    return Outcomes(
        [
            (own, run_cell(Cell(name, 1, own)).outcome if where.items() <= dict(own).items() else found)
            for own, found in quick(name)
        ]
    )


def made_up(outcomes: Outcomes, change: Callable[[dict, dict], dict]) -> Outcomes:
    """Return the outcomes with what change(settings, outcome) gives in their place."""
    return Outcomes([(own, {**found, **change(dict(own), found)}) for own, found in outcomes])


def concluded(name: str, outcomes: Outcomes | None = None) -> Conclusion:
    return EXPERIMENTS[name].conclude(outcomes or quick(name))


def failed(conclusion: Conclusion) -> list[str]:
    return [check.statement for check in conclusion.checks if check.holds is False]
