"""What the tests of experiments share: the quick grid run once, parts of it run again or made up, what fails then."""

from collections.abc import Callable
from functools import lru_cache

from attnscale.lab.catalogue import EXPERIMENTS
from attnscale.lab.cell import Cell
from attnscale.lab.experiment import Conclusion
from attnscale.lab.outcomes import Outcomes
from attnscale.lab.running import run_cell


@lru_cache
def quick(name: str) -> Outcomes:
    """The outcomes of an experiment's quick grid."""
    cells = EXPERIMENTS[name].cells(quick=True)
    return Outcomes([(cell.settings, run_cell(cell).outcome) for cell in cells])


def concluded(name: str, outcomes: Outcomes | None = None) -> Conclusion:
    return EXPERIMENTS[name].conclude(outcomes or quick(name))


def rerun(name: str, **where: object) -> Outcomes:
    """The quick outcomes, with the cells of these settings run again: on what a test has changed meanwhile."""
    return Outcomes(
        [
            (own, run_cell(Cell(name, 1, own)).outcome if where.items() <= dict(own).items() else found)
            for own, found in quick(name)
        ]
    )


def made_up(name: str, change: Callable[[dict, dict], dict], outcomes: Outcomes | None = None) -> Outcomes:
    """The quick outcomes, or these, with what change(settings, outcome) says instead."""
    return Outcomes([(own, {**found, **change(dict(own), found)}) for own, found in outcomes or quick(name)])


def failing(conclusion: Conclusion) -> list[str]:
    return [check.statement for check in conclusion.checks if not check.holds]


def all_hold(conclusion: Conclusion) -> bool:
    return not failing(conclusion) and f"All {len(conclusion.checks)} checks hold." in conclusion.text


def seen_to_be_wrong(conclusion: Conclusion, statement: str) -> bool:
    """Whether the check that holds this fails, and the conclusion says so."""
    failed = [own for own in failing(conclusion) if statement in own]
    return bool(failed) and "not confirmed" in conclusion.text and all(own in conclusion.text for own in failed)
