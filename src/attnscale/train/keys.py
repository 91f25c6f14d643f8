"""Rows whose keys are shared out, put together again: over the calls of a ring and over the ranks of a key group.

Over the keys of two shards a row has the log-sum-exp of both, and everything else follows with the weights of the two
(RowSums.merge_keys). Shards belong together where their queries are the same, bit for bit. The same keys met twice
are no shards: that is a batch that was run twice.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from attnscale.measure.pool import ROW_FIELDS, pool_rows
from attnscale.measure.row_sums import RowSums
from attnscale.measure.sampling import Sample
from attnscale.train.tally import Key, Tallies, Tally
from attnscale.watching.call import Shard
from attnscale.watching.layer import Layer

FIELDS = ROW_FIELDS
# layer, part, heads; fingerprints of the queries and of the last of them, and which time they were met
PieceKey = tuple[str, int, int, int, int, int]


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows over some of their keys: (batch, heads, rows) in float64, and what is known of the heads."""

    rows: RowSums
    heads: Tensor  # (4, heads): upper bound of a score; multiplier, ‖q‖², ‖k‖², each times the keys
    strata: tuple[list[int], list[int]] | None  # of each row, and their sizes, where rows were sampled
    keys: int
    shards: int = 1

    @classmethod
    def of(cls, shard: Shard) -> "Piece":
        """One call."""
        found, bound, sample = shard.rows.rows(), shard.rows.bound(), shard.rows.sample
        rows = RowSums(*(getattr(found, name).double().cpu() for name in FIELDS))
        highest = torch.where(rows.visible > 0, rows.max, -torch.inf).amax((0, 2))
        known = (shard.scales.abs(), shard.query_norm.square(), shard.key_norm.square())
        weighted = [each.double().cpu() * shard.keys for each in known]
        strata = None if sample is None else (sample.stratum.tolist(), sample.sizes.tolist())
        heads = torch.stack([highest if bound is None else bound.double().cpu(), *weighted])
        return cls(rows, heads, strata, shard.keys)

    def __add__(self, other: "Piece") -> "Piece":
        heads = self.heads + other.heads
        heads[0] = torch.maximum(self.heads[0], other.heads[0])
        rows = self.rows.merge_keys(other.rows)
        return Piece(rows, heads, self.strata, self.keys + other.keys, self.shards + other.shards)

    def tally(self) -> Tally:
        """As rows that saw all their keys. Gradients are not known: those of a query would have to be added first."""
        rows = RowSums(**{name: getattr(self.rows, name) for name in FIELDS[1:]}, visible=self.rows.visible.long())
        sample = None
        if self.strata is not None:
            stratum, sizes = map(torch.tensor, self.strata)
            sample = Sample(torch.zeros_like(stratum), stratum, sizes)
        pooled = pool_rows(rows, self.heads[0], sample, errors=False)
        return Tally.of(pooled, (self.heads[1:] / max(self.keys, 1)).unbind(), (None, None))


Pieces = dict[PieceKey, Piece]


def pieces_of(layers: Mapping[str, Layer], part: int) -> Pieces:
    """What one rank saw, its own shards put together."""
    found: Pieces = {}
    for name, layer in layers.items():
        met: Counter[tuple[int, int]] = Counter()
        for shard in layer.shards:
            query, key = int(shard.query), int(shard.key)
            place = (name, part, layer.heads, query, int(shard.tail), met[query, key])
            met[query, key] += 1
            piece = Piece.of(shard)
            found[place] = found[place] + piece if place in found else piece
    return found


def merge_keys(parts: Iterable[Pieces]) -> Pieces:
    """Rows of the same queries over the keys of all parts."""
    found: Pieces = {}
    for part in parts:
        for place, piece in part.items():
            found[place] = found[place] + piece if place in found else piece
    return found


def tallies_of(pieces: Pieces) -> Tallies:
    """Layers, the rows of all their pieces counted."""
    found: dict[Key, list[Tally]] = {}
    for (name, part, heads, *_), piece in pieces.items():
        found.setdefault((name, part, heads), []).append(piece.tally())
    return {key: reduce(Tally.__add__, tallies) for key, tallies in found.items()}


def in_parts(pieces: Pieces) -> list[str]:
    """Layers that were called with all of their queries and with the last of them alone, which are not put together."""
    queries: dict[tuple[str, int, int], set[int]] = {}
    for name, part, _, query, tail, _ in pieces:
        queries.setdefault((name, part, tail), set()).add(query)
    return list(dict.fromkeys(name for (name, _, _), each in queries.items() if len(each) > 1))


def to_bytes(pieces: Pieces) -> bytes:
    """A line of JSON that says what follows, and the numbers."""
    head = [
        (*place, piece.rows.max.shape[0], piece.rows.max.shape[2], piece.strata, piece.keys, piece.shards)
        for place, piece in pieces.items()
    ]
    numbers = [
        part for piece in pieces.values() for part in (*(getattr(piece.rows, name) for name in FIELDS), piece.heads)
    ]
    body = torch.cat([part.flatten() for part in numbers]) if numbers else torch.zeros(0, dtype=torch.float64)
    return json.dumps(head).encode() + b"\n" + body.numpy().tobytes()


def from_bytes(payload: bytes) -> Pieces:
    """What to_bytes() gave."""
    head, _, body = payload.partition(b"\n")
    numbers = torch.frombuffer(bytearray(body), dtype=torch.float64) if body else torch.zeros(0)
    found, at = {}, 0
    for name, part, heads, query, tail, time, batch, rows, strata, keys, shards in json.loads(head):
        size = batch * heads * rows
        sums = numbers[at : at + len(FIELDS) * size].view(len(FIELDS), batch, heads, rows)
        at += len(FIELDS) * size
        known = numbers[at : at + 4 * heads].view(4, heads)
        at += 4 * heads
        given = None if strata is None else (strata[0], strata[1])
        found[name, part, heads, query, tail, time] = Piece(RowSums(*sums), known, given, keys, shards)
    return found
