"""Merging of the measurements of all ranks at a step, through torch.distributed's key-value store.

Every rank writes its payload to the store. Rank 0 waits for the payloads of the same moment, merges them and writes the
result, and the others read it. A collective would hang or break its group if a rank is missing. Reading the store has a
time-out with every backend, and a rank that does not answer is excluded.
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

COLLECTING, ANSWERING = 0.5, 0.9  # shares of the time-out: rank 0 collects, and the others still read its answer
AGAIN = 0.25  # seconds to wait for a rank that did not answer the last time
NUMBERS: dict[tuple[int, ...], "count[int]"] = {}  # numbers the exchanges of each set of ranks

Learned = tuple[float | None, float | None]  # loss and learning rate, None where not given


class Moment(NamedTuple):
    """A training step, and how often its run was resumed before it."""

    run: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step}{f' of a run resumed {self.run} times' * (self.run > 0)}"


@dataclass(frozen=True)
class Merged:
    """Merged tallies of a step."""

    tallies: Tallies
    ranks: int = 1
    rank: int | None = None  # this rank, if ranks could not be merged
    is_first: bool = True  # True on the rank that logs
    learning: Learned = (None, None)  # mean loss over ranks, and the learning rate of this rank

    @property
    def is_written_here(self) -> bool:
        """True if the sinks of this rank get the record."""
        return self.is_first or self.rank is not None


class Ranks:
    """Exchange between the ranks of a group; waits at most `timeout` seconds and calls `warn` for failures."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        head_group: dist.ProcessGroup | None,
        timeout: float,
        warn: Callable[[AttnscaleWarning], None],
    ) -> None:
        self._group, self._head_group, self._timeout, self._warn = group, head_group, timeout, warn
        self._store: Any = None
        self._written = ""  # the key of this rank's latest payload
        self._heard: dict[int, Moment] = {}  # last moment at which each rank answered
        self._missed: set[int] = set()  # ranks that did not answer the last time
        self._warned: set[int] = set()
        self._warnings: list[str] = []  # from the thread of an exchange
        self._thread: Thread | None = None

    @property
    def part(self) -> int:
        """Index of this rank's part of the heads of every layer."""
        return 0 if self._head_group is None else dist.get_rank(self._head_group)

    @property
    def is_needed(self) -> bool:
        """True if there are other ranks."""
        return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    @property
    def is_first(self) -> bool:
        """True on the rank that writes and warns."""
        return not self.is_needed or dist.get_rank(self._group) == 0

    def merged(self, moment: Moment, own: Tallies, learning: Learned) -> Merged:
        """Return the merged tallies of all ranks; every rank of the group must call it, even without measurements."""
        loss, lr = learning
        payload = pickle.dumps(([] if loss is None else [loss], to_bytes(own)))
        exchange = self._collect if self.is_first else self._ask
        answer = self._in_time(lambda: exchange(moment, payload))
        ranks, merged = pickle.loads(answer) if answer else (1, payload)
        losses, tallies = pickle.loads(merged)
        mean = sum(losses) / len(losses) if losses else None  # as data-parallel training averages it
        rank = None if answer else dist.get_rank()
        return Merged(from_bytes(tallies), ranks, rank, self.is_first, (mean, lr))

    def break_off(self, moment: Moment) -> None:
        """Tell the other ranks that this rank has no payload for this moment."""
        self._in_time(lambda: self._write(moment, b""))

    def close(self) -> None:
        """Close the connection to the other ranks."""
        self._store = None

    def _in_time(self, exchange: Callable[[], bytes]) -> bytes:
        """Run an exchange on a separate thread with a time-out, since a store without its host blocks for ever."""
        if self._thread is not None and self._thread.is_alive():
            return b""
        found: list[bytes] = []

        def run() -> None:
            try:
                found.append(exchange())
            except Exception as error:  # logging must not stop training
                self._warnings.append(f"The exchange between ranks failed: {type(error).__name__}: {error}.")

        self._connect()
        self._thread = Thread(target=run, daemon=True)
        self._thread.start()
        self._thread.join(self._timeout)
        if self._thread.is_alive():
            self._warnings.append(f"The store of the ranks did not answer within {self._timeout:g} s.")
        while self._warnings:
            self._warn(LostRankWarning(f"{self._warnings.pop(0)} Training goes on, without rows of ranks not reached."))
        return found[0] if found else b""

    def _connect(self) -> None:
        if self._store is None:
            self._members = dist.get_process_group_ranks(dist.group.WORLD if self._group is None else self._group)
            self._rank = self._members.index(dist.get_rank())
            number = next(NUMBERS.setdefault(tuple(self._members), count()))
            self._store = store_of_ranks(f"attnscale/{zlib.crc32(repr(self._members).encode())}/{number}")

    def _collect(self, moment: Moment, own: bytes) -> bytes:
        """Merge the payloads that arrive in time, and write the result for all ranks."""
        answers = self._read(range(1, len(self._members)), moment, COLLECTING * self._timeout)
        payloads = [own, *filter(None, answers)]  # an empty payload comes from break_off()
        return self._write(moment, pickle.dumps((len(payloads), merge_payloads(payloads))))

    def _ask(self, moment: Moment, own: bytes) -> bytes:
        self._write(moment, own)
        return next(iter(self._read([0], moment, ANSWERING * self._timeout)), b"")

    def _write(self, moment: Moment, payload: bytes) -> bytes:
        """Write this rank's payload in place of its last one, and return it."""
        last, self._written = self._written, _key(self._rank, moment)
        self._store.set(self._written, payload)
        if last:
            self._store.delete_key(last)
        return payload

    def _read(self, ranks: Sequence[int], moment: Moment, patience: float) -> list[bytes]:
        """Return the payloads of ranks at this moment; waits longer for ranks that answered the last time."""
        for is_late, seconds in ((False, patience), (True, AGAIN)):
            keys = [_key(rank, moment) for rank in ranks if (rank in self._missed) == is_late]
            deadline, pause = time.monotonic() + seconds, 5e-4
            while keys and not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
        present = [rank for rank in ranks if self._store.check([_key(rank, moment)])]
        for rank in (rank for rank in ranks if rank not in present):
            self._miss(rank, moment, patience)
        self._heard |= dict.fromkeys(present, moment)
        self._missed = set(ranks) - set(present)
        return [self._store.get(_key(rank, moment)) for rank in present]

    def _miss(self, rank: int, moment: Moment, patience: float) -> None:
        if rank not in self._warned:
            self._warned.add(rank)
            heard = f"it answered last at {self._heard[rank]}" if rank in self._heard else "it has not answered before"
            self._warnings.append(
                f"Rank {self._members[rank]} did not answer rank {self._members[self._rank]} at {moment} within "
                f"{patience:g} s; {heard}. Only what ranks measured at the same step is merged: call step() on "
                "every rank alike, with the same `every`, and load the same state on each."
            )


def _key(rank: int, moment: Moment) -> str:
    return f"{moment.run}/{moment.step}/{rank}"


def merge_payloads(payloads: Sequence[bytes]) -> bytes:
    """Merge the losses and tallies of several ranks."""
    losses, tallies = zip(*map(pickle.loads, payloads), strict=True)
    return pickle.dumps((list(chain(*losses)), to_bytes(merge(map(from_bytes, tallies)))))
