"""Writing a log of records as JSON lines, a whole line at a time."""

import errno
import os
import warnings
from dataclasses import replace
from pathlib import Path

from attnscale.errors import SinkWarning
from attnscale.train.line import line_of
from attnscale.train.record import Record, new_name
from attnscale.train.room import Thinner, part_of
from attnscale.train.snapshot import size_of

DEFAULT_LIMIT = 10**9  # bytes of a log with all that belongs to it, while it is thinned too
TORN = ".torn"  # what is set aside, beside the log


class JsonLines:
    """Append records to a file, one a rank; a full disk is told once and never stops training.

    A record that names no run belongs to this sink's own, so that what is in the file already stays apart from it. A
    last line that a killed process left half-written goes to FILE.torn. A log that reaches half of `limit` bytes is
    thinned: its older records become fewer, each keeping the extremes of those it stands for. They go to
    FILE.older.jsonl, by another process where that takes more than a moment.
    """

    def __init__(self, path: str | Path, limit: int = DEFAULT_LIMIT) -> None:
        self.path, self.limit = Path(path), limit
        self.run = new_name()
        self._ready: dict[Path, Thinner] = {}
        self._warned = False

    def __call__(self, record: Record) -> None:
        """Append one line."""
        line = line_of(record if record.run is not None else replace(record, run=self.run))
        try:
            self._append(path_of_rank(self.path, record.rank), line)
        except OSError as error:
            self._warn(error)

    def _append(self, path: Path, line: bytes) -> None:
        if path not in self._ready:
            path.parent.mkdir(parents=True, exist_ok=True)
            set_aside_torn(path)
            part_of(path).unlink(missing_ok=True)  # of a thinning that was killed as it ended
            self._ready[path] = Thinner(path)
        if size_of(path) + len(line) > self.limit // 2:
            self._ready[path].make_room()
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            before = os.fstat(handle).st_size
            written = write(handle, line)
            if written < len(line):  # a part fitted: a line is whole or not there
                os.ftruncate(handle, before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(handle)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"Could not write {self.path}: {error.strerror or error}. Training goes on; records are left out until "
                "it can be written again.",
                SinkWarning,
                stacklevel=3,
            )


write = os.write  # a name of its own, so that a test can fill the disk


def path_of_rank(path: Path, rank: int | None) -> Path:
    """The file of a rank: rank 0 has the name that was given, others their number in it.

    >>> path_of_rank(Path("scores.jsonl"), 3).name
    'scores.rank3.jsonl'
    """
    return path if not rank else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def set_aside_torn(path: Path) -> None:
    """Cut a last line that was not finished, and keep it in FILE.torn."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = size
        while start > 0:  # backwards to the last end of a line
            step = min(2**16, start)
            file.seek(start - step)
            found = file.read(step).rfind(b"\n")
            if found >= 0:
                start += found + 1 - step
                break
            start -= step
        if start == size:
            return
        file.seek(start)
        torn = file.read()
        with path.with_name(path.name + TORN).open("ab") as aside:
            aside.write(torn + b"\n")
        file.truncate(start)
