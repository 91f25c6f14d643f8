"""How the queries and keys of a kernel came from their projections: what multiplied them, and how long they were."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.measure.lengths import mean_lengths, mean_lengths_of_both
from attnscale.measure.sampling import rows_are_shared
from attnscale.numerics import constant_on
from attnscale.tracing.coordinates import Points, grid
from attnscale.tracing.following import Trail, Way, follow, way_along
from attnscale.tracing.lineage import Node
from attnscale.watching.call import Factors

NORMED_ROWS = 64

Positions = Tensor | None  # (batch or 1, positions): those that do not count


def projected_norm(tensor: Tensor, factor: Factors, left_out: Positions = None, every: bool = False) -> Tensor:
    """Of vectors as they left their projection; on their device, since to look at it would be to wait for a GPU.

    Over every position that is not left out, or over some that are spread evenly. `factor`: one a head, or of each
    batch entry others.
    """
    vectors, left_out = measured(tensor, left_out, every)
    if factor.ndim == 2:  # a row that sees one key is multiplied by ln 1
        apart = torch.from_numpy(np.where(factor == 0, 1.0, np.abs(factor))).to(vectors)
        vectors, factor = vectors / apart[..., None, None], np.ones(1)
    return before(mean_lengths(vectors, left_out), factor)


def measured_lengths(
    query: Tensor, key: Tensor, left_out: tuple[Positions, Positions], every: bool
) -> tuple[Tensor, Tensor]:
    """Return root mean square lengths of queries, and of the key that each of their heads has, as a kernel takes them.

    Over every position that is not left out, or over some that are spread evenly.
    """
    query, padding = measured(query, left_out[0], every)
    key, hidden = measured(key, left_out[1], every)
    return mean_lengths_of_both(query, key, (padding, hidden))


def before(norm: Tensor, factor: Factors) -> Tensor:
    """What it was before it was multiplied."""
    return norm if (factor == 1).all() else norm / constant_on(norm.device, np.abs(factor))


def some_of(vectors: Tensor) -> Tensor:
    """About so many of them as are measured, spread over their positions."""
    return vectors.detach()[:, :, :: _step(vectors)]


def measured(vectors: Tensor, left_out: Positions, every: bool = False) -> tuple[Tensor, Positions]:
    """Return the vectors that norms are taken of, spread over their positions, and which of them do not count."""
    step = 1 if every or rows_are_shared() else _step(vectors)
    return vectors.detach()[:, :, ::step], None if left_out is None else left_out[:, ::step]


def _step(vectors: Tensor) -> int:
    return max(1, vectors.shape[-2] // NORMED_ROWS)


def ends(heads: int, length: int) -> Points:
    """Return the first feature of every head at the first and the last position, in turns."""
    points = np.repeat(grid(1, heads, 1, 1), 2, axis=0)
    points[1::2, 2] = length - 1
    return points


def ends_by_position(heads: int, length: int) -> Points:
    """Return the first feature of all heads at the first two positions and at the last two."""
    positions = sorted({0, min(1, length - 1), max(0, length - 2), length - 1})
    points = np.tile(grid(1, heads, 1, 1), (len(positions), 1))
    points[:, 2] = np.repeat(positions, heads)
    return points


def trails_of(node: Node | None, tensor: Tensor) -> list[Trail]:
    """From those ends of queries, or keys, back to their projection; none where they cannot be followed."""
    if node is None or len(node.shape) != 4 or not tensor.numel():
        return []
    return follow(node, ends(tensor.shape[1], tensor.shape[2]))


def way_of(trails: list[Trail], heads: int) -> tuple[Way, Factors]:
    """How the queries, or keys, came from their projection; a factor a head, and of its first and last row."""
    if not trails:
        return Way(np.ones(heads), False, None, False), np.ones((heads, 2))
    found = way_along(trails, 2 * heads)
    by_end = found.factor.reshape(heads, 2)
    return found._replace(factor=by_end.mean(1)), by_end


class ByEntry(NamedTuple):
    """What multiplied the queries of each batch entry, (batch, heads), and how many of its rows count."""

    factors: Factors
    rows: NDArray[np.int64]

    @property
    def mean(self) -> Factors:
        """Over all rows that count."""
        return np.average(self.factors, axis=0, weights=self.rows if self.rows.any() else None)


def by_entry(node: Node, left_out: NDArray[np.bool_] | None) -> ByEntry:
    """Of queries whose factor is no number of the code, and may differ: told by the ends of each entry.

    `left_out`, (batch, length): rows that do not count.
    """
    batch, heads, length, _ = node.shape
    counted = np.ones((batch, length), dtype=bool) if left_out is None else ~left_out
    first, last = counted.argmax(1), length - 1 - counted[:, ::-1].argmax(1)
    points = np.repeat(grid(batch, heads, 1, 1), 2, axis=0)
    points[0::2, 2], points[1::2, 2] = np.repeat(first, heads), np.repeat(last, heads)
    factor = way_along(follow(node, points), len(points)).factor
    return ByEntry(factor.reshape(batch, heads, 2).mean(2), counted.sum(1))


def unpadded(query: Tensor, node: Node | None) -> int:
    """The head dimension before SDPA filled it up to a multiple of eight."""
    while node is not None and len(node.steps) == 1 and node.steps[0].effect == "same":
        parent = node.steps[0].parent
        if len(parent.shape) == len(node.shape) and parent.shape[:-1] == node.shape[:-1]:
            if parent.shape[-1] < node.shape[-1]:
                return parent.shape[-1]
            node = parent
        else:
            break
    return query.shape[-1]
