"""Calls that see some of the keys of their rows: what is kept so that the rows can be put together again.

Ranks, or the turns of a ring, that share out keys have queries in common. These are told by a fingerprint of their
bits, so that nobody has to say which call belongs to which.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnscale.measure.pool import Unpooled

if TYPE_CHECKING:
    from attnscale.watching.call import SeenCall

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TAIL = 8  # queries
ODD = 0x9E3779B97F4A7C15 - 2**64  # an odd number with bits all over it: Knuth's multiplier, 2^64 over the golden ratio


@dataclass(frozen=True, eq=False)
class Shard:
    """One call: its rows, not pooled, and the fingerprints of its queries and its keys."""

    rows: Unpooled
    query: Tensor
    tail: Tensor  # of the last few queries: calls on parts of the same queries have them in common
    key: Tensor
    keys: int
    scales: Tensor
    query_norm: Tensor
    key_norm: Tensor

    @classmethod
    def of(cls, call: "SeenCall", query: Tensor, key: Tensor, tail: Tensor) -> "Shard | None":
        """A call that has just been seen; None where its rows cannot be told apart any more."""
        rows = call.stats.pool
        if not isinstance(rows, Unpooled):
            return None
        return cls(
            rows, fingerprint(query), fingerprint(tail), fingerprint(key), call.key_len, call.scales,
            call.query_norm, call.key_norm,
        )  # fmt: skip


def fingerprint(vectors: Tensor) -> Tensor:
    """A number of 64 bits by which equal vectors are known, on their own device.

    >>> x = torch.randn(3, 5)
    >>> bool(fingerprint(x) == fingerprint(x.clone())), bool(fingerprint(x) == fingerprint(x.flip(0)))
    (True, False)
    """
    bits = vectors.detach().contiguous().view(BITS[vectors.element_size()]).flatten().long()
    mixed = (bits + torch.arange(1, len(bits) + 1, device=bits.device)) * ODD
    return (mixed ^ (mixed >> 29)).mul(ODD).sum()
