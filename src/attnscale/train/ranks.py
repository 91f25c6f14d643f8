"""Ranks: the tallies of every rank become one, by one packed message a rank up a tree and one down.

A binomial tree with a merge of our own, since counts add, maxima do not, and means move: of 16,384 ranks each waits
for 14 messages at most, where gathering would bring every rank 16,384. It runs on a gloo group of its own, so that a
late or dead rank is an error that can be caught: its parent goes on without it, it is not waited for again, and a
rank that lost its parent keeps what its own branch saw.
"""

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from attnscale.errors import LostRankWarning

FOREVER = timedelta(days=365)
TAGS = 2**24  # rounds told apart, so that what a late rank sends is not taken for the next step's


@dataclass(frozen=True)
class Combined:
    """What came of a round: the merged payload, from how many ranks, and whether it is that of all of them."""

    payload: bytes
    ranks: int
    agreed: bool  # came down from rank 0, so every rank that is reached holds the same


def _wait(work: dist.Work | None, seconds: float) -> None:
    """Wait on a thread that can be left behind: one that times out inside gloo closes all its connections."""
    assert work is not None  # None for ranks that are not of the group
    failed: list[Exception] = []

    def wait() -> None:
        try:
            work.wait(FOREVER)
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no message within {seconds:g} s")
    if failed:
        raise failed[0]


class Ranks:
    """The ranks of a training run, as a tree with rank 0 at its root."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        self.timeout = timeout
        members = None if group is None else dist.get_process_group_ranks(group)
        # a group of some ranks is made by those alone: others of the job may make one of their own at the same time
        self._group = dist.new_group(
            members, timedelta(seconds=timeout), backend="gloo", use_local_synchronization=members is not None
        )
        self._members = dist.get_process_group_ranks(self._group)
        self.rank, self.size = dist.get_rank(self._group), len(self._members)
        self._lost: set[int] = set()
        self._round = 0

    def combine(self, own: bytes, merge: Callable[[list[bytes]], bytes]) -> Combined:
        """Merge the payloads of all ranks; `merge` is associative."""
        self._round += 1
        payloads, ranks = [own], 1
        children = [child for child, _ in self._children()]
        for child, depth in self._children():
            received = self._receive(child, (depth + 1) * self.timeout)
            if received is not None:
                payloads.append(received[8:])
                ranks += int.from_bytes(received[:8], "little")
        merged = merge(payloads) if len(payloads) > 1 else own
        message = ranks.to_bytes(8, "little") + merged
        agreed = self.rank == 0
        if self.rank > 0:
            parent = self.rank & (self.rank - 1)
            levels = self.size.bit_length()
            answer = self._receive(parent, (levels + 2) * self.timeout) if self._send(parent, message) else None
            message, agreed = (message, False) if answer is None else (answer, True)
        for child in children:
            if child not in self._lost:
                self._send(child, message)
        return Combined(message[8:], int.from_bytes(message[:8], "little"), agreed)

    def _children(self) -> list[tuple[int, int]]:
        """Ranks that report to this one and are still there, the nearest first, with the depth of their branch."""
        found, distance, depth = [], 1, 0
        while self.rank + distance < self.size and not self.rank & distance:
            if self.rank + distance not in self._lost:
                found.append((self.rank + distance, depth))
            distance, depth = 2 * distance, depth + 1
        return found

    def _send(self, rank: int, message: bytes) -> bool:
        def send() -> None:
            size = torch.tensor([len(message)])
            body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            for number, tensor in enumerate((size, body)):
                _wait(dist.isend(tensor, self._members[rank], self._group, self._tag(number)), self.timeout)

        return self._attempt(rank, send)

    def _receive(self, rank: int, timeout: float) -> bytes | None:
        received: list[bytes] = []

        def receive() -> None:
            size = torch.zeros(1, dtype=torch.int64)
            _wait(dist.irecv(size, self._members[rank], self._group, self._tag(0)), timeout)
            body = torch.zeros(int(size), dtype=torch.uint8)
            _wait(dist.irecv(body, self._members[rank], self._group, self._tag(1)), timeout)
            received.append(body.numpy().tobytes())

        return received[0] if rank not in self._lost and self._attempt(rank, receive) else None

    def _tag(self, number: int) -> int:
        return 2 * (self._round % TAGS) + number

    def _attempt(self, rank: int, exchange: Callable[[], None]) -> bool:
        if rank in self._lost:
            return False
        try:
            exchange()
        except (RuntimeError, TimeoutError) as error:
            self._lost.add(rank)
            warnings.warn(
                f"Rank {self._members[rank]} did not answer rank {self._members[self.rank]} within {self.timeout:g} s "
                f"and is left out of the score statistics from now on ({str(error).splitlines()[0][:120]}).",
                LostRankWarning,
                stacklevel=2,
            )
            return False
        return True
