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
from attnscale.train.record import LineError, Record

LONGEST = 2**24  # bytes of a line: 1,000 layers of 128 heads; a longer one is read in pieces, which are damaged
SHOWN = 3  # damaged lines whose fault is kept


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

    def add(self, record: Record) -> bool:
        """Note a record, which replaces those from its step on; False where its part was replaced and still writes."""
        self.parts.setdefault(record.part, record.step)
        if not self.holds(record):
            return False
        del self.steps[bisect_left(self.steps, record.step) :]
        self.steps.append(record.step)
        self.ended = record.time
        return True

    def holds(self, record: Record) -> bool:
        """Return False for a record that a later part replaces."""
        parts = list(self.parts)
        return all(record.step < self.parts[part] for part in parts[parts.index(record.part) + 1 :])

    def to_dict(self) -> dict[str, Any]:
        """Return the run as JSON lists it."""
        names = ("number", "name", "first_step", "last_step", "records", "began", "ended")
        return {name: getattr(self, name) for name in names}


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
    found: list[tuple[LoggedRun, Record]] = []
    damage = Damage()
    read_runs(Path(path), lambda run, record: found.append((run, record)), damage)
    found.sort(key=lambda pair: pair[0].number)  # runs one after the other, each in the order of the log
    return Log([record for run, record in found if run.holds(record)], damage.count)


def read_runs(path: Path, seen: Callable[[LoggedRun, Record], object], damage: Damage) -> dict[str | None, LoggedRun]:
    """Read a log once, calling `seen` with each record and its run; return the runs, the one written last as the last.

    Where a run was resumed, its step goes back, and that record replaces those from its step on.
    """
    runs: dict[str | None, LoggedRun] = {}
    for record in _records_in(path, damage):
        run = runs.pop(record.run, None) or LoggedRun(len(runs) + 1, record.run, record.time, record.time)
        runs[record.run] = run
        if run.add(record):
            seen(run, record)
    return runs


def choose_run(path: Path, runs: dict[str | None, LoggedRun], wanted: str | None) -> LoggedRun:
    """Return the run of this name or number, or the one that was written last."""
    if not runs:
        raise SettingError(f"Expected records of attnscale.Monitor in {path}, and found none in it.")
    if wanted is None:
        return list(runs.values())[-1]
    ordered = sorted(runs.values(), key=lambda run: run.number)
    for run in ordered:
        if wanted in (run.name, str(run.number)):
            return run
    known = ", ".join(f"{run.number}{'' if run.name is None else f' ({run.name})'}" for run in ordered[:10])
    more = f" and {len(ordered) - 10} more" if len(ordered) > 10 else ""
    raise SettingError(f"Unknown run {wanted!r}. Expected the number or the name of one: {known}{more}.")


def records_of(path: Path, chosen: LoggedRun) -> Iterator[Record]:
    """Read the records of one run that read_runs() found, in order of steps."""
    for record in _records_in(path, Damage()):
        if record.run == chosen.name and record.part in chosen.parts and chosen.holds(record):
            yield record


def _records_in(path: Path, damage: Damage) -> Iterator[Record]:
    """Read every record of every file, in the order in which they were written."""
    with ExitStack() as stack:
        try:
            files = _opened(path, stack)
        except OSError as error:
            raise SettingError(f"Could not read {path}: {error.strerror or error}.") from None
        for file_path, file in files:
            for number, line in enumerate(iter(partial(file.readline, LONGEST), b""), 1):
                if not line.strip():
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
    full = [(name, stack.enter_context(name.open("rb"))) for name in full_files(path)]
    if newest:
        full = [(name, file) for name, file in full if not os.path.sameopenfile(file.fileno(), newest[0][1].fileno())]
    return full + newest or [(path, stack.enter_context(path.open("rb")))]
