"""What `attnscale compare` found, in the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from attnscale.comparing import Comparison, HeadChange
from attnscale.diagnose import Finding
from attnscale.diagnose.finding import grouped
from attnscale.plain import printable
from attnscale.show.check import STYLES, place
from attnscale.show.fitting import at_dots

SHOWN = 10  # heads told one by one; all of them are in JSON and in the report


def show_comparison(comparison: Comparison) -> None:
    """Print the heads that changed most, the findings that came and went, and the conclusion."""
    console = Console()
    for word, title in (("from", comparison.before), ("to", comparison.after)):
        console.print(Text(f"{word:4} {at_dots(printable(title), console.width)}", style="bold"))
    _print_heads(comparison.changed, "Changed themselves", console)
    _print_heads(comparison.carried, "Made as before, moved with what reaches them", console)
    _print_findings(comparison.came, "came", console)
    _print_findings(comparison.gone, "went", console)
    if comparison.notes:
        console.print()
    for sentence in comparison.notes:
        console.print(Text(at_dots(printable(sentence), console.width), style="dim"))
    console.print()
    style = "bold yellow" if comparison.changed or comparison.came else "bold green"
    console.print(Text(at_dots(printable(comparison.conclusion), console.width), style=style))


def by_factor(head: HeadChange) -> str:
    """What multiplied its scores."""
    return f"{head.by_factor}."


def _print_heads(heads: Sequence[HeadChange], title: str, console: Console) -> None:
    if not heads:
        return
    console.print()
    console.print(Text(title, style="dim"))
    for head in heads[:SHOWN]:
        console.print(Text(at_dots(printable(head.place), console.width), style="bold"))
        for sentence in (*map(str, head.changed), by_factor(head)):
            console.print(Padding(Text(sentence), (0, 0, 0, 2), expand=False))
    if len(heads) > SHOWN:
        console.print(Text(f"and {len(heads) - SHOWN} more, which moved less", style="dim"))


def _print_findings(findings: Sequence[Finding], word: str, console: Console) -> None:
    for group in grouped(findings):
        first = group.first
        console.print()
        head = (f"{word}: {first.severity} ", STYLES[first.severity])
        where = at_dots(printable(place(group)), console.width)
        console.print(Text.assemble(head, (printable(first.code), "bold"), f"  {where}"))
        message = at_dots(printable(first.message), console.width - 2)
        console.print(Padding(Text(message), (0, 0, 0, 2), expand=False))
