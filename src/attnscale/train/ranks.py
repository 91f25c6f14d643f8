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
from itertools import count
from threading import Thread
from typing import Any

import torch.distributed as dist

from attnscale.errors import AttnscaleWarning, LostRankWarning
from attnscale.torch_internals import store_of_ranks
from attnscale.train.tally import Tallies, from_bytes, merge, to_bytes

COLLECTING, ANSWERING = 0.5, 0.9  # shares of the time-out: rank 0 collects, and the others still read its answer
LATE_TIMEOUT = 0.25  # seconds to wait for a rank that did not answer the last time
NUMBERS: dict[tuple[int, ...], "count[int]"] = {}  # numbers the exchanges of each set of ranks

Learned = tuple[float | None, float | None]  # loss and learning rate, None where not given
Answer = tuple[int, list[float], bytes]  # number of merged ranks, their losses, and their tallies


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
    """Exchange between the ranks of a group; waits at most `timeout` seconds and calls `warn` for failures.

    A moment is the text of a training step, such as `step 50`, equal on all ranks that measure together.
    """

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
        self._heard: dict[int, str] = {}  # last moment at which each rank answered
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

    def merged(self, moment: str, own: Tallies, learning: Learned) -> Merged:
        """Return the merged tallies of all ranks; every rank of the group must call it, even without measurements."""
        loss, lr = learning
        payload = ([] if loss is None else [loss], to_bytes(own))
        answer = self._in_time(lambda: (self._collect if self.is_first else self._request)(moment, payload))
        ranks, losses, tallies = answer or (1, *payload)
        mean = sum(losses) / len(losses) if losses else None  # as data-parallel training averages it
        return Merged(from_bytes(tallies), ranks, None if answer else dist.get_rank(), self.is_first, (mean, lr))

    def break_off(self, moment: str) -> None:
        """Tell the other ranks that this rank has no payload for this moment."""
        self._in_time(lambda: self._write(moment, None))

    def close(self) -> None:
        """Close the connection to the other ranks."""
        self._store = None

    def _in_time(self, exchange: Callable[[], Answer | None]) -> Answer | None:
        """Run an exchange on a separate thread with a time-out, since a store without its host blocks for ever."""
        if self._thread is not None and self._thread.is_alive():
            return None
        found: list[Answer | None] = []

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
        return found[0] if found else None

    def _connect(self) -> None:
        if self._store is None:
            self._members = dist.get_process_group_ranks(dist.group.WORLD if self._group is None else self._group)
            self._rank = self._members.index(dist.get_rank())
            number = next(NUMBERS.setdefault(tuple(self._members), count()))
            self._store = store_of_ranks(f"attnscale/{zlib.crc32(repr(self._members).encode())}/{number}")

    def _collect(self, moment: str, own: tuple[list[float], bytes]) -> Answer:
        """Merge the payloads that arrive in time, and write the result for all ranks."""
        answers = self._read(range(1, len(self._members)), moment, COLLECTING * self._timeout)
        payloads = [own, *filter(None, answers)]  # None comes from break_off()
        losses = [loss for some, _ in payloads for loss in some]
        merged = (len(payloads), losses, to_bytes(merge(from_bytes(tallies) for _, tallies in payloads)))
        self._write(moment, merged)
        return merged

    def _request(self, moment: str, own: tuple[list[float], bytes]) -> Answer | None:
        self._write(moment, own)
        answers = self._read([0], moment, ANSWERING * self._timeout)
        return answers[0] if answers else None

    def _write(self, moment: str, payload: Any) -> None:
        """Write this rank's payload in place of its last one."""
        last, self._written = self._written, f"{moment}/{self._rank}"
        self._store.set(self._written, pickle.dumps(payload))
        if last:
            self._store.delete_key(last)

    def _read(self, ranks: Sequence[int], moment: str, patience: float) -> list[Any]:
        """Return the payloads of ranks at this moment; waits longer for ranks that answered the last time."""
        keys = {rank: f"{moment}/{rank}" for rank in ranks}
        for is_late, seconds in ((False, patience), (True, LATE_TIMEOUT)):
            awaited = [key for rank, key in keys.items() if (rank in self._missed) == is_late]
            deadline, pause = time.monotonic() + seconds, 5e-4
            while awaited and not self._store.check(awaited) and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
        present = [rank for rank, key in keys.items() if self._store.check([key])]
        self._missed = set(ranks) - set(present)
        for rank in sorted(self._missed - self._warned):
            self._warned.add(rank)
            heard = f"it answered last at {self._heard[rank]}" if rank in self._heard else "it has not answered before"
            self._warnings.append(
                f"Rank {self._members[rank]} did not answer rank {self._members[self._rank]} at {moment} within "
                f"{patience:g} s; {heard}. Only measurements of the same step are merged: call step() on "
                "every rank alike, with the same `every`, and load the same state on each."
            )
        self._heard |= dict.fromkeys(present, moment)
        return [pickle.loads(self._store.get(keys[rank])) for rank in present]
