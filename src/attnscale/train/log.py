"""Reading a log of records, whatever befell it.

A log is one file, or several once it was thinned: FILE.older.jsonl has what was thinned, FILE.aside.jsonl what is
being thinned, and FILE the newest. Each is read after those before it, and steps that come again are taken from the
last, so that a thinning that was killed at any moment loses nothing and counts nothing twice.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from attnscale.errors import SettingError
from attnscale.train.record import Record

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Log:
    """A log that was read: its records in order of steps, and the lines that were none."""

    records: list[Record]
    damaged: int


def beside(path: Path, word: str) -> Path:
    """A file that belongs to a log.

    >>> beside(Path("scores.jsonl"), "older").name
    'scores.older.jsonl'
    """
    return path.with_name(f"{path.stem}.{word}{path.suffix}")


def files_of(path: Path) -> list[Path]:
    """The files of a log that are there, the oldest records first."""
    return [file for file in (beside(path, "older"), beside(path, "aside"), path) if file.exists()]


def read_log(path: str | Path) -> Log:
    """Read a log; lines that are no records are counted, and steps that a resumed run repeated are taken from it."""
    found = [parsed(line) for _, line in lines_of(Path(path)) if line.strip()]
    records = [record for record in found if record is not None]
    return Log(without_repeats(records, lambda record: record.step), len(found) - len(records))


def without_repeats(entries: Iterable[Entry], step: Callable[[Entry], int]) -> list[Entry]:
    """In order of steps: those that a resumed run repeats are taken from it.

    >>> without_repeats([(0, "a"), (5, "b"), (10, "c"), (5, "d")], lambda entry: entry[0])
    [(0, 'a'), (5, 'd')]
    """
    kept: list[Entry] = []
    for entry in entries:
        while kept and step(kept[-1]) >= step(entry):
            kept.pop()
        kept.append(entry)
    return kept


def lines_of(path: Path) -> Iterator[tuple[tuple[Path, int], bytes]]:
    """The lines of all files of a log, each with its file and where it begins there."""
    try:
        for file in files_of(path) or [path]:
            with file.open("rb") as lines:
                at = 0
                for line in lines:
                    yield (file, at), line
                    at += len(line)
    except OSError as error:
        raise SettingError(f"Could not read {path}: {error.strerror or error}.") from None


def line_of(record: Record) -> bytes:
    """A record as a line of a log."""
    text = json.dumps(record.to_dict(), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()


def parsed(line: bytes) -> Record | None:
    """The record of a line; None where it is none."""
    try:
        return Record.from_dict(json.loads(line))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
