"""`attnscale bench`: what measuring costs on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from attnscale.cli.files import require_writable
from attnscale.cli.output import AsJson, print_json
from attnscale.files import write_whole


def bench(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One small case of each kind only.")] = False,
    kind: Annotated[str | None, typer.Option(help="dense or ragged; by default both.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the figures, and the machine's description, as JSON.")] = None,
    json: AsJson = False,
) -> None:
    """Time attention with and without statistics, in turns, and print the ratios.

    Compared are plain SDPA on each backend that works, FlexAttention with lse and max, eager attention with the same
    statistics, and attnscale's, exact and sampled; and ragged batches, packed, jagged and padded, with a plain batch
    of as many tokens.

    Example: attnscale bench --device cpu --quick
    """
    import json as writer

    import torch
    from rich.console import Console
    from rich.progress import Progress

    from attnscale.bench import KINDS, cases, measure_case, to_dict
    from attnscale.errors import SettingError
    from attnscale.show.costs import show_costs

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise SettingError(f"Expected a device that is here, cpu or cuda, got {device!r}.")
    if kind is not None and kind not in KINDS:
        raise SettingError(f"Expected a kind of case, {' or '.join(KINDS)}, got {kind!r}.")
    if out is not None:
        require_writable(out)
    costs = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        wanted = cases(device, quick, kind)
        task = progress.add_task("timing", total=len(wanted))
        for case in wanted:
            costs += measure_case(case, device, lambda name: progress.update(task, description=name))
            progress.advance(task)
    figures = to_dict(costs, device)
    if json:
        print_json(figures)
    else:
        show_costs(figures["costs"])
    if out is not None:  # last: what was timed is on the screen, whatever becomes of the file
        write_whole(out, writer.dumps(figures, indent=1) + "\n")
