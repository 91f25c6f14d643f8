"""Results of `attnscale check` and `attnscale compare` in the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from attnscale.checking import Checked, Group
from attnscale.comparing import Comparison, HeadChange
from attnscale.comparing.backend_comparison import HEADINGS, BackendComparison
from attnscale.diagnose import Finding
from attnscale.diagnose.finding import grouped
from attnscale.diagnose.what_if import COLUMNS
from attnscale.plain import printable
from attnscale.show.text import at_dots, by_pattern, columns, fitting, place, width_of
from attnscale.watching.seen import padding_note

STYLES = {"error": "red", "warning": "yellow", "note": "cyan"}
DROPPABLE = ("entropy", "top-1", "max", "1−Σp²")  # columns of a what-if, the first to go where there is no room
SHOWN = 10  # changed heads that are listed; JSON and the report have all


def show_check(checked: Checked) -> None:
    """Print the table of layers, the findings, and the conclusion. Names are data: nothing in them is markup."""
    console = Console()
    _print(checked.title, console, "bold")
    _print(f"on {checked.fed}, {'every row' if checked.rows is None else f'{checked.rows} rows per head'}", console)
    _print_layers(checked, console)
    for sentence in padding_note(checked.audit.layers.values()):
        _print(sentence, console)
    for word, meaning in checked.footnotes.items():
        _print(f"{word}: {meaning}", console, "dim")
    for group in checked.groups:
        print_group(group, console)
    if checked.audit.unchecked:
        console.print()
    for sentence in checked.audit.unchecked:
        _print(sentence, console, "dim")
    if checked.asked is not None and checked.what_if is not None:
        _print_what_if(checked, console)
    console.print()
    style = STYLES[checked.audit.worst] if checked.audit.worst in ("error", "warning") else "green"
    _print(checked.conclusion, console, f"bold {style}")


def print_group(group: Group, console: Console, before: str = "", after: str = "", advises: bool = True) -> None:
    """Print findings that say the same, once: severity, code, place, message and advice."""
    first = group.first
    style = STYLES[first.severity]
    where = at_dots(printable(f"{place(group)}{after}"), console.width)
    console.print()
    heading = (f"{before}{first.severity} ", style), (printable(first.code), f"bold {style}"), f"  {where}"
    console.print(Text.assemble(*heading))
    for sentence in (first.message, first.advice if advises else ""):
        if sentence:
            _print_indented(sentence, console)


def _print(text: str, console: Console, style: str = "") -> None:
    console.print(Text(at_dots(printable(text), console.width), style=style))


def _print_indented(text: str, console: Console) -> None:
    console.print(Padding(Text(at_dots(printable(text), console.width - 2)), (0, 0, 0, 2), expand=False))


def _print_layers(checked: Checked, console: Console) -> None:
    """Print a table for each pattern of names, with columns of the same width in all of them."""
    told = columns()
    groups = by_pattern(line.name for line in checked.lines)
    widths = [width_of(column.short, *(column.cell(line) for line in checked.lines)) for column in told]
    verdicts = width_of("verdict", *(word for line in checked.lines for word in line.verdict_text.split()))
    lines = {line.name: line for line in checked.lines}
    for title, members in groups:
        room = console.width - width_of("layer", *(index for index, _ in members)) - verdicts - 2
        staying = fitting(widths, room, range(len(told) - 1, 0, -1))
        table = _table("layer")
        for position in staying:
            table.add_column(told[position].short, justify="right", min_width=widths[position])
        table.add_column("verdict", overflow="fold", min_width=verdicts)
        for index, name in members:
            line = lines[name]
            verdict = Text(line.verdict_text, style=STYLES.get(line.severity or "", "green"))
            table.add_row(Text(index or "·"), *(told[position].cell(line) for position in staying), verdict)
        console.print()
        if title != "*":
            _print(title, console, "dim")
        console.print(table)
        _print_left_out([column.long for column in told], staying, console)


def _print_left_out(names: Sequence[str], staying: Sequence[int], console: Console) -> None:
    left = [name for position, name in enumerate(names) if position not in staying]
    if left:
        _print(f"In a wider terminal, and with --json: {', '.join(left)}.", console, "dim")


def _table(*headings: str) -> Table:
    return Table(*headings, box=None, pad_edge=False, padding=(0, 1, 0, 0))


def _print_what_if(checked: Checked, console: Console) -> None:
    assert checked.what_if is not None and checked.asked is not None  # noqa: PT018  # asked for just above
    console.print()
    _print(f"What if {checked.asked} were scaled otherwise?", console, "bold")
    rows = [(row.name, row.numbers()) for row in checked.what_if.rows]
    headings = list(COLUMNS)
    widths = [width_of(heading, *(cells[at] for _, cells in rows)) for at, heading in enumerate(headings)]
    names = width_of("scale by", *(name for name, _ in rows))
    staying = fitting(widths, console.width - names - 1, [headings.index(heading) for heading in DROPPABLE])
    table = _table()
    table.add_column("scale by", overflow="fold", min_width=names)
    for position in staying:
        table.add_column(headings[position], justify="right", min_width=widths[position])
    for name, cells in rows:
        table.add_row(name, *(cells[position] for position in staying))
    console.print(table)
    _print_left_out(headings, staying, console)


def show_comparison(comparison: Comparison | BackendComparison) -> None:
    """Print a comparison of two models, or of the backends of one."""
    if isinstance(comparison, BackendComparison):
        _show_backends(comparison)
    else:
        _show_sides(comparison)


def _show_sides(comparison: Comparison) -> None:
    """Print the heads that changed most, new findings and those that are gone, and the conclusion."""
    console = Console()
    for word, title in (("from", comparison.before), ("to", comparison.after)):
        _print(f"{word:4} {title}", console, "bold")
    _print_heads(comparison.changed, "Heads whose own weights or scale changed", console)
    _print_heads(comparison.carried, "Heads with the same weights, whose inputs changed", console)
    _print_findings(comparison.new, "new", console)
    _print_findings(comparison.gone, "gone", console)
    if comparison.notes:
        console.print()
    for sentence in comparison.notes:
        _print(sentence, console, "dim")
    console.print()
    style = "bold yellow" if comparison.changed or comparison.new else "bold green"
    _print(comparison.conclusion, console, style)


def _show_backends(comparison: BackendComparison) -> None:
    """Print the layers under each backend, what differs, backends that did not run, and the conclusion."""
    console = Console()
    _print(comparison.title, console, "bold")
    _print(f"on {comparison.fed}, {' and '.join(comparison.backends) or 'no backend'}", console)
    for layer in dict.fromkeys(row.layer for row in comparison.rows):
        table = _table(*HEADINGS[1:])
        for cells, row in zip(comparison.cells(), comparison.rows, strict=True):
            if row.layer == layer:
                table.add_row(*map(printable, cells[1:]), style="yellow" if row.differences else "")
        console.print()
        _print(layer, console, "dim")
        console.print(table)
    console.print()
    for sentence in (*map(str, comparison.differing), *comparison.remarks):
        _print(sentence, console)
    style = "bold green" if comparison.is_compared and comparison.first is None else "bold yellow"
    _print(comparison.conclusion, console, style)


def _print_heads(heads: Sequence[HeadChange], title: str, console: Console) -> None:
    if not heads:
        return
    console.print()
    _print(title, console, "dim")
    for head in heads[:SHOWN]:
        _print(head.place, console, "bold")
        for sentence in (*head.text.split("; "), f"{head.by_factor}."):
            _print_indented(sentence, console)
    if len(heads) > SHOWN:
        _print(f"and {len(heads) - SHOWN} more, which changed less", console, "dim")


def _print_findings(findings: Sequence[Finding], word: str, console: Console) -> None:
    for group in grouped(findings):
        print_group(group, console, before=f"{word}: ", advises=False)
