"""`attnscale demo`: train with and without √d_k, in half a minute."""

from pathlib import Path
from typing import Annotated

import typer

from attnscale.cli.arguments import require_report
from attnscale.cli.output import AsJson, print_json, print_message
from attnscale.files import write_whole


def demo(
    html: Annotated[Path, typer.Option(help="File to write the report to.")] = Path("report.html"),
    head_dim: Annotated[
        int, typer.Option("--head-dim", min=2, max=4096, help="Head dimension d_k of both models; an even number.")
    ] = 128,
    steps: Annotated[int, typer.Option(min=2, max=100_000, help="Training steps of each model.")] = 160,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the initial weights and the batches.")] = 0,
    json: AsJson = False,
) -> None:
    """Train a small model twice, with scores divided by √d_k and without, and explain the difference.

    Both start from the same weights, see the same batches and learn to recall which value belongs to which key. It
    takes less than half a minute on one thread. While they train, it shows the loss, the entropy of the weights as a
    share of its maximum, and 1 − Σp².

    Example: attnscale demo --html report.html
    """
    from attnscale.errors import SettingError

    if head_dim % 2:
        raise SettingError(f"Expected an even --head-dim, as rotary positions need, got {head_dim}.")
    require_report(html)

    from rich.console import Console

    from attnscale.lab.demo import TwinTraining
    from attnscale.show.lab import show_progress, show_twins
    from attnscale.show.report import twins_page

    console = Console(stderr=json)
    training = TwinTraining(head_dim, steps, seed)
    for done, _ in enumerate(training.steps(), 1):
        show_progress(training, done, console)
    twins = training.twins()
    write_whole(html, twins_page(twins))
    if json:
        print_json(twins.to_dict())
    else:
        show_twins(twins, console)
    print_message(f"The report, with the curves and every head, is in {html}.")
