"""Writing a log of records as JSON lines, each by one write to the end of the file."""

import errno
import os
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from attnscale.errors import SinkWarning
from attnscale.train.log import full_file, full_files
from attnscale.train.record import Record, new_name

DEFAULT_LIMIT = 250 * 10**6  # bytes of a file; at a megabyte a record, as of 126 layers of 128 heads, 250 records


class JsonLines:
    """Append records to a file, one a rank; a full disk is told once and never stops training.

    A record that names no run belongs to this sink's own. A file that would pass `limit` bytes becomes FILE.1, the next
    FILE.2 and so on (`scores.1.jsonl`), and FILE begins anew; nothing is deleted. Several processes may write one log.
    """

    def __init__(self, path: str | Path, limit: int = DEFAULT_LIMIT) -> None:
        self.path, self.limit = Path(path), limit
        self.run = new_name()
        self._warned = False

    def __call__(self, record: Record) -> None:
        """Append one line."""
        line = (record if record.run is not None else replace(record, run=self.run)).to_line()
        try:
            append(path_of_rank(self.path, record.rank), line, self.limit)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"Could not write {self.path}: {error.strerror or error}. Training goes on; records are left out until "
                "it can be written again.",
                SinkWarning,
                stacklevel=3,
            )


def path_of_rank(path: Path, rank: int | None) -> Path:
    """Return the file of a rank: rank 0 has the name that was given, others their number in it.

    >>> path_of_rank(Path("scores.jsonl"), 3).name
    'scores.rank3.jsonl'
    """
    return path if not rank else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def append(path: Path, line: bytes, limit: int) -> None:
    """Write a whole line at once to the end of a file, on a line of its own also after one that was cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # no file yet; or one that cannot be renamed goes on growing
        if path.stat().st_size + len(line) > limit > 0:
            set_full_aside(path)
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
    try:
        if os.fstat(handle).st_size:
            os.lseek(handle, -1, os.SEEK_END)
            line = line if os.read(handle, 1) == b"\n" else b"\n" + line
        if write(handle, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(handle)


write = os.write  # a name of its own, so that a test can fill the disk


def set_full_aside(path: Path) -> None:
    """Rename a full file; its new name is taken first, so that two processes never choose the same."""
    number = 1 + max((int(file.suffixes[-2][1:]) for file in full_files(path)), default=0)
    while True:
        try:
            os.close(os.open(full_file(path, number), os.O_CREAT | os.O_EXCL))
            break
        except FileExistsError:
            number += 1
    path.replace(full_file(path, number))
