"""Arguments of the commands: options that several share, files to read and to write, and errors in their use."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscale.errors import SettingError
from attnscale.extras import require_extra
from attnscale.files import read_whole

if TYPE_CHECKING:
    from attnscale.loading.request import Sequence as Tokens_

MAX_TEXT = 2**26  # bytes: a model takes fewer tokens than that
UsageError: Any = typer.BadParameter.__base__  # of typer's own click, or of the package, by typer's version

Html = Annotated[Path | None, typer.Option(help="Write a report to this file, as one self-contained page.")]
Rows = Annotated[int | None, typer.Option(min=1, help="Sample this many rows per head; by default all rows.")]
Text = Annotated[Path | None, typer.Option(help="Run the model on the text in this file.")]
Data = Annotated[
    Path | None,
    typer.Option(help='Run it on one batch of examples in this file: JSON lines with "text" or "input_ids".'),
]
Length = Annotated[int | None, typer.Option(help="Tokens per sequence; 256 by default.")]
Device = Annotated[str, typer.Option(help="Device to run it on: cpu, cuda, cuda:1, mps.")]
ModelType = Annotated[
    str | None, typer.Option(help="The model_type of an old config.json that has none: bert, gpt2, …")
]
Base = Annotated[str | None, typer.Option(help="The base model of an adapter: a folder, or org/name.")]


def read_input(text: Path | None, data: Path | None, length: int | None) -> "tuple[str | None, tuple[Tokens_, ...]]":
    """Check the options above, and return the user's text and sequences. Imports no torch."""
    from attnscale.loading.request import Request, read_examples

    if text is not None and data is not None:
        raise SettingError("Expected --text or --data, got both.")
    sequences = () if data is None else read_examples(_read_text(data))
    words = None if text is None else _read_text(text)
    Request(text=words, length=length)  # refuses what no model can run on
    return words, sequences


def require_report(html: Path | None) -> None:
    """Refuse a report that cannot be written, before the work and not after it."""
    if html is not None:
        require_extra("report", "A report")
        require_writable(html)


def require_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before the work and not after it."""
    if path.is_dir():
        raise SettingError(f"Expected a file to write, and {path} is a folder.")
    if path.exists() and not path.is_file():
        return  # a pipe or a terminal: nothing can be tried there
    for parent in path.parents:
        if parent.exists() and not parent.is_dir():
            raise SettingError(f"Could not write {path}: {parent} is not a folder.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise SettingError(f"Could not write {path}: {error.strerror or error}.") from None


@contextmanager
def progress() -> Iterator[Callable[..., None]]:
    """Show what is being done on stderr, if that is a terminal: `report(stage, done, total)`, or the stage alone."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda stage, done=0, total=None: bar.update(task, description=stage, completed=done, total=total)


def in_paragraphs(docstring: str) -> str:
    """Join the lines of each paragraph of a help text, so that the terminal breaks them.

    >>> in_paragraphs("One.\\n\\n    Two\\n    lines.")
    'One.\\n\\nTwo lines.'
    """
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in docstring.strip().split("\n\n"))


def _read_text(path: Path) -> str:
    try:
        return read_whole(path, MAX_TEXT).decode("utf-8")
    except OSError as error:
        raise SettingError(f"Could not read {path}: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise SettingError(f"Expected UTF-8 text in {path}, and it is not.") from None
