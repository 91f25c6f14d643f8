"""`attnscale check`: audit the attention of a model."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from attnscale.cli import arguments
from attnscale.cli.output import AsJson, end, print_json, print_message, say
from attnscale.files import write_whole


def check(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A Hugging Face folder (config.json with safetensors), org/name or org/name@revision in the "
            "local cache, a GGUF file, the folder of a PEFT adapter, a config.json alone (random initialisation), or "
            "package.module:callable that makes a model or (model, inputs). Without MODEL, the bundled model.",
            show_default=False,
        ),
    ] = None,
    html: arguments.Html = None,
    rows: arguments.Rows = None,
    text: arguments.Text = None,
    data: arguments.Data = None,
    length: arguments.Length = None,
    device: arguments.Device = "cpu",
    random_init: Annotated[
        bool, typer.Option("--random-init", help="Initialise the model at random instead of loading its weights.")
    ] = False,
    model_type: arguments.ModelType = None,
    base: arguments.Base = None,
    download: Annotated[
        bool,
        typer.Option("--download", help="Fetch org/name into the local cache first. Nothing is fetched without it."),
    ] = False,
    what_if: Annotated[
        str | None, typer.Option(metavar="LAYER", help="Try every rule on the queries and keys of this layer.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Save the statistics of every head on eight sequences, for --against.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Compare with a saved check; the exit status is 1 if anything got worse.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="With --against, ignore smaller changes (relative; absolute for shares).")
    ] = 0.01,
    json: AsJson = False,
) -> None:
    """Watch one forward pass of a model; report what is wrong with its attention, why, and what to do.

    For each layer, as means over heads: the spread of the scores; the spread expected for independent queries and keys
    of the same norms, expected scale · |q| · |k| / √d_k; the scale that was applied; the entropy of the weights as a
    share of its maximum; the largest weight of a row; the share of rows that give one key more than 0.99; and 1 − Σp².

    Code that comes with a model is never run: remote code is ignored, and only pickles of plain tensors are loaded.
    Nothing is fetched without --download. The exit status is 1 if a finding is an error, and 2 if no attention was
    found. With --against it is 1 if there is a new warning or error, or if a head got worse by more than its error: a
    wider spread, less entropy or a smaller 1 − Σp².

    Example: attnscale check path/to/model --html report.html
    """
    words, sequences = arguments.read_input(text, data, length)
    arguments.require_report(html)
    if save is not None:
        arguments.require_writable(save)
    with arguments.progress() as report:
        report("importing torch")
        from attnscale.checking import check_model
        from attnscale.loading import Request

        request = Request(model, words, length, device, random_init, sequences, report)
        request = replace(request, model_type=model_type, base=base, download=download)
        comparison = None
        if save is None and against is None:
            checked = check_model(request, rows, what_if)
        else:
            from attnscale.comparing.sides import check_against

            checked, comparison = check_against(request, rows, what_if, save, against, tolerance)
        if html is not None:
            from attnscale.show.report import report_page

            report("writing the report")
            write_whole(html, report_page(checked))
    for note in checked.notes:
        print_message(note)
    if json:
        print_json(checked.to_dict() | ({} if comparison is None else {"comparison": comparison.to_dict()}))
    else:
        from attnscale.show.check import show_check, show_comparison

        show_check(checked)
        if comparison is not None:
            say("")
            show_comparison(comparison)
    if html is not None:
        print_message(f"The report is in {html}.")
    if not checked.lines:
        end(2, "No attention layer was checked, so the exit status is 2.")
    if comparison is None:
        end(int(checked.has_errors))
    if not comparison.heads:
        end(2, "No layer was compared, so the exit status is 2.")
    end(int(bool(comparison.worse)))
