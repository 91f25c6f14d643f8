"""How the queries and keys of a kernel came from their projections, told by the ends of every head."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
from torch import Tensor

from attnscale.tracing.coordinates import Points, grid
from attnscale.tracing.following import Trail, Way, follow, way_along
from attnscale.tracing.lineage import Node
from attnscale.watching.call import Factors


@lru_cache
def ends(heads: int, length: int) -> Points:
    """The first feature of every head at the first and the last position, in turns."""
    points = np.repeat(grid(1, heads, 1, 1), 2, axis=0)
    points[1::2, 2] = length - 1
    points.flags.writeable = False
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
    return replace(found, factor=by_end.mean(1)), by_end


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
