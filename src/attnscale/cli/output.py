"""Output of the commands: printing, messages on stderr, and streams that cannot be written."""

import errno
import os
import sys
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import typer

from attnscale.plain import json_text, printable

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def say(text: str) -> None:
    """Print a result. Does not use typer.echo, which handles a closed pipe itself."""
    print(text, flush=True)


def print_json(value: object) -> None:
    """Print a value as one readable block of JSON."""
    say(json_text(value))


def print_message(sentence: object) -> None:
    """Print one sentence on stderr."""
    print(f"attnscale: {printable(str(sentence))}", file=sys.stderr, flush=True)


def end(status: int, sentence: str = "") -> NoReturn:
    """End the command with a status, after a sentence on stderr."""
    if sentence:
        print_message(sentence)
    raise typer.Exit(status)


class OutputError(Exception):
    """Standard output could not be written. Not an OSError, because libraries catch those."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        # Windows reports a closed pipe as EINVAL.
        self.is_closed_pipe = error.errno == errno.EPIPE or (os.name == "nt" and error.errno == errno.EINVAL)


class CheckedOutput:
    """Wrapper of standard output that raises an OutputError if writing fails."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream  # None if the shell closed it
        if stream is not None:
            stream.reconfigure(errors="replace")  # a terminal without √ shows a question mark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._attempt("write", text)
        return len(text)

    def flush(self) -> None:
        self._attempt("flush")

    def _attempt(self, method: str, *arguments: str) -> None:
        try:
            if self._stream is None:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            getattr(self._stream, method)(*arguments)
        except OSError as error:
            # Discard the rest of the output: Python would try again at exit, and print an error.
            with suppress(OSError, ValueError, AttributeError), open(os.devnull, "w", encoding="utf-8") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            raise OutputError(error) from None
