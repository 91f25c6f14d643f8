"""Reading of a log: its files and its lines.

A log is FILE and its continuations FILE.1, FILE.2 … (`scores.1.jsonl`). Each line is a record with the name of its run,
so a file may have several runs. A resumed run starts at an earlier step, and its records replace the old ones from that
step on. An incomplete last line, left by a killed process, is skipped. Files are read as a stream.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from attnscale.errors import SettingError
from attnscale.results import PlottedResult
from attnscale.train.record import LineError, Record

LONGEST = 2**24  # bytes of a line, enough for 1,000 layers of 128 heads; a longer line counts as damaged
SHOWN = 3  # number of damaged lines with a stored error message


@dataclass(frozen=True, repr=False)
class Log(PlottedResult):
    """The records of a log, each run in order of its steps, and the number of damaged lines."""

    records: list[Record]
    damaged: int

    @property
    def runs(self) -> dict[str | None, list[Record]]:
        """The records by the name of their run."""
        found: dict[str | None, list[Record]] = {}
        for record in self.records:
            found.setdefault(record.run, []).append(record)
        return found


class LogReader:
    """Reads a log record by record, in the order of the log, and counts damaged lines."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.damaged = 0
        self.damage: list[str] = []  # error messages of the first damaged lines

    def __iter__(self) -> Iterator[Record]:
        try:
            for path in log_files(self.path):
                with path.open("rb") as file:
                    yield from self._records_in(file, path.name)
        except OSError as error:
            raise SettingError(f"Could not read {self.path}: {error.strerror or error}.") from None

    def _records_in(self, file: BinaryIO, name: str) -> Iterator[Record]:
        for number, line in enumerate(iter(partial(file.readline, LONGEST), b""), 1):
            if not line.strip():
                continue
            try:
                yield Record.from_line(line)
            except LineError as error:
                if line.endswith(b"\n") or len(line) == LONGEST:  # else it is incomplete
                    self.damaged += 1
                    self.damage += [f"{name}, line {number}: {error}"] if self.damaged <= SHOWN else []


def read_log(path: str | Path) -> Log:
    """Read all records of a log into memory, and count the damaged lines."""
    reader, records = LogReader(path), dict[str | None, list[Record]]()
    for record in reader:
        own = records.setdefault(record.run, [])
        while own and own[-1].step >= record.step:  # the run was resumed
            own.pop()
        own.append(record)
    return Log([record for own in records.values() for record in own], reader.damaged)


def log_files(path: Path) -> list[Path]:
    """Return the files of a log in the order of writing; only FILE if none exists."""
    if path.exists() and not path.is_file():
        raise SettingError(f"Expected a log in {path}, but it is not a file.")
    return [numbered(path, number) for number in file_numbers(path)]


def file_numbers(path: Path) -> list[int]:
    """Return the numbers of the files of a log, in order; FILE itself is 0."""
    begins, ends = f"{path.stem}.", path.suffix
    numbers = [name[len(begins) : len(name) - len(ends)] for name in os.listdir(path.parent) if name.startswith(begins)]
    found = {int(number) for number in numbers if number.isascii() and number.isdigit()}
    return sorted(number for number in {0, *found} if numbered(path, number).exists()) or [0]


def numbered(path: Path, number: int) -> Path:
    """Return the name of a file of a log.

    >>> numbered(Path("scores.jsonl"), 2).name
    'scores.2.jsonl'
    """
    return path.with_name(f"{path.stem}.{number}{path.suffix}") if number else path
