"""Output of the commands: printing, messages on stderr, and streams that cannot be written."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer

from attnscale.plain import json_text, printable

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def say(text: str) -> None:
    """Print a result. typer.echo would handle a closed pipe in its own way."""
    print(text, flush=True)


def print_json(value: object) -> None:
    """Print a value as one readable block of JSON."""
    say(json_text(value))


def tell(sentence: object) -> None:
    """Print one sentence on stderr."""
    print(f"attnscale: {printable(str(sentence))}", file=sys.stderr, flush=True)


class OutputError(Exception):
    """Standard output could not be written. Not an OSError, because libraries catch those."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        # Windows reports a closed pipe as EINVAL.
        self.is_closed_pipe = error.errno == errno.EPIPE or (os.name == "nt" and error.errno == errno.EINVAL)


@contextmanager
def checked_streams() -> Iterator[None]:
    """Raise an OutputError when standard output cannot be written; ignore it on stderr."""
    before = sys.stdout, sys.stderr
    streams: tuple[Any, Any] = before
    for stream in filter(None, streams):
        with suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # a terminal without √ shows a question mark
    sys.stdout, sys.stderr = _Output(before[0]), _Stream(before[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Stream:
    """A wrapper of a stream that ignores errors; of None if the stream was closed before the command began."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        if self._stream is None:
            raise AttributeError(name)
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def write(self, text: str) -> int:
        try:
            if self._stream is None:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            written: int = self._stream.write(text)
        except OSError as error:
            self._fail(error)
            return len(text)
        return written

    def flush(self) -> None:
        try:
            if self._stream is not None:
                self._stream.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        # Discard what is left to write: Python would try again when it ends, and complain.
        with suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


class _Output(_Stream):
    def _fail(self, error: OSError) -> None:
        super()._fail(error)
        raise OutputError(error) from None
