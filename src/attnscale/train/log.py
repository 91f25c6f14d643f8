"""Reading of a log: its files, its lines, and the runs of its records.

A log is FILE and its continuations FILE.1, FILE.2 … (`scores.1.jsonl`). Each line is a record with the name of its run,
so a file may have several runs. When a run is resumed, its step goes back, and the new records replace those from that
step on. An incomplete last line, left by a killed process, is skipped. Files are read as a stream.
"""

import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

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


@dataclass
class LoggedRun:
    """One run of a log, with the step and the position in the log of each record: 16 bytes per record."""

    number: int  # from 1, in the order of the log
    name: str | None  # None if its lines have no run name
    began: float  # seconds since the epoch
    ended: float
    steps: "array[int]" = field(default_factory=lambda: array("q"))
    positions: "array[int]" = field(default_factory=lambda: array("q"))

    @property
    def records(self) -> int:
        """Number of its records."""
        return len(self.steps)

    def add(self, record: Record, position: int) -> None:
        """Add a record, replacing those from its step on."""
        while self.steps and self.steps[-1] >= record.step:
            self.steps.pop()
            self.positions.pop()
        self.steps.append(record.step)
        self.positions.append(position)
        self.ended = record.time

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain values for JSON."""
        return {
            "number": self.number,
            "name": self.name,
            "first_step": self.steps[0],
            "last_step": self.steps[-1],
            "records": self.records,
            "began": self.began,
            "ended": self.ended,
        }


class LogReader:
    """Reads a log record by record; after one iteration, it has the runs and the number of damaged lines."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.runs: list[LoggedRun] = []
        self.newest: LoggedRun | None = None  # run of the last record
        self.damaged = 0
        self.damage: list[str] = []  # error messages of the first damaged lines

    def __iter__(self) -> Iterator[tuple[LoggedRun, Record]]:
        """Yield each record with its run, in the order of the log."""
        runs = {run.name: run for run in self.runs}
        for position, record in enumerate(self._records()):
            run = runs.get(record.run)
            if run is None:
                run = runs[record.run] = LoggedRun(len(runs) + 1, record.run, record.time, record.time)
                self.runs.append(run)
            run.add(record, position)
            self.newest = run
            yield run, record

    def choose(self, wanted: str | None) -> LoggedRun:
        """Return the run with this name or number, or the last one written."""
        if self.newest is None:
            raise SettingError(f"Expected records of attnscale.Monitor in {self.path}, and found none in it.")
        if wanted is None:
            return self.newest
        for run in self.runs:
            if wanted in (run.name, str(run.number)):
                return run
        known = ", ".join(f"{run.number}{'' if run.name is None else f' ({run.name})'}" for run in self.runs[:10])
        more = f" and {len(self.runs) - 10} more" if len(self.runs) > 10 else ""
        raise SettingError(f"Unknown run {wanted!r}. Expected the number or the name of one: {known}{more}.")

    def records_of(self, run: LoggedRun) -> Iterator[Record]:
        """Read the log again and yield the records of one run, in order of steps."""
        positions = iter(run.positions)
        awaited = next(positions, None)
        for position, record in enumerate(LogReader(self.path)._records()):
            if position == awaited:
                yield record
                awaited = next(positions, None)

    def _records(self) -> Iterator[Record]:
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
    reader, records = LogReader(path), dict[int, list[Record]]()
    for run, record in reader:
        own = records.setdefault(run.number, [])
        del own[run.records - 1 :]  # replaced by this record
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
