"""Ranks: what every rank measured at a step becomes one, through the key-value store by which the ranks of a job met.

Every rank writes its payload to the store. Rank 0 waits for those of the same moment, merges them and writes the
result, which the others read. A collective hangs, or breaks its group, when a rank is missing. A store is read with a
time-out, whatever backend training uses, and a rank that does not answer is left out.
"""

import pickle
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from threading import Thread
from typing import Any, NamedTuple

import torch.distributed as dist

from attnscale.errors import AttnscaleWarning, LostRankWarning
from attnscale.torch_internals import store_of_ranks
from attnscale.train.tally import Tallies, from_bytes, merge, to_bytes

PAUSES = 5e-4, 0.02  # seconds between two looks at the store, at first and at most
COLLECTING, ANSWERING = 0.5, 0.9  # shares of the time-out: rank 0 collects, and the others still read its answer
NUMBERS: dict[tuple[int, ...], "count[int]"] = {}  # of exchanges between the same ranks, in the order of their program

Learned = tuple[float | None, float | None]  # loss and learning rate, None where not given
Merge = Callable[[Sequence[bytes]], bytes]


class Moment(NamedTuple):
    """A training step of a run, and how often the run was resumed before it."""

    run: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step}{f' of a run resumed {self.run} times' * (self.run > 0)}"


@dataclass(frozen=True)
class Combined:
    """The merged payload, and of how many ranks it is."""

    payload: bytes
    ranks: int
    agreed: bool  # by rank 0, so that every rank that was reached has the same


class Ranks:
    """The ranks of a group. Nothing here waits longer than `timeout` seconds; `warn` gets what goes wrong."""

    def __init__(
        self, group: dist.ProcessGroup | None, timeout: float, warn: Callable[[AttnscaleWarning], None]
    ) -> None:
        self.timeout, self._warn = timeout, warn
        self._members = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        self.rank, self.size = self._members.index(dist.get_rank()), len(self._members)
        number = next(NUMBERS.setdefault(tuple(self._members), count()))
        self._store: Any = store_of_ranks(f"attnscale/{zlib.crc32(repr(self._members).encode())}/{number}")
        self._missed: dict[int, Moment] = {}  # by rank: the moment at which it did not answer
        self._warned: set[int] = set()
        self._warnings: list[str] = []  # from the thread of an exchange
        self._thread: Thread | None = None

    def combine(self, moment: Moment, own: bytes, merge: Merge) -> Combined:
        """Merge the payloads that the ranks have of this moment; a rank that is not reached keeps its own."""
        exchange = (lambda: self._collect(moment, own, merge)) if self.rank == 0 else lambda: self._ask(moment, own)
        return self._in_time(exchange) or Combined(own, 1, agreed=False)

    def break_off(self, moment: Moment) -> None:
        """Tell the others that nothing will come of this moment."""
        self._in_time(lambda: self._write(self.rank, moment, b""))

    def _in_time(self, exchange: Callable[[], Combined | None]) -> Combined | None:
        """Run an exchange on a thread of its own: a store whose host has stopped keeps its callers for ever."""
        if self._thread is not None and self._thread.is_alive():
            return None
        found: list[Combined | None] = []

        def run() -> None:
            try:
                found.append(exchange())
            except Exception as error:  # the run is worth more than its log
                self._warnings.append(f"The exchange between ranks failed: {type(error).__name__}: {error}.")

        self._thread = Thread(target=run, daemon=True)
        self._thread.start()
        self._thread.join(self.timeout)
        if self._thread.is_alive():
            self._warnings.append(f"The store of the ranks did not answer within {self.timeout:g} s.")
        while self._warnings:
            self._warn(LostRankWarning(f"{self._warnings.pop(0)} Training goes on, without rows of ranks not reached."))
        return found[0] if found else None

    def _collect(self, moment: Moment, own: bytes, merge: Merge) -> Combined:
        """Merge what comes in time, and answer all."""
        others, patience = range(1, self.size), COLLECTING * self.timeout
        awaited = self._wait(others, moment, patience)
        payloads = [own]
        for rank in others:
            payload = self._read(rank, moment)
            if payload is not None:
                self._missed.pop(rank, None)
                payloads += [payload] if payload else []  # an empty one was broken off
            elif rank in awaited:
                self._miss(rank, moment, patience)
        merged = merge(payloads) if len(payloads) > 1 else own
        self._write(0, moment, pickle.dumps((len(payloads), merged)))
        return Combined(merged, len(payloads), agreed=True)

    def _ask(self, moment: Moment, own: bytes) -> Combined | None:
        patience = ANSWERING * self.timeout
        self._write(self.rank, moment, own)
        awaited = self._wait([0], moment, patience)
        answer = self._read(0, moment)
        if answer is None and awaited:
            self._miss(0, moment, patience)
        if not answer:
            return None
        ranks, merged = pickle.loads(answer)
        return Combined(merged, ranks, agreed=True)

    def _miss(self, rank: int, moment: Moment, patience: float) -> None:
        """Note a rank that did not answer, and warn of it once."""
        self._missed[rank] = moment
        if rank not in self._warned:
            self._warned.add(rank)
            last = self._last(rank)
            heard = f"it was last at {last}" if last > NEVER else "it has not answered before"
            self._warnings.append(
                f"Rank {self._members[rank]} did not answer rank {self._members[self.rank]} at {moment} within "
                f"{patience:g} s; {heard}. Only what ranks measured at the same step is merged: call step() on "
                "every rank alike, with the same `every`, and load the same state on each."
            )

    def _write(self, rank: int, moment: Moment, payload: bytes) -> None:
        self._store.set(str(rank), pickle.dumps((tuple(moment), payload)))
        self._store.set(f"{rank}/last", pickle.dumps(tuple(moment)))  # a short one, to be looked at often

    def _last(self, rank: int) -> Moment:
        """Return the moment of the latest payload of a rank."""
        key = f"{rank}/last"
        return Moment(*pickle.loads(self._store.get(key))) if self._store.check([key]) else NEVER

    def _wait(self, ranks: Sequence[int], moment: Moment, patience: float) -> list[int]:
        """Wait until ranks are at this moment or past it; not for one that was late and was not heard of since."""
        awaited = [rank for rank in ranks if rank not in self._missed or self._last(rank) >= self._missed[rank]]
        deadline, (pause, longest) = time.monotonic() + patience, PAUSES
        while any(self._last(rank) < moment for rank in awaited) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return awaited

    def _read(self, rank: int, moment: Moment) -> bytes | None:
        """Return what a rank wrote of this moment; None where it is not there yet, or is past it."""
        if self._last(rank) < moment:
            return None
        at, payload = pickle.loads(self._store.get(str(rank)))
        return payload if at == moment else None


