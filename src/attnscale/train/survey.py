"""Survey: the runs of a log, and one of them as a whole, read as a stream: however long, little is in memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnscale.errors import SettingError
from attnscale.train.course import Course
from attnscale.train.log import Index, RunIndex, index_of
from attnscale.train.record import Record
from attnscale.train.run import Run, Summary
from attnscale.train.snapshot import snapshot


@dataclass(frozen=True)
class Entry:
    """One run of a log, in a list of them."""

    number: int  # from 1, in order of their first lines
    name: str | None  # None: from before runs had names
    first_step: int
    last_step: int
    records: int
    began: float  # seconds since the epoch
    ended: float

    def to_dict(self) -> dict[str, Any]:
        """The entry as JSON takes it."""
        return dict(vars(self))


@dataclass(frozen=True)
class Survey:
    """All runs of a log, the one that was asked for, and its course for curves."""

    runs: list[Entry]
    chosen: Entry
    run: Run
    course: list[Record]  # empty where no curves were asked for

    def to_dict(self) -> dict[str, Any]:
        """The run as JSON takes it, and what else its log holds."""
        return {**self.run.to_dict(), "number": self.chosen.number, "runs": [entry.to_dict() for entry in self.runs]}


def survey(path: Path, wanted: str | None = None, curves: bool = False) -> Survey:
    """Look at a log: the run of a name or a number in it, or the one that was written last, with `curves` or without.

    A log of one run in order, which most are, is read once; another twice.
    """
    with snapshot(path) as log:
        looking = _Looking(curves)
        index = index_of(log, looking.add)
        if not index.runs:
            raise SettingError(f"Expected records of attnscale.Monitor in {path}, and found none in it.")
        entries = [_entry(number, run) for number, run in enumerate(index.runs, 1)]
        chosen = index.newest if wanted is None else named_run(wanted, index)
        if len(index.runs) > 1 or not chosen.is_in_order:
            looking = _Looking(curves)
            for record in chosen.records(log):
                looking.add(record)
        run = looking.summary.run(len(index.damaged), index.damage, chosen.name)
        return Survey(entries, entries[index.runs.index(chosen)], run, looking.course.records)


class _Looking:
    """What is made of records while they go by."""

    def __init__(self, curves: bool) -> None:
        self.summary, self.course, self._curves = Summary(), Course(), curves

    def add(self, record: Record) -> None:
        self.summary.add(record)
        if self._curves:
            self.course.add(record)


def named_run(wanted: str, index: Index) -> RunIndex:
    """The run of a name, or of a number in order of their first lines."""
    entries = [_entry(number, run) for number, run in enumerate(index.runs, 1)]
    for entry, run in zip(entries, index.runs, strict=True):
        if wanted in (entry.name, str(entry.number)):
            return run
    known = ", ".join(f"{entry.number}{'' if entry.name is None else f' ({entry.name})'}" for entry in entries[:10])
    more = f" and {len(entries) - 10} more" if len(entries) > 10 else ""
    raise SettingError(f"Unknown run {wanted!r}. Expected the number or the name of one: {known}{more}.")


def _entry(number: int, run: RunIndex) -> Entry:
    return Entry(number, run.name, run.steps[0], run.steps[-1], len(run.steps), run.began, run.ended)
