"""Reading a log of records: its files, its lines, and the runs they belong to.

A log is FILE and, before it, the files that became full: FILE.1, FILE.2 … (`scores.1.jsonl`). Each line is a record
and names its run, so two runs in one file are told apart. A run that was resumed goes on under its name as another
part, which replaces the steps that it repeats. A last line without an end, which a killed process leaves, is skipped.
Files are read as a stream: of each record only its step is kept in memory.
"""

import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from attnscale.errors import SettingError
from attnscale.results import PlottedResult
from attnscale.train.record import Record
from attnscale.train.schema import LineError

LONGEST = 2**24  # bytes of a line: 1,000 layers of 128 heads; a longer one is read in pieces, which are damaged
SHOWN = 3  # damaged lines whose fault is kept
FORMER = ("older", "aside")  # files of logs that an earlier version thinned: FILE.older, FILE.aside
FORMER_HEADER = b'{"holds":'  # how the first line of FILE.older begins, which is no record


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
    """One run of a log: its parts, and the steps of its records, 8 bytes each."""

    number: int  # from 1, in the order of the log
    name: str | None  # None in lines that name no run
    began: float  # seconds since the epoch
    ended: float
    parts: dict[str | None, int] = field(default_factory=dict)  # the first step of each, in the order of the log
    steps: "array[int]" = field(default_factory=lambda: array("q"))
    has_replaced: bool = False  # a part repeated steps of an earlier one

    @property
    def first_step(self) -> int:
        """Step of its first record."""
        return self.steps[0]

    @property
    def last_step(self) -> int:
        """Step of its last record."""
        return self.steps[-1]

    @property
    def records(self) -> int:
        """Number of its records."""
        return len(self.steps)

    def add(self, record: Record) -> None:
        """Note a record; the first of a new part replaces the steps from its own on."""
        if record.part not in self.parts:
            self.parts[record.part] = record.step
            kept = bisect_left(self.steps, record.step)
            self.has_replaced |= kept < len(self.steps)
            del self.steps[kept:]
        if self.holds(record):
            self.steps.append(record.step)
            self.ended = record.time

    def holds(self, record: Record) -> bool:
        """Return False for a record that a later part replaces."""
        parts = list(self.parts)
        later = parts[parts.index(record.part) + 1 :] if record.part in self.parts else []
        return all(record.step < self.parts[part] for part in later)

    def to_dict(self) -> dict[str, Any]:
        """Return the run as JSON lists it."""
        return {
            "number": self.number,
            "name": self.name,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "records": self.records,
            "began": self.began,
            "ended": self.ended,
        }


class Runs:
    """The runs of a log, found from its records in the order of the log."""

    def __init__(self) -> None:
        self.all: list[LoggedRun] = []
        self.newest: LoggedRun | None = None  # the one that was written last
        self._by_name: dict[str | None, LoggedRun] = {}

    def add(self, record: Record) -> LoggedRun:
        """Note a record, and return its run; without names a step that does not go on begins another run."""
        run = self._by_name.get(record.run)
        if run is None or (record.run is None and record.step <= run.last_step):
            run = self._by_name[record.run] = LoggedRun(len(self.all) + 1, record.run, record.time, record.time)
            self.all.append(run)
        run.add(record)
        self.newest = run
        return run


@dataclass
class Damage:
    """Damaged lines: how many there are, and what is wrong with the first of them."""

    count: int = 0
    messages: list[str] = field(default_factory=list)

    def add(self, file: Path, number: int, error: LineError) -> None:
        """Count the line of this number."""
        self.count += 1
        if len(self.messages) < SHOWN:
            self.messages.append(f"{file.name}, line {number}: {error}")


def read_log(path: str | Path) -> Log:
    """Read all records of a log into memory, and count the damaged lines."""
    runs, damage = Runs(), Damage()
    found = [(runs.add(record).number, record) for record in records_in(Path(path), damage)]
    found.sort(key=lambda pair: pair[0])  # runs one after the other, each in the order of the log
    return Log([record for number, record in found if runs.all[number - 1].holds(record)], damage.count)


def scan(path: Path, seen: Callable[[Record], None], damage: Damage) -> Runs:
    """Find the runs of a log in one pass, calling `seen` with each record."""
    runs = Runs()
    for record in records_in(path, damage):
        runs.add(record)
        seen(record)
    if not runs.all:
        raise SettingError(f"Expected records of attnscale.Monitor in {path}, and found none in it.")
    return runs


def records_of(path: Path, chosen: LoggedRun) -> Iterator[Record]:
    """Read the records of one run that scan() found, in order of steps."""
    runs = Runs()
    for record in records_in(path, Damage()):
        if runs.add(record).number == chosen.number and chosen.holds(record):
            yield record


def choose_run(runs: Runs, wanted: str | None) -> LoggedRun:
    """Return the run of this name or number, or the one that was written last."""
    if wanted is None and runs.newest is not None:
        return runs.newest
    for run in runs.all:
        if wanted in (run.name, str(run.number)):
            return run
    known = ", ".join(f"{run.number}{'' if run.name is None else f' ({run.name})'}" for run in runs.all[:10])
    more = f" and {len(runs.all) - 10} more" if len(runs.all) > 10 else ""
    raise SettingError(f"Unknown run {wanted!r}. Expected the number or the name of one: {known}{more}.")


def records_in(path: Path, damage: Damage) -> Iterator[Record]:
    """Read every record of every file, in the order in which they were written."""
    with ExitStack() as stack:
        try:
            files = _opened(path, stack)
        except OSError as error:
            raise SettingError(f"Could not read {path}: {error.strerror or error}.") from None
        for file_path, file in files:
            for number, line in enumerate(iter(partial(file.readline, LONGEST), b""), 1):
                if not line.strip() or line.startswith(FORMER_HEADER):
                    continue
                try:
                    yield Record.from_line(line)
                except LineError as error:
                    if line.endswith(b"\n") or len(line) == LONGEST:  # else its writer was killed, or writes it now
                        damage.add(file_path, number, error)


def full_file(path: Path, number: int) -> Path:
    """Return the name of a file that became full.

    >>> full_file(Path("scores.jsonl"), 2).name
    'scores.2.jsonl'
    """
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def full_files(path: Path) -> list[Path]:
    """Return the files of a log that became full, the oldest first."""
    begins, ends = f"{path.stem}.", path.suffix
    numbers = [name[len(begins) : len(name) - len(ends)] for name in os.listdir(path.parent) if name.startswith(begins)]
    found = sorted(int(number) for number in numbers if number.isascii() and number.isdigit())
    return [file for number in found if (file := full_file(path, number)).exists()]


def _opened(path: Path, stack: ExitStack) -> Sequence[tuple[Path, BinaryIO]]:
    """Open all files of a log, FILE first: where it becomes full meanwhile, it is also among those listed after."""
    if path.exists() and not path.is_file():
        raise SettingError(f"Expected a log in {path}, and it is no file.")
    newest = [(path, stack.enter_context(path.open("rb")))] if path.exists() else []
    former = [path.with_name(f"{path.stem}.{word}{path.suffix}") for word in FORMER]
    names = [*(name for name in former if name.exists()), *full_files(path)]
    full = [(name, stack.enter_context(name.open("rb"))) for name in names]
    if newest:
        full = [(name, file) for name, file in full if not os.path.sameopenfile(file.fileno(), newest[0][1].fileno())]
    return full + newest or [(path, stack.enter_context(path.open("rb")))]
