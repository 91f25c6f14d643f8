"""Results of `attnscale check` and `attnscale compare` in the terminal."""

from collections.abc import Sequence

from rich.console import Console

from attnscale.checking import Checked
from attnscale.comparing import Comparison, HeadChange
from attnscale.comparing.backend_comparison import BackendComparison
from attnscale.diagnose import Finding
from attnscale.diagnose.finding import grouped
from attnscale.show.tables import backend_table, layer_table, what_if_table
from attnscale.show.terminal import STYLES, print_group, print_table, say
from attnscale.watching.seen import padding_note

SHOWN = 10  # changed heads to list; JSON and the report have all


def show_check(checked: Checked) -> None:
    """Print the table of layers, the findings, and the conclusion."""
    console, audit = Console(), checked.audit
    say(checked.title, console, "bold")
    say(f"on {checked.fed}, {'every row' if checked.rows is None else f'{checked.rows} rows per head'}", console)
    print_table(layer_table(checked.lines), console)
    for sentence in padding_note(audit.layers.values()):
        say(sentence, console)
    for word, meaning in checked.footnotes.items():
        say(f"{word}: {meaning}", console, "dim")
    for group in checked.groups:
        print_group(group, console)
    if audit.unchecked:
        console.print()
    for sentence in audit.unchecked:
        say(sentence, console, "dim")
    if checked.asked is not None and checked.what_if is not None:
        console.print()
        say(f"What if {checked.asked} were scaled otherwise?", console, "bold")
        print_table(what_if_table(checked.what_if), console)
    console.print()
    tone = audit.worst if audit.worst in ("error", "warning") else "fine"
    say(checked.conclusion, console, f"bold {STYLES[tone]}")


def show_comparison(comparison: Comparison | BackendComparison) -> None:
    """Print a comparison of two models, or of the backends of one."""
    console = Console()
    if isinstance(comparison, BackendComparison):
        _show_backends(comparison, console)
    else:
        _show_sides(comparison, console)


def _show_sides(comparison: Comparison, console: Console) -> None:
    for word, title in (("before:", comparison.before), ("after:", comparison.after)):
        say(f"{word:7} {title}", console, "bold")
    _print_heads(comparison.changed, "Heads whose own weights or scale changed", console)
    _print_heads(comparison.carried, "Heads with the same weights, whose inputs changed", console)
    _print_findings(comparison.new, "new", console)
    _print_findings(comparison.gone, "gone", console)
    if comparison.notes:
        console.print()
    for sentence in comparison.notes:
        say(sentence, console, "dim")
    console.print()
    say(comparison.conclusion, console, "bold yellow" if comparison.changed or comparison.new else "bold green")


def _show_backends(comparison: BackendComparison, console: Console) -> None:
    say(comparison.title, console, "bold")
    say(f"on {comparison.fed}, {' and '.join(comparison.backends) or 'no backend'}", console)
    if comparison.rows:
        print_table(backend_table(comparison), console)
    console.print()
    for sentence in (*map(str, comparison.differing), *comparison.remarks):
        say(sentence, console)
    style = "bold green" if comparison.is_compared and comparison.first is None else "bold yellow"
    say(comparison.conclusion, console, style)


def _print_heads(heads: Sequence[HeadChange], title: str, console: Console) -> None:
    if not heads:
        return
    console.print()
    say(title, console, "dim")
    for head in heads[:SHOWN]:
        say(head.place, console, "bold")
        for sentence in (*head.text.split("; "), f"{head.by_factor}."):
            say(sentence, console, indent=2)
    if len(heads) > SHOWN:
        say(f"and {len(heads) - SHOWN} more with smaller changes", console, "dim")


def _print_findings(findings: Sequence[Finding], word: str, console: Console) -> None:
    for group in grouped(findings):
        print_group(group, console, before=f"{word}: ", advises=False)
