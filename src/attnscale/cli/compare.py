"""`attnscale compare`: compare the heads of two checkpoints, runs or saved checks."""

from typing import Annotated

import typer

from attnscale.cli import arguments
from attnscale.cli.output import AsJson, end, print_json, print_message
from attnscale.errors import SettingError
from attnscale.files import write_whole

SIDE = (
    "a model as in `attnscale check`, or the word bundled; a saved check (check --save); or the log of a run, "
    "LOG.jsonl or LOG.jsonl#RUN."
)


def compare(
    a: Annotated[str, typer.Argument(help=f"First side: {SIDE}", show_default=False)],
    b: Annotated[
        str | None, typer.Argument(help="Second side, of any of these kinds; not with --backends.", show_default=False)
    ] = None,
    backends: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Run one transformers model, A, with each of these attention implementations: eager,sdpa,flex,flash.",
        ),
    ] = None,
    html: arguments.Html = None,
    rows: arguments.Rows = None,
    text: arguments.Text = None,
    data: arguments.Data = None,
    length: arguments.Length = None,
    device: arguments.Device = "cpu",
    model_type: arguments.ModelType = None,
    base: arguments.Base = None,
    tolerance: Annotated[float, typer.Option(help="Ignore smaller changes (relative; absolute for shares).")] = 0.01,
    json: AsJson = False,
) -> None:
    """List the heads that changed from A to B: spread, scale, norms, alignment, entropy and gradient.

    Models run on eight sequences, or on those of --data; the error of a change is estimated from the differences
    between sequences. A head is listed if its change is larger than its error, corrected for the number of heads and
    statistics: for two samples of one model, none is listed. Heads whose weights are equal, and whose inputs changed,
    are listed separately. New and resolved findings are shown. The exit status is 0 whatever changed, and 2 if the two
    have no layer in common. To fail a build, use `attnscale check --against`.

    With --backends, one model runs on one batch with each implementation. For each layer, the scale, soft-cap, visible
    keys, sinks and output are shown, with their differences from the first implementation. The exit status is 1 if a
    layer differs, and 2 if fewer than two implementations could run.

    Example: attnscale compare before/ after/ --html changes.html
    """
    if (b is None) == (backends is None):
        raise SettingError("Expected two models to compare, or one and --backends, as in --backends eager,sdpa.")
    words, sequences = arguments.read_input(text, data, length)
    arguments.require_report(html)
    with arguments.progress() as report:
        report("importing torch")
        from attnscale.comparing import BackendComparison, Comparison
        from attnscale.comparing.sides import backends_by_name, compare_by_name
        from attnscale.loading import Request

        request = Request(None, words, length, device, False, sequences, report, model_type, base=base)
        found: Comparison | BackendComparison
        if b is None:
            names = tuple(name.strip() for name in (backends or "").split(",") if name.strip())
            found = backends_by_name(a, request, names, rows)
        else:
            found = compare_by_name(a, b, request, rows, tolerance)
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
        print_message(f"The report is in {html}.")
    if not found.is_compared:
        end(2, "No layer was compared, so the exit status is 2.")
    end(int(isinstance(found, BackendComparison) and found.first is not None))
