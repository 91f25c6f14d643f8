"""Ranks: what every rank measured at a step becomes one, through the key-value store by which the ranks of a job met.

Every rank writes its payload to the store. Rank 0 waits for those of the same moment, merges them and writes the
result, which the others read. A collective hangs, or breaks its group, when a rank is missing. A store is read with a
time-out, whatever backend training uses, and a rank that does not answer is left out.
"""

import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from threading import Thread
from typing import Any, NamedTuple

import torch.distributed as dist

from attnscale.errors import AttnscaleWarning, LostRankWarning
from attnscale.torch_internals import store_of_ranks

PART = 4 * 2**20  # bytes of a value: a TCPStore closes the connection of a client that sends 8 MiB
PAUSES = 5e-4, 0.02  # seconds between two looks at the store, at first and at most
COLLECTING, ANSWERING = 0.5, 0.9  # shares of the time-out: rank 0 collects, and the others still read its answer
HEADER = struct.Struct("<qqq")  # of a value: the two numbers of its moment, and how many parts a payload has
RANKS = struct.Struct("<q")
NUMBERS: dict[tuple[int, ...], "count[int]"] = {}  # of exchanges between the same ranks, in the order of their program


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


@dataclass
class _Absence:
    """A rank that did not answer in time."""

    since: Moment  # the first moment of which it has not been heard since it was last waited for
    failures: int = 0  # times in a row that it was waited for in vain
    rest: int = 0  # rounds in which it is not waited for


class Ranks:
    """The ranks of a group. Nothing here waits longer than `timeout` seconds; `warn` gets what goes wrong."""

    def __init__(
        self, group: dist.ProcessGroup | None, timeout: float, warn: Callable[[AttnscaleWarning], None]
    ) -> None:
        self.timeout, self._warn = timeout, warn
        self._members = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        self.rank, self.size = self._members.index(dist.get_rank()), len(self._members)
        self._patience = timeout * (COLLECTING if self.rank == 0 else ANSWERING)
        number = next(NUMBERS.setdefault(tuple(self._members), count()))
        self._store: Any = store_of_ranks(f"attnscale/{zlib.crc32(repr(self._members).encode())}/{number}")
        self._absent: dict[int, _Absence] = {}
        self._warned: set[int] = set()
        self._warnings: list[str] = []  # from the thread of an exchange
        self._thread: Thread | None = None

    def combine(self, moment: Moment, own: bytes, merge: Callable[[list[bytes]], bytes]) -> Combined:
        """Merge the payloads that the ranks have of this moment; a rank that is not reached keeps its own."""
        exchange = self._collect if self.rank == 0 else self._report
        found = self._in_time(lambda: exchange(moment, own, merge))
        return Combined(own, 1, agreed=False) if found is None else found

    def break_off(self, moment: Moment) -> None:
        """Tell the others that nothing will come of this moment."""
        self._in_time(lambda: self._write("merged" if self.rank == 0 else str(self.rank), moment, b""))

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

    def _collect(self, moment: Moment, own: bytes, merge: Callable[[list[bytes]], bytes]) -> Combined:
        payloads, deadline = [own], time.monotonic() + self._patience
        for rank in sorted(range(1, self.size), key=self._absent.__contains__):
            payload = self._receive(str(rank), rank, moment, deadline)
            payloads += [payload] if payload else []  # an empty one was broken off
        merged = merge(payloads) if len(payloads) > 1 else own
        self._write("merged", moment, RANKS.pack(len(payloads)) + merged)
        return Combined(merged, len(payloads), agreed=True)

    def _report(self, moment: Moment, own: bytes, _: Callable[[list[bytes]], bytes]) -> Combined | None:
        deadline = time.monotonic() + self._patience
        self._write(str(self.rank), moment, own)
        answer = self._receive("merged", 0, moment, deadline)
        return Combined(answer[RANKS.size :], RANKS.unpack_from(answer)[0], agreed=True) if answer else None

    def _receive(self, key: str, rank: int, moment: Moment, deadline: float) -> bytes | None:
        """Read what a rank wrote of a moment; one that was absent is waited for once it was heard from again.

        If it is waited for in vain again and again, as a rank that skipped a step, that is tried less and less often.
        """
        absence = self._absent.get(rank, _Absence(moment))
        last = self._moment(key) if rank in self._absent else moment
        is_awaited = absence.rest == 0 and last is not None and last >= absence.since
        payload = self._read(key, moment, deadline if is_awaited else 0.0)
        if payload is not None:
            self._absent.pop(rank, None)
            return payload
        absence.rest = max(0, absence.rest - 1)
        if is_awaited:
            absence.since, absence.failures = moment, absence.failures + 1
            absence.rest = 2 ** min(absence.failures - 1, 16) - 1
        self._absent[rank] = absence
        if rank not in self._warned:
            self._warned.add(rank)
            last = self._moment(key)
            heard = "it has not answered before" if last is None else f"it was last at {last}"
            self._warnings.append(
                f"Rank {self._members[rank]} did not answer rank {self._members[self.rank]} at {moment} within "
                f"{self._patience:g} s; {heard}. Only what ranks measured at the same step is merged: call step() on "
                "every rank alike, with the same `every`, and load the same state on each."
            )
        return None

    def _write(self, key: str, moment: Moment, payload: bytes) -> None:
        parts = [payload[start : start + PART] for start in range(0, max(1, len(payload)), PART)]
        for number, part in enumerate(parts):
            self._store.set(f"{key}/{number}", HEADER.pack(*moment, number) + part)
        self._store.set(key, HEADER.pack(*moment, len(parts)))

    def _read(self, key: str, moment: Moment, deadline: float) -> bytes | None:
        """Wait until a rank is at this moment; None where it is not in time, or is past it."""
        pause, longest = PAUSES
        while (found := self._moment(key)) is None or found < moment:
            if time.monotonic() >= deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, longest)
        *_, count_of_parts = HEADER.unpack(self._store.get(key))
        parts = [self._store.get(f"{key}/{number}") for number in range(count_of_parts)]
        if any(HEADER.unpack_from(part) != (*moment, number) for number, part in enumerate(parts)):
            return None  # its writer has gone on
        return b"".join(part[HEADER.size :] for part in parts)

    def _moment(self, key: str) -> Moment | None:
        """Return the moment of the latest payload under a key."""
        if not self._store.check([key]):
            return None
        return Moment(*HEADER.unpack(self._store.get(key))[:2])
