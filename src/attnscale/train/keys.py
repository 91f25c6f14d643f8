"""Rows whose keys are shared out, put together again: over the calls of a ring and over the ranks of a key group.

Over the keys of two shards a row has the log-sum-exp of both, and everything else follows with the weights of the two
(RowSums.merge_keys). Shards belong together where their queries are the same, bit for bit. The same keys met twice
are no shards: that is a batch that was run twice.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.measure.pool import pool_rows
from attnscale.measure.row_sums import ROW_FIELDS, RowSums
from attnscale.measure.sampling import Sample
from attnscale.train.tally import Key, Tallies, Tally
from attnscale.watching.call import Shard
from attnscale.watching.layer import Layer


class RowsKey(NamedTuple):
    """Shards with the same key are shards of the same rows."""

    layer: str
    part: int
    heads: int
    query: int  # fingerprint of the queries
    tail: int  # fingerprint of the last of them
    time: int  # how often the same queries and keys were met before


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows over some of their keys: (batch, heads, rows) in float64, and numbers of the heads."""

    rows: RowSums
    heads: Tensor  # (4, heads): upper bound of a score; multiplier, ‖q‖², ‖k‖², each times the keys
    strata: tuple[list[int], list[int]] | None  # of each row, and their sizes, where rows were sampled
    keys: int
    shards: int = 1

    @classmethod
    def of(cls, shard: Shard) -> "Piece":
        """Return the rows of one call."""
        found, bound, sample = shard.rows.rows(), shard.rows.bound(), shard.rows.sample
        rows = RowSums(*(getattr(found, name).double().cpu() for name in ROW_FIELDS))
        highest = torch.where(rows.visible > 0, rows.max, -torch.inf).amax((0, 2))
        numbers = (shard.scales.abs(), shard.query_norm.square(), shard.key_norm.square())
        weighted = [each.double().cpu() * shard.keys for each in numbers]
        strata = None if sample is None else (sample.stratum.tolist(), sample.sizes.tolist())
        heads = torch.stack([highest if bound is None else bound.double().cpu(), *weighted])
        return cls(rows, heads, strata, shard.keys)

    def __add__(self, other: "Piece") -> "Piece":
        heads = self.heads + other.heads
        heads[0] = torch.maximum(self.heads[0], other.heads[0])
        rows = self.rows.merge_keys(other.rows)
        return Piece(rows, heads, self.strata, self.keys + other.keys, self.shards + other.shards)

    def tally(self) -> Tally:
        """Return the tally of rows that saw all their keys, without gradients: those of a query would have to be added.

        Their lengths are taken on each rank, before anything could be added.
        """
        rows = RowSums(**{name: getattr(self.rows, name) for name in ROW_FIELDS[1:]}, visible=self.rows.visible.long())
        sample = None
        if self.strata is not None:
            stratum, sizes = map(torch.tensor, self.strata)
            sample = Sample(torch.zeros_like(stratum), stratum, sizes)
        pooled = pool_rows(rows, self.heads[0], sample, errors=False)
        known = (self.heads[1:] / max(self.keys, 1)).unbind()
        no_cosine = torch.full_like(known[0], torch.nan)
        return Tally.of(pooled, (*known, no_cosine), (None, None))


Pieces = dict[RowsKey, Piece]


def pieces_of(layers: Mapping[str, Layer], part: int) -> Pieces:
    """Return the rows that one rank measured, its own shards put together."""
    found: list[Pieces] = []
    for name, layer in layers.items():
        times: Counter[tuple[int, int]] = Counter()
        for shard in layer.shards:
            query, key = int(shard.query), int(shard.key)
            place = RowsKey(name, part, layer.heads, query, int(shard.tail), times[query, key])
            times[query, key] += 1
            found.append({place: Piece.of(shard)})
    return merge_keys(found)


def merge_keys(parts: Iterable[Pieces]) -> Pieces:
    """Put rows of the same queries together over the keys of all parts."""
    found: Pieces = {}
    for part in parts:
        for place, piece in part.items():
            found[place] = found[place] + piece if place in found else piece
    return found


def tallies_of(pieces: Pieces) -> Tallies:
    """Return the tally of every layer, over the rows of all its pieces."""
    found: dict[Key, list[Tally]] = {}
    for place, piece in pieces.items():
        found.setdefault((place.layer, place.part, place.heads), []).append(piece.tally())
    return {key: reduce(Tally.__add__, tallies) for key, tallies in found.items()}


def called_in_parts(pieces: Pieces) -> list[str]:
    """Return the layers that were called with all of their queries and with the last of them alone.

    Rows of such calls are not put together.
    """
    queries: dict[tuple[str, int, int], set[int]] = {}
    for place in pieces:
        queries.setdefault((place.layer, place.part, place.tail), set()).add(place.query)
    return list(dict.fromkeys(layer for (layer, *_), found in queries.items() if len(found) > 1))
