"""What `attnscale check` found, in the terminal."""

import math
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from attnscale.checking import Checked, Group, Line
from attnscale.diagnose.what_if import COLUMNS
from attnscale.measure.statistics import STATISTICS, Place, Statistic, in_place
from attnscale.plain import printable
from attnscale.show.columns import Column
from attnscale.show.fitting import at_dots, kept, width_of
from attnscale.show.naming import by_pattern, pattern, ranges
from attnscale.show.numbers import number
from attnscale.watching.seen import padding_told

STYLES = {"error": "red", "warning": "yellow", "note": "cyan"}
DISPENSABLE = ("entropy", "top-1", "max", "gain")  # columns of a what-if, the first to go where there is no room
CONCLUSIONS = {"error": "bold red", "warning": "bold yellow"}


def show_check(checked: Checked) -> None:
    """Print the table of layers, the findings, and the conclusion. Names are data: nothing in them is markup."""
    console = Console()
    console.print(Text(at_dots(printable(checked.title), console.width), style="bold"))
    console.print(
        Text(f"on {printable(checked.fed)}, {'every row' if checked.rows is None else f'{checked.rows} rows a head'}")
    )
    for title, members in by_pattern(line.name for line in checked.lines):
        _print_layers(checked, title, {name: index for index, name in members}, console)
    for sentence in padding_told(checked.audit.layers.values()):
        console.print(Text(sentence))
    for word, meaning in checked.footnotes.items():
        console.print(Text(f"{word}: {meaning}", style="dim"))
    for group in checked.groups:
        console.print()
        _print_group(group, console)
    if checked.audit.unchecked:
        console.print()
    for sentence in checked.audit.unchecked:
        console.print(Text(at_dots(printable(sentence), console.width), style="dim"))
    if checked.asked is not None and checked.what_if is not None:
        _print_what_if(checked, console)
    console.print()
    conclusion = at_dots(printable(checked.conclusion), console.width)
    console.print(Text(conclusion, style=CONCLUSIONS.get(checked.audit.worst or "", "bold green")))


def columns() -> list[Column[Line]]:
    """What is told of a layer: the spread beside the one expected, the scale, and the other statistics."""
    spread, *others = (_column(entry) for entry in in_place(Place.CHECK))
    expected = Column[Line]("expected\nspread", "expected spread", lambda line: number(line.expected_spread))
    scale = Column[Line].of(STATISTICS["scale"], lambda line: line.scale)
    return [spread, expected, scale, *others]


def _column(entry: Statistic) -> Column[Line]:
    return Column.of(
        entry, lambda line: line.statistics[entry.name], lambda line: line.errors.get(entry.name, math.nan)
    )


def place(group: Group) -> str:
    """Where a group of findings lies, in one line."""
    if len(group.layers) == 1:
        return group.where(1)
    title, _ = pattern(group.first.layer)
    same = [pattern(layer)[1] for layer in group.layers if pattern(layer)[0] == title]
    if len(group.findings) == 1 or len(same) < len(group.layers) or not all(same):
        return f"{group.first.place}{', ' if group.others else ''}{group.others}"
    heads = sum(finding.head is not None for finding in group.findings)
    return f"{title}, * = {ranges(same)}{f' ({heads} heads)' if heads else ''}"


def _print_layers(checked: Checked, title: str, numbers: dict[str, str], console: Console) -> None:
    told = columns()
    # of all sections, so that they align
    widths = [width_of(column.short, *(column.cell(line) for line in checked.lines)) for column in told]
    verdicts = width_of("verdict", *(word for line in checked.lines for word in line.judgement.split()))
    room = console.width - width_of("layer", *numbers.values()) - verdicts - 2
    staying = kept(widths, room, range(len(told) - 1, 0, -1))
    table = Table("layer", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for position in staying:
        table.add_column(told[position].short, justify="right", min_width=widths[position])
    table.add_column("verdict", overflow="fold", min_width=verdicts)
    for line in checked.lines:
        if line.name in numbers:
            verdict = Text(line.judgement, style=STYLES.get(line.severity or "", "green"))
            cells = (told[position].cell(line) for position in staying)
            table.add_row(Text(numbers[line.name] or "·"), *cells, verdict)
    console.print()
    console.print(Text(at_dots(printable(title), console.width), style="dim"))
    console.print(table)
    _tell_left_out([column.long for column in told], staying, console)


def _tell_left_out(names: Sequence[str], staying: Collection[int], console: Console) -> None:
    left = [name for position, name in enumerate(names) if position not in staying]
    if left:
        console.print(Text(f"In a wider terminal, and with --json: {', '.join(left)}.", style="dim"))


def _print_group(group: Group, console: Console) -> None:
    first = group.first
    style = STYLES[first.severity]
    console.print(
        Text.assemble(
            (f"{first.severity} ", style),
            (printable(first.code), f"bold {style}"),
            f"  {at_dots(printable(place(group)), console.width)}",
        )
    )
    for sentence in (first.message, first.advice):
        console.print(Padding(Text(at_dots(printable(sentence), console.width - 2)), (0, 0, 0, 2), expand=False))


def _print_what_if(checked: Checked, console: Console) -> None:
    assert checked.what_if is not None and checked.asked is not None  # noqa: PT018 (asked for just above)
    console.print()
    asked = at_dots(printable(checked.asked), console.width)
    console.print(Text(f"What if {asked} were scaled otherwise?", style="bold"))
    rows = [(row.name, row.numbers()) for row in checked.what_if.rows]
    headings = list(COLUMNS)
    widths = [width_of(heading, *(cells[at] for _, cells in rows)) for at, heading in enumerate(headings)]
    names = width_of("scale by", *(name for name, _ in rows))
    staying = kept(widths, console.width - names - 1, [headings.index(heading) for heading in DISPENSABLE])
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("scale by", overflow="fold", min_width=names)
    for position in staying:
        table.add_column(headings[position], justify="right", min_width=widths[position])
    for name, cells in rows:
        table.add_row(name, *(cells[position] for position in staying))
    console.print(table)
    _tell_left_out(headings, staying, console)
