"""Making room in a log while training goes on: the log is set aside at once, and thinned by another process.

Rank 0 renames one file and starts one process, whatever the size of the log; FILE begins anew. The process writes
FILE.older.jsonl beside the old one and puts it in place at once, then removes what was set aside. Killed at any moment
it leaves a log that reads the same, and the next try begins where this one began. Who thins holds a lock on what was
set aside, which ends with the process.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import BinaryIO

from attnscale.errors import SinkWarning
from attnscale.files import replacing
from attnscale.train.line import line_of, records_of
from attnscale.train.log import RunIndex, index_of
from attnscale.train.snapshot import Snapshot, beside, header, identity, identity_of, size_of, snapshot
from attnscale.train.thinning import folded, groups

try:
    import fcntl
except ImportError:  # Windows, where one process writes a log
    fcntl = None  # type: ignore[assignment]

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
        size = size_of(self.path)
        if size < self._next_try:
            return
        set_aside(self.path)
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


def set_aside(path: Path) -> None:
    """Let FILE begin anew, unless another part of it is set aside: then a thinning was killed, and is done again."""
    aside = beside(path, "aside")
    try:
        os.link(path, aside)  # unlike a renaming it never takes the place of what another process has set aside
    except (FileExistsError, FileNotFoundError):
        return
    except OSError:  # no links here
        if not aside.exists():
            path.replace(aside)
        return
    path.unlink(missing_ok=True)


def thin_files(path: Path) -> None:
    """Thin what was set aside, with what was thinned before; of each group of records one is in memory at a time."""
    older, aside = beside(path, "older"), beside(path, "aside")
    with _held(aside) as file:
        if file is None:
            return
        if identity(path) == identity_of(file):  # killed before FILE could begin anew
            path.unlink()
        part = part_of(path)
        part.unlink(missing_ok=True)
        with snapshot(path, newest=False) as log, replacing(older, part) as thinned:
            size = log.files[-1].end
            thinned.write(header(file, size))
            index = index_of(log)
            for run in index.runs:
                thinned.writelines(_thinned(run, log))
            for place in index.damaged:  # not asked to delete them
                log.copy(place, thinned)
        file.seek(size)
        if late := file.read():  # by a writer that had it open
            with path.open("ab") as newest:
                newest.write(late)
        aside.unlink(missing_ok=True)


def part_of(path: Path) -> Path:
    """What a file that is thinned into is called for the moment before it takes its place."""
    return path.with_name(f".{beside(path, 'older').name}.part")


@contextmanager
def _held(aside: Path) -> Iterator[BinaryIO | None]:
    """What was set aside, held for this process alone; None where there is nothing, or another process has it."""
    if not aside.exists():
        yield None
        return
    with aside.open("rb") as file:
        yield file if _lock(file) and identity(aside) == identity_of(file) else None


def _lock(file: BinaryIO) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _thinned(run: RunIndex, log: Snapshot) -> Iterator[bytes]:
    """The lines of a run that is thinned; of a record that stays as it is, its own."""
    places = iter(run.places)
    for first, end in pairwise([0, *groups(run.steps, run.last_steps)]):
        lines = map(log.line, islice(places, end - first))
        line = next(lines)
        if end - first == 1 and line.endswith(b"\n"):
            yield line
            continue
        records = records_of(chain([line], lines))
        for start in islice(records, 1):
            yield line_of(reduce(folded, records, start))


def rewrite_thinned(path: Path) -> None:
    """Thin a log by hand, nothing writing to it: all of it in one file again."""
    set_aside(path)
    thin_files(path)
    if not path.exists():
        beside(path, "older").replace(path)


def thin_kindly() -> None:
    """What the other process runs: training comes first."""
    os.nice(10)
    thin_files(Path(sys.argv[1]))
