"""Printing in the terminal. Names are escaped: they can contain no markup and no control characters."""

from collections.abc import Iterable, Iterator

from rich.console import Console, JustifyMethod
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from attnscale.checking import Group
from attnscale.plain import printable_lines
from attnscale.show.tables import Column, Table
from attnscale.show.text import at_dots, place

STYLES = {"error": "red", "warning": "yellow", "note": "cyan", "fine": "green"}


def say(text: str, console: Console, style: str = "", indent: int = 0) -> None:
    """Print text, and break long names at their dots."""
    lines = Text(at_dots(printable_lines(text), console.width - indent), style=style)
    console.print(Padding(lines, (0, 0, 0, indent), expand=False) if indent else lines)


def print_table(table: Table, console: Console) -> None:
    """Print a table, each group under its title, and the names of the columns that did not fit."""
    for title, grid in grids(table, console.width):
        console.print()
        if title not in ("", "*"):
            say(title, console, "dim")
        console.print(grid)
    fitting = _fitting_widths(table, console.width)
    dropped = [column.heading for at, column in enumerate(table.columns) if at not in fitting]
    if dropped:
        say(f"Left out for lack of width: {', '.join(dropped)}. A wider terminal or --json shows them.", console, "dim")


def grids(table: Table, width: int) -> Iterator[tuple[str, Grid]]:
    """Yield the title and the grid of each group; a column has the same width in all groups."""
    widths = _fitting_widths(table, width)
    unbroken = {at: max([needed, *(len(row.cells[at]) for row in table.rows)]) for at, needed in widths.items()}
    gaps = len(widths) - 1
    gap = 2 if sum(unbroken.values()) + 2 * gaps <= width else 1
    for at in widths:  # text takes the space that is left
        wanted = max([unbroken[at], *map(len, _heading(table.columns[at]))])
        widths[at] += min(wanted - widths[at], max(0, width - sum(widths.values()) - gap * gaps))
    for title, rows in table.groups:
        grid = Grid(box=None, pad_edge=False, padding=(0, gap, 0, 0))
        for at, own in widths.items():
            column = table.columns[at]
            justify: JustifyMethod = "left" if column.is_text else "right"
            grid.add_column(column.short or column.heading, justify=justify, width=own, overflow="fold")
        for row in rows:
            *cells, last = (Text(printable_lines(row.cells[at])) for at in widths)
            grid.add_row(*cells, Text(last.plain, style=STYLES.get(row.tone, "")))
        yield title, grid


def _fitting_widths(table: Table, width: int) -> dict[int, int]:
    """Return the width of each column that fits."""
    widths = {at: _width(column, [row.cells[at] for row in table.rows]) for at, column in enumerate(table.columns)}
    for at in sorted(widths, key=lambda at: -table.columns[at].drop):
        if sum(needed + 1 for needed in widths.values()) <= width + 1 or not table.columns[at].drop:
            break
        del widths[at]
    return widths


def _width(column: Column, cells: Iterable[str]) -> int:
    """Return the least width that breaks no number, no word and no line of the heading."""
    texts = [*_heading(column), *cells]
    words = [word for text in texts for word in text.split()] if column.is_text else texts
    return max(map(len, words), default=1)


def _heading(column: Column) -> list[str]:
    return (column.short or column.heading).split("\n")


def print_group(group: Group, console: Console, before: str = "", after: str = "", advises: bool = True) -> None:
    """Print a group of equal findings once: severity, code, place, message and advice."""
    first = group.first
    style = STYLES[first.severity]
    where = at_dots(printable_lines(f"{place(group)}{after}"), console.width)
    console.print()
    heading = (f"{before}{first.severity} ", style), (printable_lines(first.code), f"bold {style}"), f"  {where}"
    console.print(Text.assemble(*heading))
    for sentence in (first.message, first.advice if advises else ""):
        if sentence:
            say(sentence, console, indent=2)
