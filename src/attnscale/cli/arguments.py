"""Options that several commands share, checks of files to read and to write, and the progress bar."""

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

MAX_TEXT = 2**26  # bytes; no model takes so many tokens
UsageError: Any = typer.BadParameter.__base__  # from click, which some versions of typer bundle and others import

Html = Annotated[Path | None, typer.Option(help="Write a report to this file, as one self-contained page.")]
Rows = Annotated[int | None, typer.Option(min=1, help="Sample this many rows per head; by default all rows.")]
Text = Annotated[Path | None, typer.Option(help="Run the model on the text in this file.")]
Data = Annotated[
    Path | None,
    typer.Option(help='Run the model on one batch of examples in this file: JSON lines with "text" or "input_ids".'),
]
Length = Annotated[int | None, typer.Option(help="Tokens per sequence; 256 by default.")]
Device = Annotated[str, typer.Option(help="Device to run the model on: cpu, cuda, cuda:1, mps.")]
ModelType = Annotated[
    str | None, typer.Option(help="Architecture, if an old config.json has no model_type: bert, gpt2, …")
]
Base = Annotated[str | None, typer.Option(help="The base model of an adapter: a folder, or org/name.")]


def read_input(text: Path | None, data: Path | None, length: int | None) -> "tuple[str | None, tuple[Tokens_, ...]]":
    """Check --text, --data and --length; return the text and the sequences. Does not import torch."""
    from attnscale.loading.request import Request, read_examples

    if text is not None and data is not None:
        raise SettingError("Expected --text or --data, got both.")
    sequences = () if data is None else read_examples(_read_text(data))
    words = None if text is None else _read_text(text)
    Request(text=words, length=length)  # raises an error if no model can run on them
    return words, sequences


def require_report(html: Path | None) -> None:
    """Raise an error before the work starts if the report cannot be written."""
    if html is not None:
        require_extra("report", "A report")
        require_writable(html)


def require_writable(path: Path) -> None:
    """Raise an error before the work starts if the file cannot be written."""
    if path.is_dir():
        raise SettingError(f"Expected a file to write, got the folder {path}.")
    if path.exists() and not path.is_file():
        return  # a pipe or a terminal: it cannot be tried without writing to it
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
    """Show a progress bar on stderr if it is a terminal; yield `report(stage, done, total)`, which updates it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda stage, done=0, total=None: bar.update(task, description=stage, completed=done, total=total)


def in_paragraphs(docstring: str) -> str:
    """Join the lines of each paragraph of a help text; the terminal wraps them at its own width.

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
        raise SettingError(f"Expected UTF-8 text in {path}, got other bytes.") from None
