"""A prediction in the terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnscale.theory import Prediction

FORMULAS = {"unscaled": "none", "inverse_sqrt": "1/√d_k", "inverse_dim": "1/d_k", "calibrated": "calibrated"}
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
        f"q and k spread by {p.query_std:.3g}, q·k by {p.score_std:.3g}; "
        f"softmax over {p.length} keys freezes at {p.freezing_point:.3g}",
        highlight=False,
    )
    table = Table("scale", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("multiplier", "spread", "entropy", "of ln n", "top-1", "gradient\ngain"):
        table.add_column(heading, justify="right")
    table.add_column("softmax")
    for candidate in p.candidates:
        table.add_row(
            FORMULAS[candidate.name],
            f"{candidate.scale:.4g}",
            f"{candidate.spread:.3g}",
            f"{candidate.softmax.entropy:.2f}",
            f"{candidate.softmax.entropy_ratio:.3f}",
            f"{candidate.softmax.top1:.3f}",
            f"{candidate.softmax.gradient_gain:.3f}",
            Text(candidate.regime, style=STYLES[candidate.regime]),
        )
    console.print()
    console.print(table)
    console.print()
    console.print(p.advice, highlight=False)
