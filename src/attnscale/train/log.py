"""Reading a log of records, whatever befell it: which of its lines stand, of which run, and which are none.

Every line says which run it belongs to. A run that was resumed goes on under its name as another part, which replaces
the steps that it repeats; nothing else is left out, whatever the order of its steps. Lines from before there were names
are runs too: a step that goes back begins another.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from attnscale.train.line import parsed, records_of
from attnscale.train.record import Record
from attnscale.train.schema import LineError
from attnscale.train.snapshot import Place, Snapshot, snapshot

SHOWN = 3  # damaged lines that are told with what is wrong


@dataclass(frozen=True)
class Log:
    """A log that was read: the records of its runs, each in order of steps, and the lines that were none."""

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
class Places:
    """Places of lines, nine bytes each."""

    files: "array[int]" = field(default_factory=lambda: array("b"))
    offsets: "array[int]" = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[Place]:
        return zip(self.files, self.offsets, strict=True)

    def insert(self, at: int, place: Place) -> None:
        """Put a place before another, or at the end."""
        self.files.insert(at, place[0])
        self.offsets.insert(at, place[1])


@dataclass
class RunIndex:
    """Where the records of one run stand, in order of steps; 25 bytes each."""

    name: str | None
    began: float  # seconds since the epoch, of its first record
    ended: float = 0.0  # of its last
    newest: int = 0  # how many lines of the log came before its last
    is_in_order: bool = True  # every record came after those that stand before it
    steps: "array[int]" = field(default_factory=lambda: array("q"))
    last_steps: "array[int]" = field(default_factory=lambda: array("q"))
    places: Places = field(default_factory=Places)
    parts: dict[str | None, None] = field(default_factory=dict)

    def add(self, record: Record, place: Place) -> None:
        """Put a record where it belongs; the first of a new part replaces the steps from its own on."""
        if self.parts and record.part not in self.parts:
            first = bisect_left(self.steps, record.step)
            self.is_in_order &= first == len(self.steps)
            for column in (self.steps, self.last_steps, self.places.files, self.places.offsets):
                del column[first:]
        self.parts[record.part] = None
        at = bisect_right(self.steps, record.step)
        self.is_in_order &= at == len(self.steps)
        self.steps.insert(at, record.step)
        self.last_steps.insert(at, record.last_step)
        self.places.insert(at, place)
        self.ended = record.time

    def records(self, log: Snapshot) -> Iterator[Record]:
        """Its records, read one by one."""
        return records_of(map(log.line, self.places))


@dataclass
class Index:
    """What a log holds, without holding it."""

    runs: list[RunIndex] = field(default_factory=list)  # in order of their first lines
    damaged: Places = field(default_factory=Places)
    damage: list[str] = field(default_factory=list)  # the first of them, in words

    @property
    def newest(self) -> RunIndex:
        """The run that was written last."""
        return max(self.runs, key=lambda run: run.newest)


def read_log(path: str | Path) -> Log:
    """Read all records of a log into memory; lines that are none are counted."""
    with snapshot(Path(path)) as log:
        index = index_of(log)
        return Log([record for run in index.runs for record in run.records(log)], len(index.damaged))


def index_of(log: Snapshot, seen: Callable[[Record], None] = lambda record: None) -> Index:
    """Look at every line of a log once, and keep where each record stands; `seen` is called with each."""
    index, runs = Index(), dict[str | None, RunIndex]()
    for number, (place, line) in enumerate(log.lines()):
        if not line.strip():
            continue
        try:
            record = parsed(line)
        except LineError as error:
            index.damaged.insert(len(index.damaged), place)
            if len(index.damage) < SHOWN:
                index.damage.append(str(error))
            continue
        run = runs.get(record.run)
        if run is None or (record.run is None and record.step <= run.steps[-1]):
            run = runs[record.run] = RunIndex(record.run, record.time)
            index.runs.append(run)
        run.add(record, place)
        run.newest = number
        seen(record)
    index.damage = [f"{log.told(place)}: {why}" for place, why in zip(index.damaged, index.damage, strict=False)]
    return index
