"""A log of records as JSON lines: appended a whole line at a time, and read back whatever befell it."""

import errno
import json
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from attnscale.errors import SettingError
from attnscale.train.record import Record
from attnscale.train.thinning import thin

DEFAULT_LIMIT = 10**9  # bytes; a log that reaches it is thinned
TORN = ".torn"  # what is set aside, beside the log


class JsonLines:
    """Append records to a file, one a rank; a full disk is told once and never stops training.

    A last line that a killed process left half-written goes to FILE.torn. A log that reaches `limit` bytes is thinned:
    its older records become fewer, each keeping the extremes of those it stands for.
    """

    def __init__(self, path: str | Path, limit: int = DEFAULT_LIMIT) -> None:
        self.path, self.limit = Path(path), limit
        self._ready: set[Path] = set()
        self._warned = False

    def __call__(self, record: Record) -> None:
        """Append one line."""
        line = json.dumps(record.to_dict(), separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n"
        try:
            self._append(path_of_rank(self.path, record.rank), line.encode())
        except OSError as error:
            self._warn(error)

    def _append(self, path: Path, line: bytes) -> None:
        if path not in self._ready:
            path.parent.mkdir(parents=True, exist_ok=True)
            set_aside_torn(path)
            self._ready.add(path)
        if path.exists() and path.stat().st_size + len(line) > self.limit:
            rewrite(path, thin(read_log(path).records))  # three quarters of the records, so that it is seldom done
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


def rewrite(path: Path, records: Iterable[Record]) -> None:
    """Replace a log at once: whoever looks sees the old one or the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("w", encoding="utf-8", newline="\n") as file:
            for record in records:
                file.write(json.dumps(record.to_dict(), separators=(",", ":"), ensure_ascii=False) + "\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@dataclass(frozen=True)
class Log:
    """A log that was read: its records in order of steps, and the lines that were none."""

    records: list[Record]
    damaged: int


def read_log(path: str | Path) -> Log:
    """Read a log; lines that are no records are counted, and steps that a resumed run repeated are taken from it."""
    records: list[Record] = []
    damaged = 0
    try:
        with Path(path).open("rb") as file:
            for line in file:
                record = _parsed(line)
                if record is None:
                    damaged += bool(line.strip())
                    continue
                while records and records[-1].step >= record.step:
                    records.pop()
                records.append(record)
    except OSError as error:
        raise SettingError(f"Could not read {path}: {error.strerror or error}.") from None
    return Log(records, damaged)


def _parsed(line: bytes) -> Record | None:
    try:
        return Record.from_dict(json.loads(line))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
