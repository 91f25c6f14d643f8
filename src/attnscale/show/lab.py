"""Experiments in the terminal: the list of them, and what one found."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from attnscale.lab.experiment import Experiment
from attnscale.lab.result import Result
from attnscale.show.tables import lab_table, table_of
from attnscale.show.terminal import print_table, say


def show_experiments(experiments: Iterable[Experiment]) -> None:
    """Print what can be run."""
    console = Console()
    rows = [
        (
            one.name,
            one.question,
            f"{len(one.cells()):,}",
            f"{one.core_minutes:{'.2g' if one.core_minutes < 10 else '.0f'}}",
        )
        for one in experiments
    ]
    print_table(table_of(("experiment", "question", "cells", "minutes\non a core"), rows, text=(0, 1)), console)
    console.print()
    say("Run one with 'attnscale lab NAME', or a small version of it with --quick.", console)


def show_result(result: Result) -> None:
    """Print the tables, what was checked, and the conclusion."""
    console = Console()
    say(f"{result.experiment}: {result.question}", console, "bold")
    for table in result.tables:
        console.print()
        say(table.title, console, "italic")
        print_table(lab_table(table), console)
    checks = Grid(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    for check in result.checks:
        word, style = {True: ("pass", "green"), False: ("fail", "red"), None: ("undecided", "yellow")}[check.holds]
        evidence = "" if check.holds else f": {check.evidence}"
        checks.add_row(Text(word, style=style), Text(f"{check.statement}{evidence}"))
    console.print()
    console.print(checks)
    console.print()
    say(result.conclusion, console)
    if (margin := result.settings.get("±")) is not None:
        say(f"±: {margin}.", console, "dim")
