"""Rules and predictions in the terminal."""

from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table as Grid
from rich.text import Text

from attnscale.rules.listing import Entry
from attnscale.show.tables import Column, Row, Table
from attnscale.show.terminal import print_table, say
from attnscale.show.text import number
from attnscale.theory import Prediction
from attnscale.theory.prediction import Candidate

TONES = {"healthy": "fine", "sharp": "error", "diluted": "warning"}
FORMULAS = {"unscaled": "none", "inverse_sqrt": "1/√d_k", "inverse_dim": "1/d_k", "calibrated": "calibrated"}
COLUMNS = (
    Column("scale", is_text=True),
    Column("multiplier"),
    Column("spread"),
    Column("entropy (nats)", "entropy\n(nats)", drop=1),
    Column("entropy (% of max)", "entropy\n(% of max)"),
    Column("top-1"),
    Column("1−Σp²"),
    Column("verdict", is_text=True),
)


def show_catalogue(entries: Sequence[Entry]) -> None:
    """Print every rule with its formula, its use and its source."""
    console = Console()
    grid = Grid("rule", "use it for", box=None, pad_edge=False, padding=(0, 2, 1, 0))
    for entry in entries:
        rule = Group(Text(entry.call, style="bold"), Text(f"  {entry.formula}"))
        grid.add_row(rule, Group(Text(entry.use), Text(entry.source, style="dim")))
    console.print(grid)
    say(
        "Pass one as scale=… to attnscale.attention or attnscale.MultiheadAttention; a rule with one number can "
        "also be passed by name, as in scale='temperature:8'.",
        console,
    )


def show_prediction(prediction: Prediction, console: Console | None = None) -> None:
    """Print the predicted spreads, the candidate scales and the advice."""
    console, p = console or Console(), prediction
    start = f"d_model {p.d_model}, {p.heads} heads of d_k {p.head_dim}"
    say(f"{start}, weights by {p.initialisation}, {p.length} keys", console, "bold")
    say(
        f"q and k spread by {number(p.query_std)}, q·k by {number(p.score_std)}; "
        f"critical spread over {p.length:,} keys: {p.critical_spread:.3g}",
        console,
    )
    rows = tuple(_row(candidate) for candidate in p.candidates)
    print_table(Table(COLUMNS, (("", rows),)), console)
    console.print()
    say(p.advice, console)


def _row(candidate: Candidate) -> Row:
    softmax, spreads = candidate.softmax, (f"{candidate.scale:.4g}", number(candidate.spread))
    shares = (f"{100 * softmax.entropy_ratio:.1f}", f"{softmax.top1:.3f}", f"{softmax.jacobian_trace:.3f}")
    name = FORMULAS.get(candidate.name, candidate.name)
    return Row((name, *spreads, f"{softmax.entropy:.2f}", *shares, candidate.regime), tone=TONES[candidate.regime])
