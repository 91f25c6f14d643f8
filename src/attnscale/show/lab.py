"""Experiments in the terminal: the list of them, and what one found."""

from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as Grid
from rich.text import Text

from attnscale.lab.experiment import Experiment, Result, Table
from attnscale.show.text import DIGITS, fitting, shown

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
    checks = Grid(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    for check in result.checks:
        word, style = {True: ("pass", "green"), False: ("fail", "red"), None: ("undecided", "yellow")}[check.holds]
        evidence = "" if check.holds else f": {check.evidence}"
        checks.add_row(Text(word, style=style), Text(f"{check.statement}{evidence}"))
    console.print()
    console.print(checks)
    console.print()
    console.print(Text(result.conclusion))
    if (margin := result.settings.get("±")) is not None:
        console.print(Text(f"±: {margin}.", style="dim"))


def _grid(table: Table, width: int) -> Grid:
    """Return the columns that there is room for, each at least as wide as its longest word."""
    digits = [ERROR_DIGITS if heading == "±" else DIGITS for heading in table.columns]
    written = [tuple(map(shown, row, digits)) for row in table.rows]
    columns = zip(table.columns, *written, strict=True)
    needed = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    gap = 2 if sum(needed) + 2 * len(needed) <= width else 1
    staying = fitting(needed, width, range(len(needed) - 1, 0, -1))
    grid = Grid(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for position in staying:
        is_text = any(isinstance(row[position], str) for row in table.rows)
        justify = "left" if is_text else "right"
        grid.add_column(table.columns[position], justify=justify, min_width=needed[position])  # type: ignore[arg-type]
    for cells in written:
        grid.add_row(*(Text(cells[position]) for position in staying))
    return grid


def sweep_progress(console: Console) -> Progress:
    """Return a bar of finished cells, with the time left; it is not drawn where the console is no terminal."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("cells", markup=False),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
