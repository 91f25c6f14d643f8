"""Merging: what one rank saw of a step -> what all of them saw, over their rows, heads and keys."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from attnscale.errors import AttnscaleWarning, LostRankWarning, NotRecordedWarning
from attnscale.train import keys
from attnscale.train.learning import Learned, Losses, merged
from attnscale.train.ranks import Combined, Moment, Ranks
from attnscale.train.tally import Tallies, from_bytes, merge, seen_tallies, to_bytes
from attnscale.watching import Layer

Made = TypeVar("Made")


@dataclass(frozen=True)
class Merged:
    """The tallies of a step, and of whom they are."""

    tallies: Tallies
    ranks: int = 1
    rank: int | None = None  # whose they are, where ranks could not be merged
    is_written_here: bool = True
    is_logged_here: bool = True
    learning: Learned = (None, None)  # the mean loss of the ranks that gave one, and the learning rate of this rank


@dataclass
class Merging:
    """How the ranks of a run share out its work; `tell` warns once of each thing that is amiss."""

    group: dist.ProcessGroup | None
    head_group: dist.ProcessGroup | None
    key_group: dist.ProcessGroup | None
    is_wanted: bool
    timeout: float
    every: int
    floors: Mapping[str, float | None]  # under which numbers raise an alarm
    tell: Callable[[AttnscaleWarning], None]
    _ranks: Ranks | None = None
    _key_ranks: Ranks | None = None

    @property
    def part(self) -> int:
        """Which of the parts of every layer's heads this rank has."""
        return 0 if self.head_group is None else dist.get_rank(self.head_group)

    @property
    def is_needed(self) -> bool:
        """Whether other ranks have anything to add."""
        return self.key_group is not None or self._has_other_rows

    def merged(self, moment: Moment, layers: Mapping[str, Layer], learning: Learned = (None, None)) -> Merged:
        """What all ranks saw at this moment; every rank of the groups must call it, also one that saw nothing."""
        own = self._or_nothing(lambda: seen_tallies(layers, self.part, self.floors)) if self.key_group is None else None
        own = self._over_keys(moment, layers) if own is None else own
        if not self._has_other_rows:
            return Merged(own, learning=learning)
        combined = self._combined(moment, own, Losses.of(learning[0]))
        assert self._ranks is not None
        is_first = self._ranks.rank == 0
        rank = None if combined.agreed else dist.get_rank()
        losses, tallies = Losses.and_rest(combined.payload)
        is_written, learned = is_first or not combined.agreed, (losses.mean, learning[1])
        return Merged(from_bytes(tallies), combined.ranks, rank, is_written, is_first, learned)

    def break_off(self, moment: Moment) -> None:
        """This rank has nothing to say of a moment: whoever waits for it need not."""
        for ranks in (self._ranks, self._key_ranks):
            if ranks is not None:
                ranks.break_off(moment)

    def _or_nothing(self, make: Callable[[], Made]) -> "Made | dict[Any, Any]":
        """What failed here is told, and the others are not left waiting."""
        try:
            return make()
        except Exception as error:
            told = f"What this rank saw of a sampled step is not in its record: {type(error).__name__}: {error}"
            self.tell(NotRecordedWarning(told))
            return {}

    def close(self) -> None:
        """Let go of the groups that were made for it."""
        for ranks in (self._ranks, self._key_ranks):
            if ranks is not None:
                ranks.close()
        self._ranks = self._key_ranks = None

    @property
    def _has_other_rows(self) -> bool:
        return self.is_wanted and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def _combined(self, moment: Moment, own: Tallies, losses: Losses) -> Combined:
        if self._ranks is None:
            self._ranks = Ranks(self.group, self.timeout, self.every, self.tell)
        return self._ranks.combine(moment, losses.before(to_bytes(own)), _merged)

    def _over_keys(self, moment: Moment, layers: Mapping[str, Layer]) -> Tallies:
        """Rows over all their keys, counted by the first rank of the group; nothing where a rank is missing."""
        if self._key_ranks is None:
            self._key_ranks = Ranks(self.key_group, self.timeout, self.every, self.tell)
        own = keys.to_bytes(self._or_nothing(lambda: keys.pieces_of(layers, self.part)))
        combined = self._key_ranks.combine(
            moment,
            own,
            lambda payloads: keys.to_bytes(keys.merge_keys(keys.from_bytes(payload) for payload in payloads)),
        )
        if combined.ranks < self._key_ranks.size:
            told = (
                "A rank of key_group is missing, and with it keys of every row: nothing is recorded until it is back."
            )
            self.tell(LostRankWarning(told))
            return {}
        pieces = keys.from_bytes(combined.payload)
        if pieces and all(piece.shards == 1 for piece in pieces.values()):
            self.tell(
                NotRecordedWarning(
                    "Expected ranks of key_group, or several calls on one, with the same queries and other keys, and "
                    "found none: every call is counted as rows of its own. Queries must be the same to the last bit."
                )
            )
        if self._key_ranks.rank > 0:
            return {}
        left_out = keys.in_parts(pieces)
        if left_out:
            self.tell(
                NotRecordedWarning(
                    f"Left out: {', '.join(left_out)}, called with all of their queries and with the last of them "
                    "alone, as by a ring that balances causal work; rows are put together over calls with the same "
                    "queries only."
                )
            )
        return keys.tallies_of({place: piece for place, piece in pieces.items() if place[0] not in left_out})


def _merged(payloads: list[bytes]) -> bytes:
    """Losses and tallies of several ranks as those of one."""
    losses, tallies = zip(*map(Losses.and_rest, payloads), strict=True)
    return merged(losses).before(to_bytes(merge(map(from_bytes, tallies))))
