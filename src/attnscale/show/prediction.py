"""A prediction in the terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnscale.show.numbers import number
from attnscale.theory import Prediction

FORMULAS = {"unscaled": "none", "inverse_sqrt": "1/√d_k", "inverse_dim": "1/d_k", "calibrated": "calibrated"}
NARROW = 72  # columns of a terminal: with fewer, the entropy is told as a share of ln n alone
STYLES = {"healthy": "green", "saturated": "red", "diluted": "yellow"}


def show_prediction(prediction: Prediction, console: Console | None = None) -> None:
    """Print the predicted spreads, the candidate scales and the advice."""
    console = console or Console()
    p = prediction
    console.print(
        f"d_model {p.d_model}, {p.heads} heads of d_k {p.head_dim}, weights by {p.initialisation}, {p.length} keys",
        style="bold",
        highlight=False,
    )
    console.print(
        f"q and k spread by {number(p.query_std)}, q·k by {number(p.score_std)}; "
        f"softmax over {p.length} keys freezes at {p.freezing_point:.3g}",
        highlight=False,
    )
    console.print()
    console.print(_candidates(p, is_narrow=console.width < NARROW))
    console.print()
    console.print(p.advice, highlight=False)


def _candidates(prediction: Prediction, is_narrow: bool) -> Table:
    table = Table("scale", box=None, pad_edge=False, padding=(0, 1 if is_narrow else 2, 0, 0))
    entropy = ["entropy\nof ln n"] if is_narrow else ["entropy", "of ln n"]
    for heading in ("multi-\nplier" if is_narrow else "multiplier", "spread", *entropy, "top-1", "gradient\ngain"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("softmax", no_wrap=True)
    for candidate in prediction.candidates:
        softmax = candidate.softmax
        table.add_row(
            FORMULAS[candidate.name],
            f"{candidate.scale:.4g}",
            number(candidate.spread),
            *([] if is_narrow else [f"{softmax.entropy:.2f}"]),
            f"{softmax.entropy_ratio:.3f}",
            f"{softmax.top1:.3f}",
            f"{softmax.gradient_gain:.3f}",
            Text(candidate.regime, style=STYLES[candidate.regime]),
        )
    return table
