"""What `attnscale check` found, in the terminal."""

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from attnscale.checking import Checked, Group, Line
from attnscale.diagnose.what_if import COLUMNS
from attnscale.show.naming import by_pattern, pattern, printable, ranges
from attnscale.show.numbers import number, share

STYLES = {"error": "red", "warning": "yellow", "note": "cyan"}
CONCLUSIONS = {"error": "bold red", "warning": "bold yellow"}
HEADINGS = ("spread", "expected\nspread", "scale", "entropy\nof ln n", "top-1", "satu-\nrated", "grad.\ngain")


def show_check(checked: Checked, console: Console | None = None) -> None:
    """Print the table of layers, the findings, and the conclusion. Names are data: nothing in them is markup."""
    console = console or Console()
    console.print(Text(printable(checked.title), style="bold"))
    console.print(Text(f"on {checked.fed}, {'every row' if checked.rows is None else f'{checked.rows} rows a head'}"))
    for title, members in by_pattern(line.name for line in checked.lines):
        _print_layers(checked, title, {name: index for index, name in members}, console)
    for word, meaning in checked.footnotes.items():
        console.print(Text(f"{word}: {meaning}", style="dim"))
    for group in checked.groups:
        console.print()
        _print_group(group, console)
    if checked.asked is not None and checked.what_if is not None:
        _print_what_if(checked, console)
    console.print()
    console.print(Text(checked.conclusion, style=CONCLUSIONS.get(checked.audit.worst or "", "bold green")))


def cells(line: Line) -> tuple[str, ...]:
    """The numbers of a layer, in the order of HEADINGS."""
    shares = (line.entropy_ratio, line.top1, line.saturated, line.gradient_gain)
    return number(line.spread), number(line.expected_spread), number(line.scale), *map(share, shares)


def place(group: Group) -> str:
    """Where a group of findings lies, in one line."""
    title, _ = pattern(group.first.layer)
    same = [pattern(layer)[1] for layer in group.layers if pattern(layer)[0] == title]
    if len(group.findings) == 1 or len(same) < len(group.layers) or not all(same):
        return f"{group.first.place}{', ' if group.others else ''}{group.others}"
    heads = sum(finding.head is not None for finding in group.findings)
    return f"{title}, * = {ranges(same)}{f' ({heads} heads)' if heads else ''}"


def _print_layers(checked: Checked, title: str, numbers: dict[str, str], console: Console) -> None:
    table = Table("layer", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    columns = zip(HEADINGS, *map(cells, checked.lines), strict=True)  # of all sections, so that they align
    for heading, *entries in columns:
        table.add_column(heading, justify="right", min_width=max(map(len, entries)))
    table.add_column("verdict", overflow="fold")
    for line in checked.lines:
        if line.name in numbers:
            verdict = Text(line.judgement, style=STYLES.get(line.severity or "", "green"))
            table.add_row(Text(numbers[line.name] or "·"), *cells(line), verdict)
    console.print()
    console.print(Text(printable(title), style="dim"))
    console.print(table)


def _print_group(group: Group, console: Console) -> None:
    first = group.first
    style = STYLES[first.severity]
    console.print(
        Text.assemble((f"{first.severity} ", style), (first.code, f"bold {style}"), f"  {printable(place(group))}")
    )
    for sentence in (first.message, first.advice):
        console.print(Padding(Text(printable(sentence)), (0, 0, 0, 2), expand=False))


def _print_what_if(checked: Checked, console: Console) -> None:
    assert checked.what_if is not None and checked.asked is not None  # noqa: PT018 (asked for just above)
    console.print()
    console.print(Text(f"What if {printable(checked.asked)} were scaled otherwise?", style="bold"))
    table = Table("scale by", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in COLUMNS:
        table.add_column(heading, justify="right")
    for row in checked.what_if.rows:
        table.add_row(row.name, *row.numbers())
    console.print(table)
