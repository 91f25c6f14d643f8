"""Merging: the tallies of one rank at a step -> those of all ranks, over their rows, heads and keys."""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from attnscale.errors import AttnscaleWarning, LostRankWarning, NotRecordedWarning
from attnscale.train import keys
from attnscale.train.learning import Learned, Losses, merged
from attnscale.train.ranks import Moment, Ranks
from attnscale.train.tally import Tallies, from_bytes, merge, seen_tallies, to_bytes
from attnscale.watching import Layer

T = TypeVar("T")


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
    """How the ranks of a run share out its work; `warn` warns once of each thing that goes wrong."""

    group: dist.ProcessGroup | None
    head_group: dist.ProcessGroup | None
    key_group: dist.ProcessGroup | None
    is_wanted: bool
    timeout: float
    floors: Mapping[str, float | None]  # under which numbers raise an alarm
    warn: Callable[[AttnscaleWarning], None]
    _ranks: Ranks | None = None
    _key_ranks: Ranks | None = None

    @property
    def part(self) -> int:
        """Number of this rank's part of the heads of every layer."""
        return 0 if self.head_group is None else dist.get_rank(self.head_group)

    @property
    def is_needed(self) -> bool:
        """True if other ranks have anything to add."""
        return self.key_group is not None or self._has_other_rows

    @property
    def _has_other_rows(self) -> bool:
        return self.is_wanted and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def merged(self, moment: Moment, layers: Mapping[str, Layer], learning: Learned = (None, None)) -> Merged:
        """Return the tallies of all ranks; every rank of the groups must call it, also one that measured nothing."""
        if self.key_group is None:
            own = self._or_nothing(lambda: seen_tallies(layers, self.part, self.floors))
        else:
            own = self._over_keys(self.key_group, moment, layers)
        if not self._has_other_rows:
            return Merged(own, learning=learning)
        self._ranks = self._ranks or Ranks(self.group, self.timeout, self.warn)
        combined = self._ranks.combine(moment, Losses.of(learning[0]).before(to_bytes(own)), _merged)
        is_first = self._ranks.rank == 0
        losses, tallies = Losses.and_rest(combined.payload)
        return Merged(
            from_bytes(tallies),
            combined.ranks,
            rank=None if combined.agreed else dist.get_rank(),
            is_written_here=is_first or not combined.agreed,
            is_logged_here=is_first,
            learning=(losses.mean, learning[1]),
        )

    def break_off(self, moment: Moment) -> None:
        """Tell other ranks that nothing comes from this one at this moment."""
        for ranks in (self._ranks, self._key_ranks):
            if ranks is not None:
                ranks.break_off(moment)

    def close(self) -> None:
        """Close the connections to the other ranks."""
        self._ranks = self._key_ranks = None

    def _or_nothing(self, make: Callable[[], T]) -> "T | dict[Any, Any]":
        """Warn of what failed here, and let the others not wait for it."""
        try:
            return make()
        except Exception as error:
            message = f"What this rank measured is missing from the record of a step: {type(error).__name__}: {error}"
            self.warn(NotRecordedWarning(message))
            return {}

    def _over_keys(self, group: dist.ProcessGroup, moment: Moment, layers: Mapping[str, Layer]) -> Tallies:
        """Count rows over all their keys on the first rank of the group; nothing where a rank is missing."""
        self._key_ranks = self._key_ranks or Ranks(group, self.timeout, self.warn)
        own = self._or_nothing(lambda: keys.pieces_of(layers, self.part))
        combined = self._key_ranks.combine(  # pickled, as torch.distributed does: it comes from ranks of this job
            moment, pickle.dumps(own), lambda payloads: pickle.dumps(keys.merge_keys(map(pickle.loads, payloads)))
        )
        if combined.ranks < self._key_ranks.size:
            message = (
                "A rank of key_group is missing, and with it keys of every row: nothing is recorded at such steps."
            )
            self.warn(LostRankWarning(message))
            return {}
        pieces: keys.Pieces = pickle.loads(combined.payload)
        if pieces and all(piece.shards == 1 for piece in pieces.values()):
            self.warn(
                NotRecordedWarning(
                    "Expected ranks of key_group, or several calls on one, with the same queries and other keys, and "
                    "found none: every call is counted as rows of its own. Queries must be the same to the last bit."
                )
            )
        if self._key_ranks.rank > 0:
            return {}
        left_out = keys.called_in_parts(pieces)
        if left_out:
            self.warn(
                NotRecordedWarning(
                    f"Left out: {', '.join(left_out)}, called with all of their queries and with the last of them "
                    "alone, as by a ring that balances causal work; rows are put together over calls with the same "
                    "queries only."
                )
            )
        return keys.tallies_of({place: piece for place, piece in pieces.items() if place.layer not in left_out})


def _merged(payloads: list[bytes]) -> bytes:
    """Merge the losses and tallies of several ranks."""
    losses, tallies = zip(*map(Losses.and_rest, payloads), strict=True)
    return merged(losses).before(to_bytes(merge(map(from_bytes, tallies))))
