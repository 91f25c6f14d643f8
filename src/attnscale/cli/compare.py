"""`attnscale compare`: compare the heads of two checkpoints, runs or saved checks."""

from typing import Annotated

import typer

from attnscale.cli import arguments
from attnscale.cli.output import AsJson, print_json, tell
from attnscale.extras import require_extra
from attnscale.files import write_whole

SIDE = (
    "a model as `attnscale check` takes it, or the word bundled; a saved check (check --save); or a log of a run, "
    "LOG.jsonl or LOG.jsonl#RUN."
)
Tolerance = Annotated[float, typer.Option(help="Ignore changes below this: relative, or of a share.")]


def compare(
    a: Annotated[str, typer.Argument(help=f"The first: {SIDE}", show_default=False)],
    b: Annotated[str, typer.Argument(help="The second, of any of these kinds.", show_default=False)],
    html: arguments.Html = None,
    rows: arguments.Rows = None,
    text: arguments.Text = None,
    tokens: arguments.Tokens = None,
    data: arguments.Data = None,
    length: arguments.Length = None,
    device: arguments.Device = "cpu",
    model_type: arguments.ModelType = None,
    base: arguments.Base = None,
    tolerance: Tolerance = 0.01,
    json: AsJson = False,
) -> None:
    """List the heads that changed from A to B: spread, scale, norms, alignment, entropy and gradient.

    Models are run on eight sequences, or on those of --data; the error of a change comes from the differences between
    sequences. Lists heads whose change is larger than its error, corrected for the number of heads and statistics:
    two samples of one model list none. Heads with the same weights, whose inputs changed, are listed separately. Shows
    new findings and those that are gone. The exit status is 0 whatever changed, and 2 if the two have no layer in
    common; use `attnscale check --against` in a build.

    Example: attnscale compare before/ after/ --html changes.html
    """
    words, sequences = arguments.read_input(rows, text, tokens, data, length)
    if html is not None:
        require_extra("report", "A report")
        arguments.require_writable(html)
    with arguments.progress() as report:
        report("importing torch")
        from attnscale.comparing import compare_portraits
        from attnscale.comparing.comparison import require_tolerance
        from attnscale.comparing.sides import portrait_by_name
        from attnscale.loading import Request

        require_tolerance(tolerance)
        request = Request(None, words, length, device, False, sequences, report, model_type, base=base)
        before, after = (portrait_by_name(name, request, rows) for name in (a, b))
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
    if html is not None:
        tell(f"The report is in {html}.")
    if not found.heads:
        tell("No layer was compared, so the exit status is 2.")
        raise typer.Exit(2)