NEVER = Moment(-1, -1)


@dataclass(frozen=True)
class Merged:
    """The tallies of a step, and whose they are."""

    tallies: Tallies
    ranks: int = 1
    rank: int | None = None  # whose they are, where ranks could not be merged
    is_written_here: bool = True
    is_logged_here: bool = True
    learning: Learned = (None, None)  # the mean loss of the ranks that gave one, and the learning rate of this rank


@dataclass
class Merging:
    """The groups of ranks among which a run shares out its work; `warn` warns once of each thing that goes wrong."""

    group: dist.ProcessGroup | None
    head_group: dist.ProcessGroup | None
    is_wanted: bool
    timeout: float
    warn: Callable[[AttnscaleWarning], None]
    ranks: Ranks | None = None

    @property
    def part(self) -> int:
        """Number of this rank's part of the heads of every layer."""
        return 0 if self.head_group is None else dist.get_rank(self.head_group)

    @property
    def is_needed(self) -> bool:
        """True if other ranks have anything to add."""
        return self.is_wanted and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def merged(self, moment: Moment, own: Tallies, learning: Learned = (None, None)) -> Merged:
        """Return the tallies of all ranks; every rank of the group must call it, also one that measured nothing."""
        loss, lr = learning
        self.ranks = self.ranks or Ranks(self.group, self.timeout, self.warn)
        payload = pickle.dumps(([] if loss is None else [loss], to_bytes(own)))
        combined = self.ranks.combine(moment, payload, merge_payloads)
        losses, tallies = pickle.loads(combined.payload)
        mean = sum(losses) / len(losses) if losses else None  # as data-parallel training averages it
        is_first, rank = self.ranks.rank == 0, None if combined.agreed else dist.get_rank()
        is_written = is_first or not combined.agreed
        return Merged(from_bytes(tallies), combined.ranks, rank, is_written, is_first, (mean, lr))

    def break_off(self, moment: Moment) -> None:
        """Tell other ranks that nothing comes from this one at this moment."""
        if self.ranks is not None:
            self.ranks.break_off(moment)


def merge_payloads(payloads: Sequence[bytes]) -> bytes:
    """Merge the losses and tallies of several ranks."""
    losses, tallies = zip(*map(pickle.loads, payloads), strict=True)
    return pickle.dumps((list(chain(*losses)), to_bytes(merge(map(from_bytes, tallies)))))
