"""`attnscale bench`: time the cost of statistics on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from attnscale.cli.arguments import progress, require_writable
from attnscale.cli.output import AsJson, print_json
from attnscale.files import write_whole
from attnscale.plain import json_text


def bench(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda if there is one.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Time only one case of each kind, in about a minute.")] = False,
    kind: Annotated[str | None, typer.Option(help="dense or ragged; by default both.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the timings and a description of the machine to this file, as JSON.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Time attention with and without statistics, and print the ratios to plain SDPA.

    Compared are plain SDPA on each backend that works, FlexAttention with lse and max, eager attention with the same
    statistics, and attnscale with all rows and with sampled rows. Ragged batches (packed, jagged and padded) are
    compared with a plain batch of as many tokens. The lines below the tables explain each column.

    Example: attnscale bench --device cpu --quick
    """
    import logging
    from functools import partial

    import torch

    from attnscale.bench import KINDS, cases, measure_case, to_dict
    from attnscale.errors import SettingError
    from attnscale.show.listings import show_costs

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise SettingError(f"Expected a device that this machine has, cpu or cuda, got {device!r}.")
    if kind is not None and kind not in KINDS:
        raise SettingError(f"Expected a kind of case, {' or '.join(KINDS)}, got {kind!r}.")
    if out is not None:
        require_writable(out)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # torch warns about its own code
    costs, wanted = [], cases(device, quick, kind)
    with progress() as report:
        for done, case in enumerate(wanted):
            costs += measure_case(case, device, partial(report, done=done, total=len(wanted)))
    figures = to_dict(costs, device)
    if json:
        print_json(figures)
    else:
        show_costs(figures["costs"])
    if out is not None:  # last, so that the timings are printed even if this fails
        write_whole(out, json_text(figures) + "\n")
