"""The streams of the command line: what cannot be written ends with a sentence and a status, never with a traceback."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class OutputError(Exception):
    """Standard output could not be written; no OSError, which libraries would answer in ways of their own."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        # Windows says EINVAL of a pipe that nobody reads
        self.nobody_reads = error.errno == errno.EPIPE or (os.name == "nt" and error.errno == errno.EINVAL)


@contextmanager
def own_streams() -> Iterator[None]:
    """Within it, output that fails raises OutputError, and what is told on stderr and cannot be is left untold."""
    before = sys.stdout, sys.stderr
    streams: tuple[Any, Any] = before
    for stream in filter(None, streams):
        with suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # a terminal without √ shows a question mark
    sys.stdout, sys.stderr = _Output(before[0]), _Told(before[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Stream:
    """Another stream, or none, where it was closed before the command began."""

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
            return written
        except OSError as error:
            return self._failed(error, len(text))

    def flush(self) -> None:
        try:
            if self._stream is not None:
                self._stream.flush()
        except OSError as error:
            self._failed(error, 0)

    def _failed(self, error: OSError, length: int) -> int:
        """Forget what is left to write: Python would try again at its end, and complain."""
        with suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        return length


class _Told(_Stream):
    pass


class _Output(_Stream):
    def _failed(self, error: OSError, length: int) -> int:
        super()._failed(error, length)
        raise OutputError(error) from None
