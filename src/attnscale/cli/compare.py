"""`attnscale compare`: what became of every head between two checkpoints, runs or saved checks."""

from typing import Annotated

import typer

from attnscale.cli.check import Base, Data, Device, Html, Length, ModelType, Rows, Text, Tokens, given_to, progress
from attnscale.cli.files import require_writable
from attnscale.cli.output import AsJson, print_json
from attnscale.files import write_whole

SIDE = (
    "a model as `attnscale check` takes it, or the word bundled; a check that was saved (check --save); or a log of a "
    "run, LOG.jsonl or LOG.jsonl#RUN."
)
Tolerance = Annotated[float, typer.Option(help="Changes below this are none: relative, or of a share.")]


def compare(
    a: Annotated[str, typer.Argument(help=f"From: {SIDE}", show_default=False)],
    b: Annotated[str, typer.Argument(help="To: another.", show_default=False)],
    html: Html = None,
    rows: Rows = None,
    text: Text = None,
    tokens: Tokens = None,
    data: Data = None,
    length: Length = None,
    device: Device = "cpu",
    model_type: ModelType = None,
    base: Base = None,
    tolerance: Tolerance = 0.01,
    json: AsJson = False,
) -> None:
    """Say what changed from A to B, head by head: spread, scale, norms, alignment, entropy and gradient.

    Models are run on eight sequences, or on those of --data; the error of a change comes from how much sequences
    differ. Named are heads that changed beyond their error, with all heads and statistics counted, so that two samples
    of one model name none; a head whose queries and keys are made by the same parameters as before is told apart, as
    moved with what reaches it. Findings that came and went are told. Ends with status 0 whatever changed; `attnscale
    check --against` is for what must not.

    Example: attnscale compare before/ after/ --html changes.html
    """
    sequences = given_to(rows, text, tokens, data, length)
    if html is not None:
        require_writable(html)
    with progress() as report:
        report("importing torch")
        from attnscale.comparing import compare_portraits
        from attnscale.comparing.comparison import require_tolerance
        from attnscale.comparing.sides import Asked
        from attnscale.loading import Request

        require_tolerance(tolerance)
        request = Request(None, sequences.text, length, device, False, sequences.ids, report, model_type, base=base)
        before, after = (Asked(name, request, rows).portrait() for name in (a, b))
        found = compare_portraits(before, after, tolerance)
        if html is not None:
            from attnscale.show.report import comparison_page

            report("writing the report")
            write_whole(html, comparison_page(found))
    if json:
        print_json(found.to_dict())
    else:
        from attnscale.show.check import show_comparison

        show_comparison(found)
