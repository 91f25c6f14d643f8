"""Making room in a log while training goes on: the log is set aside at once, and thinned by another process.

Rank 0 renames one file and starts one process, whatever the size of the log; FILE begins anew. The process writes
FILE.older.jsonl beside the old one and puts it in place at once, then removes what was set aside. Killed at any moment
it leaves a log that reads the same, and the next try begins where this one began.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

from attnscale.errors import SinkWarning
from attnscale.train.log import beside, files_of, line_of, lines_of, parsed, without_repeats
from attnscale.train.record import Record
from attnscale.train.thinning import folded, thin

AT_ONCE = 2**20  # bytes that are thinned without another process, which takes seconds to start: half a second of work
PATIENCE = 1.125  # by how much a log may grow before a thinning that failed is tried again


class Thinner:
    """Thins one log, one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process: int | None = None
        self._next_try = 0.0  # bytes

    def make_room(self) -> None:
        """Set the log aside and begin to thin it, unless that is under way."""
        if self._is_running():
            return
        size = sum(file.stat().st_size for file in files_of(self.path))
        if size < self._next_try:
            return
        aside = beside(self.path, "aside")
        if self.path.exists() and not aside.exists():  # else a thinning was killed, and is done again
            self.path.replace(aside)
        if size <= AT_ONCE or not hasattr(os, "posix_spawn"):
            thin_files(self.path)
            return
        command = [sys.executable, "-c", f"from {__name__} import thin_kindly; thin_kindly()", str(self.path)]
        self._process = os.posix_spawn(sys.executable, command, os.environ)
        self._next_try = PATIENCE * size

    def _is_running(self) -> bool:
        if self._process is None:
            return False
        try:
            ended, status = os.waitpid(self._process, os.WNOHANG)
        except ChildProcessError:  # another part of the program waited for it
            ended, status = self._process, 0
        if not ended:
            return True
        self._process = None
        if status:
            told = f"{self.path} could not be thinned and goes on growing; it is tried again."
            warnings.warn(told, SinkWarning, stacklevel=6)
        else:
            self._next_try = 0.0
        return False


def thin_files(path: Path) -> None:
    """Thin what was set aside, with what was thinned before; of each group of records one is in memory at a time."""
    older, aside = beside(path, "older"), beside(path, "aside")
    part = older.with_name(f".{older.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            for record in _thinned(aside):
                file.write(line_of(record))
            file.flush()
            os.fsync(file.fileno())
        part.replace(older)
        aside.unlink(missing_ok=True)
    finally:
        part.unlink(missing_ok=True)


def _thinned(aside: Path) -> Iterator[Record]:
    index = without_repeats(_index(aside), lambda entry: entry[0].step)
    kept = iter(index)
    for group in thin([record for record, _ in index]):
        members = []
        for record, place in kept:
            members.append(_read(place))
            if record.last_step >= group.last_step:
                break
        yield reduce(folded, members)


def _index(aside: Path) -> Iterator[tuple[Record, tuple[Path, int]]]:
    """The records of what is being thinned without their layers, and where each is."""
    log = aside.with_name(aside.name.replace(".aside", "", 1))
    for place, line in lines_of(log):
        record = parsed(line) if place[0] != log else None
        if record is not None:
            yield Record(record.step, record.time, {}, until=record.until), place


def _read(place: tuple[Path, int]) -> Record:
    with place[0].open("rb") as file:
        file.seek(place[1])
        record = parsed(file.readline())
    assert record is not None  # it was one when it was indexed
    return record


def rewrite_thinned(path: Path) -> None:
    """Thin a log by hand, nothing writing to it: all of it in one file again."""
    if path.exists() and not beside(path, "aside").exists():
        path.replace(beside(path, "aside"))
    thin_files(path)
    if not path.exists():
        beside(path, "older").replace(path)


def thin_kindly() -> None:
    """What the other process runs: training comes first."""
    os.nice(10)
    thin_files(Path(sys.argv[1]))
