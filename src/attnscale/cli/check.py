"""`attnscale check`: what a model's attention really does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscale.cli.files import read_text, require_writable
from attnscale.cli.output import AsJson, print_json, tell
from attnscale.extras import require_extra
from attnscale.files import write_whole

if TYPE_CHECKING:
    from attnscale.checking import Checked
    from attnscale.comparing import Comparison
    from attnscale.loading.request import Sequence

Html = Annotated[Path | None, typer.Option(help="Write a report, one page that needs nothing else.")]
Rows = Annotated[int | None, typer.Option(help="Look at so many rows a head, sampled; all by default.")]
Text = Annotated[Path | None, typer.Option(help="Run the model on the text in this file.")]
Tokens = Annotated[Path | None, typer.Option(help="Run it on the token ids in this file: JSON lists, or numbers.")]
Data = Annotated[
    Path | None,
    typer.Option(help='Run it on the examples in this file, JSON lines with "text" or "input_ids": one batch.'),
]
Length = Annotated[int | None, typer.Option(help="Tokens of each sequence to run it on; 256 by default.")]
Device = Annotated[str, typer.Option(help="Where to run it: cpu, cuda, cuda:1, mps.")]

ModelType = Annotated[str | None, typer.Option(help="What an old config.json leaves out: bert, gpt2, …")]
Base = Annotated[str | None, typer.Option(help="The model that an adapter is put on: a folder, or org/name.")]


def check(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A Hugging Face folder (config.json with safetensors), org/name or org/name@revision in the "
            "local cache, a GGUF file, a PEFT adapter's folder, a config.json alone (random initialisation), or "
            "package.module:callable that makes a model or (model, inputs). Without one, the bundled model.",
            show_default=False,
        ),
    ] = None,
    html: Html = None,
    rows: Rows = None,
    text: Text = None,
    tokens: Tokens = None,
    data: Data = None,
    length: Length = None,
    device: Device = "cpu",
    random_init: Annotated[bool, typer.Option("--random-init", help="Leave its weights out.")] = False,
    model_type: ModelType = None,
    factory: Annotated[
        str | None,
        typer.Option("--model", metavar="MODULE:CALLABLE", help="MODEL is a file of weights for what this makes."),
    ] = None,
    base: Base = None,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch org/name into the cache first; else nothing is fetched.")
    ] = False,
    what_if: Annotated[
        str | None, typer.Option(metavar="LAYER", help="Try every rule on a layer's queries and keys.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Keep what every head does on eight sequences, to check others against it.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Compare with a check that was saved; status 1 where something got worse.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="With --against: changes below this are none, relative or of a share.")
    ] = 0.01,
    json: AsJson = False,
) -> None:
    """Watch one forward pass of a model, and say what is wrong with its attention, why, and what to do.

    Per layer, as means over heads: the spread of the scores; the spread expected of independent queries and keys of
    the same norms, expected scale · |q| · |k| / √d_k; the scale really applied; entropy over that of uniform weights;
    the largest weight of a row; the share of rows that give one key more than 0.99; and 1 − Σp², what a row
    lets through.

    Nothing that comes with a model is run or fetched: no remote code, no pickles but of plain tensors. Ends with
    status 1 if a finding is an error; with --against, if a warning or an error came, or a head got worse beyond its
    error: a wider spread, less entropy, less gradient gain.

    Example: attnscale check path/to/model --html report.html
    """
    sequences = given_to(rows, text, tokens, data, length)
    if html is not None:
        require_extra("report", "A report")
    for path in (html, save):
        if path is not None:
            require_writable(path)
    with progress() as report:
        report("importing torch")
        from attnscale.checking import check_model
        from attnscale.loading import Request

        request = Request(model, sequences.text, length, device, random_init, sequences.ids, report)
        request = replace(request, model_type=model_type, factory=factory, base=base, download=download)
        comparison = None
        if save is None and against is None:
            checked = check_model(request, rows, what_if)
        else:
            from attnscale.comparing.baseline import check_against

            checked, comparison = check_against(request, rows, what_if, save, against, tolerance)
        if html is not None:
            from attnscale.show.report import report_page

            report("writing the report")
            write_whole(html, report_page(checked))
    for note in checked.notes:
        tell(note)
    _show(checked, comparison, json)
    is_bad = checked.has_errors if comparison is None else bool(comparison.worse)
    raise typer.Exit(1 if is_bad else 0)


@dataclass(frozen=True)
class Given:
    """What a user gave to run a model on: a text, or sequences."""

    text: str | None
    ids: "tuple[Sequence, ...]"


def given_to(rows: int | None, text: Path | None, tokens: Path | None, data: Path | None, length: int | None) -> Given:
    """Read what was given, or one sentence on what is wrong with it."""
    from attnscale.errors import SettingError
    from attnscale.loading.request import read_examples, read_tokens, require_length, require_text

    if rows is not None and rows < 1:
        raise SettingError(f"Expected --rows of at least 1, got {rows}.")
    require_length(length)
    if sum(given is not None for given in (text, tokens, data)) > 1:
        raise SettingError("Expected one of --text, --tokens and --data, got several.")
    sequences = read_tokens(read_text(tokens)) if tokens is not None else ()
    sequences = read_examples(read_text(data)) if data is not None else sequences
    words = None if text is None else read_text(text)
    require_text(words)
    return Given(words, sequences)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A bar on stderr that says what is being done; none where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda stage: bar.update(task, description=stage)


def _show(checked: "Checked", comparison: "Comparison | None", json: bool) -> None:
    if json:
        compared = {} if comparison is None else {"comparison": comparison.to_dict()}
        print_json(checked.to_dict() | compared)
        return
    from attnscale.show.check import show_check

    show_check(checked)
    if comparison is not None:
        from attnscale.show.compare import show_comparison

        typer.echo()
        show_comparison(comparison)
