"""`attnscale check`: what a model's attention really does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from attnscale.cli.files import read_text, require_writable
from attnscale.cli.output import AsJson, print_json, tell
from attnscale.extras import require_extra
from attnscale.files import write_whole


def check(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A Hugging Face folder (config.json with safetensors), a config.json alone (random initialisation), "
            "or package.module:callable that makes a model or (model, inputs). Without one, the bundled model.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report, one page that needs nothing else.")] = None,
    rows: Annotated[int | None, typer.Option(help="Look at so many rows a head, sampled; all by default.")] = None,
    text: Annotated[Path | None, typer.Option(help="Run the model on the text in this file.")] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="Run it on the token ids in this file: JSON lists, or numbers.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help='Run it on the examples in this file, JSON lines with "text" or "input_ids": one batch.'),
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of each sequence to run it on; 256 by default.")] = None,
    device: Annotated[str, typer.Option(help="Where to run it: cpu, cuda, cuda:1, mps.")] = "cpu",
    random_init: Annotated[bool, typer.Option("--random-init", help="Leave its weights out.")] = False,
    what_if: Annotated[
        str | None, typer.Option(metavar="LAYER", help="Try every rule on a layer's queries and keys.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Watch one forward pass of a model, and say what is wrong with its attention, why, and what to do.

    Per layer, as means over heads: the spread of the scores; the spread expected of independent queries and keys of
    the same norms, expected scale · |q| · |k| / √d_k; the scale really applied; entropy over that of uniform weights;
    the largest weight of a row; the share of rows that give one key more than 0.99; and 1 − Σp², what a row
    lets through.

    Nothing that comes with a model is run or fetched: no remote code, no pickles but of plain tensors. Ends with
    status 1 if a finding is an error.

    Example: attnscale check path/to/model --html report.html
    """
    from attnscale.errors import SettingError
    from attnscale.loading.given import read_examples, read_tokens

    if rows is not None and rows < 1:
        raise SettingError(f"Expected --rows of at least 1, got {rows}.")
    if html is not None:
        require_extra("report", "A report")
        require_writable(html)
    if sum(given is not None for given in (text, tokens, data)) > 1:
        raise SettingError("Expected one of --text, --tokens and --data, got several.")
    request_text = None if text is None else read_text(text)
    sequences = read_tokens(read_text(tokens)) if tokens is not None else ()
    sequences = read_examples(read_text(data)) if data is not None else sequences
    with _progress() as report:
        report("importing torch")
        from attnscale.checking import check_model
        from attnscale.loading import Request

        request = Request(model, request_text, length, device, random_init, sequences, report)
        checked = check_model(request, rows, what_if)
        if html is not None:
            from attnscale.show.report import report_page

            report("writing the report")
            write_whole(html, report_page(checked))
    for note in checked.notes:
        tell(note)
    if json:
        print_json(checked.to_dict())
    else:
        from attnscale.show.check import show_check

        show_check(checked)
    raise typer.Exit(1 if checked.has_errors else 0)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A bar on stderr that says what is being done; none where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda stage: progress.update(task, description=stage)
