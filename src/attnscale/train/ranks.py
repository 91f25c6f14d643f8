"""Ranks: the tallies of every rank become one, by one packed message a rank up a tree and one down.

A binomial tree with a merge of our own, since counts add, maxima do not, and means move: of 16,384 ranks each waits
for 14 messages at most, where gathering would bring every rank 16,384. It runs on a gloo group of its own. Messages say
of which moment they are, and only those of the same moment are merged. A rank that does not answer is left out, and
not waited for until it is heard from again; a rank that lost its parent keeps what its own branch saw.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import torch.distributed as dist

from attnscale.errors import AttnscaleWarning, LostRankWarning, NotRecordedWarning
from attnscale.torch_internals import gloo_group
from attnscale.train.peer import GOODBYE, Peer

POLL = 0.05  # seconds in which a rank that was late is found to have spoken
NUMBERS: dict[tuple[int, ...], "count[int]"] = {}  # of the groups that these ranks made, in the order of their program
PARTING = 1.0  # seconds in which the others close their groups too


@dataclass(frozen=True)
class Moment:
    """Of what a message is: a run, by how often it was resumed, a step of it, and which call of that step."""

    run: int
    step: int
    call: int = 0

    def __str__(self) -> str:
        resumed = f" of a run resumed {self.run} times" * (self.run > 0)
        return f"step {self.step}{resumed}"


@dataclass(frozen=True)
class Combined:
    """What came of a round: the merged payload, from how many ranks, and whether it is that of all of them."""

    payload: bytes
    ranks: int
    agreed: bool  # came down from rank 0, so every rank that is reached holds the same


@dataclass(frozen=True)
class _Message:
    moment: Moment
    every: int  # steps between those that its sender samples
    ranks: int
    answers: Moment | None  # the message from below that was heard last
    agreed: bool
    is_absent: bool  # its sender broke the step off
    payload: bytes

    def to_bytes(self) -> bytes:
        head = asdict(self)
        del head["payload"]
        return json.dumps(head).encode() + b"\n" + self.payload

    @classmethod
    def from_bytes(cls, message: bytes) -> "_Message":
        line, _, payload = message.partition(b"\n")
        head = json.loads(line)
        answers = None if head["answers"] is None else Moment(**head.pop("answers"))
        return cls(**{**head, "moment": Moment(**head["moment"]), "answers": answers, "payload": payload})


@dataclass(eq=False)
class _Neighbour:
    """A rank that this one reports to, or that reports to it, and how it kept time so far."""

    peer: Peer
    every: int | None = None
    failures: int = 0  # waits in vain since it was last in time
    rest: int = 0  # rounds in which it is not waited for, though it was heard
    missed: set[Moment] = field(default_factory=set)  # rounds without a word from it, which comes late perhaps
    kept: _Message | None = None  # of a step that is still to come
    heard: Moment | None = None


class Ranks:
    """The ranks of a training run, as a tree with rank 0 at its root."""

    def __init__(
        self, group: dist.ProcessGroup | None, timeout: float, every: int, tell: Callable[[AttnscaleWarning], None]
    ) -> None:
        self.timeout, self._every, self._tell = timeout, every, tell
        self._mismatched: set[int] = set()  # ranks that were told of
        self._members = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        self.rank, self.size = self._members.index(dist.get_rank()), len(self._members)
        number = next(NUMBERS.setdefault(tuple(self._members), count()))
        name = f"attnscale/{'-'.join(map(str, self._members))}/{number}"
        self._group: Any = gloo_group(name, self.rank, self.size, timeout)
        self._children: list[tuple[_Neighbour, int]] = []  # with the depth of their branch, the nearest first
        distance, depth = 1, 0
        while self.rank + distance < self.size and not self.rank & distance:
            self._children.append((self._neighbour(self.rank + distance), depth))
            distance, depth = 2 * distance, depth + 1
        self._parent = self._neighbour(self.rank & (self.rank - 1)) if self.rank > 0 else None

    def _neighbour(self, rank: int) -> _Neighbour:
        return _Neighbour(Peer(rank, self._group, self._members[rank]))

    def combine(self, moment: Moment, own: bytes, merge: Callable[[list[bytes]], bytes]) -> Combined:
        """Merge the payloads that all ranks have of this moment; `merge` is associative."""
        payloads, ranks = [own], 1
        for child, depth in self._children:
            received = self._from_child(child, moment, (depth + 1) * self.timeout)
            if received is not None:
                payloads.append(received.payload)
                ranks += received.ranks
        merged = merge(payloads) if len(payloads) > 1 else own
        found = self._message(moment, merged, ranks, agreed=self.rank == 0)
        if self._parent is not None:
            self._parent.peer.send(found.to_bytes())
            answer = self._from_parent(self._parent, moment, (self.size.bit_length() + 2) * self.timeout)
            found = found if answer is None else answer
        for child, _ in self._children:
            down = self._message(moment, found.payload, found.ranks, agreed=found.agreed, answers=child.heard)
            child.peer.send(down.to_bytes())
        return Combined(found.payload, found.ranks, found.agreed)

    def break_off(self, moment: Moment) -> None:
        """Nothing comes from this rank of a moment that the others will ask for; nobody is waited for."""
        message = self._message(moment, b"", 0, agreed=False, is_absent=True).to_bytes()
        for neighbour in (*(child for child, _ in self._children), *([] if self._parent is None else [self._parent])):
            neighbour.missed.add(moment)
            neighbour.peer.send(message)

    def close(self) -> None:
        """Part from the others and let the group go; a thread that waits for a rank that stays keeps it until then."""
        peers = [each.peer for each in (*(child for child, _ in self._children), self._parent) if each is not None]
        for peer in peers:
            peer.send(GOODBYE)
        until = time.monotonic() + PARTING
        for peer in peers:
            peer.part(until - time.monotonic())
        self._children, self._parent, self._group = [], None, None

    def _message(
        self,
        moment: Moment,
        payload: bytes,
        ranks: int,
        *,
        agreed: bool,
        answers: Moment | None = None,
        is_absent: bool = False,
    ) -> _Message:
        return _Message(moment, self._every, ranks, answers, agreed, is_absent, payload)

    def _from_child(self, child: _Neighbour, moment: Moment, seconds: float) -> _Message | None:
        def is_it(message: _Message) -> bool | None:
            child.heard = message.moment
            if message.moment == moment:
                return True
            if message.moment in child.missed or message.is_absent:
                return None  # late, and of no use any more
            if message.moment.run == moment.run and message.moment.step > moment.step:
                child.kept = message
            return False

        return self._heard(child, moment, seconds, is_it)

    def _from_parent(self, parent: _Neighbour, moment: Moment, seconds: float) -> _Message | None:
        def is_it(message: _Message) -> bool | None:
            if message.moment == moment:
                return message.is_absent or message.answers == moment or message.answers is None or message.agreed
            return False if message.answers == moment else None

        return self._heard(parent, moment, seconds, is_it)

    def _heard(
        self, neighbour: _Neighbour, moment: Moment, seconds: float, is_it: Callable[[_Message], bool | None]
    ) -> _Message | None:
        """The message of this moment: True; None: wait for another; False: it is elsewhere, and not waited for."""
        is_due = neighbour.every is None or moment.step % neighbour.every == 0
        waits = is_due and not neighbour.failures
        until, behind = time.monotonic() + (seconds if waits else POLL), None
        while True:
            message, neighbour.kept = neighbour.kept, None
            if message is None:
                received = neighbour.peer.receive(until - time.monotonic())
                if received is None:
                    self._missed(neighbour, moment, waited=waits, is_due=is_due)
                    if behind is not None and waits:
                        self._mismatch(neighbour, behind, moment)
                    return None
                message = _Message.from_bytes(received)
            neighbour.every = message.every
            found = is_it(message)
            if found is not None:
                break
            behind = message.moment
            if neighbour.failures and is_due and not neighbour.rest and not waits:
                waits, until = True, time.monotonic() + seconds  # it is there, if behind
        if not found:
            self._mismatch(neighbour, message.moment, moment)
            return None
        neighbour.failures = neighbour.rest = 0
        neighbour.missed.clear()
        return None if message.is_absent else message

    def _missed(self, neighbour: _Neighbour, moment: Moment, *, waited: bool, is_due: bool) -> None:
        if not is_due:
            return
        neighbour.missed.add(moment)
        neighbour.rest = max(0, neighbour.rest - 1)
        if waited or neighbour.peer.is_gone:
            neighbour.failures += 1
            neighbour.rest = 2 ** (min(neighbour.failures, 16) - 1) - 1  # less and less often waited for in vain
            until = "from now on" if neighbour.peer.is_gone else "until it is heard from again"
            self._tell(
                LostRankWarning(
                    f"Rank {neighbour.peer.name} did not answer rank {self._members[self.rank]} within "
                    f"{self.timeout:g} s and is left out of the score statistics {until}."
                )
            )

    def _mismatch(self, neighbour: _Neighbour, theirs: Moment, ours: Moment) -> None:
        if neighbour.peer.name not in self._mismatched:
            self._mismatched.add(neighbour.peer.name)
            self._tell(
                NotRecordedWarning(
                    f"Rank {neighbour.peer.name} is at {theirs} where rank {self._members[self.rank]} is at {ours}: "
                    "only what ranks saw at the same step is merged. Call step() on every rank alike, with the same "
                    "`every`, and load the same state on each."
                )
            )
