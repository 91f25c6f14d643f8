"""The catalogue of rules in the terminal."""

from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from attnscale.rules.listing import Entry


def show_catalogue(entries: Sequence[Entry]) -> None:
    """Print every rule with its formula, what it is for and where it comes from."""
    console = Console()
    table = Table("rule", "use it for", box=None, pad_edge=False, padding=(0, 2, 1, 0))
    for entry in entries:
        rule = Group(Text(entry.call, style="bold"), Text(f"  {entry.formula}"))
        table.add_row(rule, Group(Text(entry.use), Text(entry.source, style="dim")))
    console.print(table)
    console.print(
        "Pass one as scale=… to attnscale.attention or attnscale.MultiheadAttention; a rule with one number also "
        "goes by name, as in scale='temperature:8'.",
        highlight=False,
    )
