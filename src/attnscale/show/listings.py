"""Rules and predictions in the terminal."""

from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from attnscale.rules.listing import Entry
from attnscale.show.text import number
from attnscale.theory import Prediction

STYLES = {"healthy": "green", "sharp": "red", "diluted": "yellow"}
FORMULAS = {"unscaled": "none", "inverse_sqrt": "1/√d_k", "inverse_dim": "1/d_k", "calibrated": "calibrated"}
NARROW = 72  # columns of a terminal: with fewer, columns would break words


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


def show_prediction(prediction: Prediction, console: Console | None = None) -> None:
    """Print the predicted spreads, the candidate scales and the advice."""
    console, p = console or Console(), prediction
    console.print(
        f"d_model {p.d_model}, {p.heads} heads of d_k {p.head_dim}, weights by {p.initialisation}, {p.length} keys",
        style="bold",
        highlight=False,
    )
    console.print(
        f"q and k spread by {number(p.query_std)}, q·k by {number(p.score_std)}; "
        f"the critical spread over {p.length:,} keys is {p.critical_spread:.3g}",
        highlight=False,
    )
    console.print()
    is_narrow = console.width < NARROW
    table = Table("scale", box=None, pad_edge=False, padding=(0, 1 if is_narrow else 2, 0, 0))
    entropy = [*([] if is_narrow else ["entropy"]), "entropy\n% of max"]
    for heading in ("multi-\nplier" if is_narrow else "multiplier", "spread", *entropy, "top-1", "1−Σp²"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for candidate in p.candidates:
        softmax = candidate.softmax
        nats = [] if is_narrow else [f"{softmax.entropy:.2f}"]
        shares = (f"{100 * softmax.entropy_ratio:.1f}", f"{softmax.top1:.3f}", f"{softmax.jacobian_trace:.3f}")
        regime = Text(candidate.regime, style=STYLES[candidate.regime])
        name = FORMULAS.get(candidate.name, candidate.name)
        table.add_row(name, f"{candidate.scale:.4g}", number(candidate.spread), *nats, *shares, regime)
    console.print(table)
    console.print()
    console.print(p.advice, highlight=False)
