"""Experiments in the terminal: the list of them, and what one found."""

import math
from collections.abc import Iterable
from itertools import accumulate

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table as Grid
from rich.text import Text

from attnscale.lab.experiment import Experiment
from attnscale.lab.result import Check, Result, Table
from attnscale.show.numbers import DIGITS, shown

ERROR_DIGITS = 2


def show_experiments(experiments: Iterable[Experiment]) -> None:
    """Print what can be run."""
    console = Console()
    grid = Grid("experiment", "question", "cells", "minutes\non a core", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in grid.columns[-2:]:
        column.justify = "right"
    for experiment in experiments:
        minutes = f"{experiment.core_minutes:{'.2g' if experiment.core_minutes < 10 else '.0f'}}"
        cells = f"{len(experiment.cells()):,}"
        grid.add_row(Text(experiment.name, style="bold"), experiment.question, cells, minutes)
    console.print(grid)
    console.print("\nRun one with 'attnscale lab NAME', or a small version of it with --quick.", highlight=False)


def show_result(result: Result) -> None:
    """Print the tables, what was checked, and the conclusion."""
    console = Console()
    console.print(Text(f"{result.experiment}: {result.question}", style="bold"))
    for table in result.tables:
        console.print()
        console.print(Text(table.title, style="italic"))
        grid = _grid(table, console.width)
        console.print(grid)
        left_out = table.columns[len(grid.columns) :]
        if left_out:
            console.print(Text(f"No room for: {', '.join(left_out)}. The page and the JSON have them.", style="dim"))
    console.print()
    console.print(_checks(result.checks))
    console.print()
    console.print(Text(result.conclusion))


def _checks(checks: Iterable[Check]) -> Grid:
    """Return a row for each check, with the evidence unless it passes."""
    grid = Grid(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    for check in checks:
        word, style = {True: ("pass", "green"), False: ("fail", "red"), None: ("undecided", "yellow")}[check.holds]
        evidence = "" if check.holds else f": {check.evidence}"
        grid.add_row(Text(word, style=style), Text(f"{check.statement}{evidence}"))
    return grid


def _grid(table: Table, width: int) -> Grid:
    """Columns as wide as their longest word, so that none breaks inside one; as many as there is room for."""
    digits = [ERROR_DIGITS if heading == "±" else DIGITS for heading in table.columns]
    written = [tuple(map(shown, row, digits)) for row in table.rows]
    columns = list(zip(table.columns, *written, strict=True))
    needed = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    gap = 2 if sum(needed) + 2 * len(needed) <= width else 1
    fitting = sum(total - gap <= width for total in accumulate(least + gap for least in needed)) or 1
    grid = Grid(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    spare = width - sum(needed[:fitting]) - gap * (fitting - 1)
    for number, heading in enumerate(table.columns[:fitting]):
        more = max(0, min(max(map(len, columns[number])) - needed[number], spare))
        spare -= more
        is_text = any(isinstance(row[number], str) for row in table.rows)
        grid.add_column(heading, justify="left" if is_text else "right", width=needed[number] + more)
    for cells in written:
        grid.add_row(*map(Text, cells[:fitting]))
    return grid


class TimeLeft(ProgressColumn):
    """How long the cells that are left will take, as fast as those of this run were."""

    def render(self, task: Task) -> Text:
        """`1:05 left`; nothing before the first cell."""
        run = task.completed - (task.fields["reused"] or 0)
        if run <= 0 or task.total is None or task.elapsed is None:
            return Text("")
        seconds = math.ceil(task.elapsed / run * (task.total - task.completed))
        return Text(f"{seconds // 60}:{seconds % 60:02d} left")


def sweep_progress(console: Console) -> Progress:
    """A bar of cells done, with the time left; none where the console is no terminal."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("cells", markup=False),
        TimeLeft(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
