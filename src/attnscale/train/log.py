"""Reading a log of records, whatever befell it.

A log is one file, or several once it was thinned: FILE.older.jsonl has what was thinned, FILE.aside.jsonl what is
being thinned, and FILE the newest. Each is read after those before it, and steps that come again are taken from the
last, so that a thinning that was killed at any moment loses nothing and counts nothing twice.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attnscale.errors import SettingError
from attnscale.train.record import Record


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
    records: list[Record] = []
    damaged = 0
    for _, line in lines_of(Path(path)):
        record = parsed(line)
        if record is None:
            damaged += bool(line.strip())
            continue
        while records and records[-1].step >= record.step:
            records.pop()
        records.append(record)
    return Log(records, damaged)


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


def parsed(line: bytes) -> Record | None:
    """The record of a line; None where it is none."""
    try:
        return Record.from_dict(json.loads(line))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
