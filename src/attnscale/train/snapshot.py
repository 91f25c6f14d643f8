"""A log as it is at one moment, though it may be thinned meanwhile.

A log is one file, or several once it was thinned: FILE.older.jsonl has what was thinned, FILE.aside.jsonl what is
being thinned, and FILE the newest. They are opened together, and anew where one took another's place meanwhile; what is
open stays readable. The first line of FILE.older.jsonl says how much of FILE.aside.jsonl is in it already, so that a
thinning that was killed at any moment loses nothing and counts nothing twice.
"""

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from attnscale.errors import SettingError

LONGEST = 2**24  # bytes of a line: 1,000 layers of 128 heads; of a longer one the rest is not looked at
HEADER = b'{"holds":'  # how the first line of FILE.older.jsonl begins
KNOWN_BY = 4096  # bytes at its beginning that a file is known by
TRIES, PAUSE = 500, 0.01  # seconds between two looks at files that change places: renaming them takes far less
Place = tuple[int, int]  # of a line: which file, and where it begins there


@dataclass(frozen=True)
class Opened:
    """One file of a log: where its first line that counts begins, and where it ended when it was opened."""

    path: Path
    file: BinaryIO
    start: int
    end: int


@dataclass(frozen=True)
class Snapshot:
    """The files of a log, the oldest records first."""

    files: list[Opened]

    def lines(self) -> Iterator[tuple[Place, bytes]]:
        """All lines, each with its place; one that is too long is cut."""
        for number, opened in enumerate(self.files):
            at = opened.start
            opened.file.seek(at)
            while at < opened.end and (line := opened.file.readline(LONGEST)):
                yield (number, at), line
                at += len(line)
                while len(line) == LONGEST and not line.endswith(b"\n"):
                    line = opened.file.readline(LONGEST)
                    at += len(line)
                opened.file.seek(at)  # whoever looked at a line meanwhile has moved it

    def line(self, place: Place) -> bytes:
        """The line at a place."""
        file = self.files[place[0]].file
        file.seek(place[1])
        return file.readline(LONGEST)

    def copy(self, place: Place, into: BinaryIO) -> None:
        """Write a line elsewhere as it is, however long."""
        file = self.files[place[0]].file
        file.seek(place[1])
        while line := file.readline(2**20):
            into.write(line)
            if line.endswith(b"\n"):
                return
        into.write(b"\n")

    def told(self, place: Place) -> str:
        """A place as a person finds it: the file and the number of the line."""
        opened = self.files[place[0]]
        opened.file.seek(0)
        left, number = place[1], 1
        while left > 0 and (block := opened.file.read(min(left, 2**20))):
            left, number = left - len(block), number + block.count(b"\n")
        return f"{opened.path.name}, line {number}"


def beside(path: Path, word: str) -> Path:
    """A file that belongs to a log.

    >>> beside(Path("scores.jsonl"), "older").name
    'scores.older.jsonl'
    """
    return path.with_name(f"{path.stem}.{word}{path.suffix}")


def names_of(path: Path) -> tuple[Path, Path, Path]:
    """The files that a log may have, the oldest records first."""
    return beside(path, "older"), beside(path, "aside"), path


def size_of(path: Path) -> int:
    """Bytes of all files of a log."""
    found = 0
    for file in names_of(path):
        try:
            found += file.stat().st_size
        except FileNotFoundError:
            continue
    return found


@contextmanager
def snapshot(path: Path, newest: bool = True) -> Iterator[Snapshot]:
    """Open a log as it is now, with FILE itself or without it."""
    with ExitStack() as stack:
        try:
            names = names_of(path)[: None if newest else -1]
            files = _opened_together(path, names, stack)
        except OSError as error:
            raise SettingError(f"Could not read {path}: {error.strerror or error}.") from None
        yield Snapshot(list(_counting(files, names)))


def header(aside: BinaryIO, size: int) -> bytes:
    """The first line of what was thinned from so many bytes of a file."""
    return json.dumps({"holds": {"bytes": size, "of": _known_by(aside, size)}}, separators=(",", ":")).encode() + b"\n"


def identity(path: Path) -> tuple[int, int] | None:
    """By what two names are known to be of one file; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def identity_of(file: BinaryIO) -> tuple[int, int]:
    """The same of a file that is open."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


def _opened_together(path: Path, names: Sequence[Path], stack: ExitStack) -> dict[Path, BinaryIO]:
    for _ in range(TRIES):
        with ExitStack() as these:
            found = {name: _open(name) for name in names}
            files = {name: these.enter_context(file) for name, file in found.items() if file is not None}
            if all(identity(name) == (identity_of(files[name]) if name in files else None) for name in names):
                if not files:
                    raise SettingError(f"Could not read {path}: No such file or directory.")
                stack.enter_context(these.pop_all())
                return files
        time.sleep(PAUSE)
    raise SettingError(f"Could not read {path}: its files change places all the time.")


def _open(path: Path) -> BinaryIO | None:
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise SettingError(f"Expected a log in {path}, and it is no file.")
    return file


def _counting(files: Mapping[Path, BinaryIO], names: Sequence[Path]) -> Iterator[Opened]:
    """Each file from its first line that counts to its present end; one that has two names just now, once."""
    held = _held(files[names[0]]) if names[0] in files else None
    for name, file in files.items():
        if (
            name == names[1]
            and len(names) > 2
            and names[2] in files
            and identity_of(files[names[2]]) == identity_of(file)
        ):
            continue
        start = len(_header_of(file))
        if name == names[1] and held is not None and held[0] == _known_by(file, held[1]):
            start = held[1]
        yield Opened(name, file, start, os.fstat(file.fileno()).st_size)


def _header_of(file: BinaryIO) -> bytes:
    file.seek(0)
    line = file.readline(KNOWN_BY)
    return line if line.startswith(HEADER) else b""


def _held(older: BinaryIO) -> tuple[str, int] | None:
    """By what the file is known that was thinned into this one, and how much of it was."""
    try:
        held = json.loads(_header_of(older))["holds"]
        return str(held["of"]), int(held["bytes"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


def _known_by(file: BinaryIO, size: int) -> str:
    file.seek(0)
    return hashlib.sha256(file.read(min(size, KNOWN_BY))).hexdigest()[:16]
