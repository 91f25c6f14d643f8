"""Which channels of which projections the operands of a product come from."""

import numpy as np

from attnscale.tracing.coordinates import Points
from attnscale.tracing.following import channels
from attnscale.tracing.lineage import Node
from attnscale.tracing.product import Product
from attnscale.watching.written.axes import arrive


def key_channels(product: Product, node: Node, points: Points) -> list[tuple[object, ...]]:
    """Which channel made the key of these points of a softmax's input; empty where they lead elsewhere."""
    arrival = arrive(node, points, product)
    found: list[tuple[object, ...]] = [()] * len(points)
    at = arrival.at[arrival.found]
    at[:, -2] = 0
    for index, key in zip(np.flatnonzero(arrival.found), channels(product.right_node, at), strict=True):
        found[index] = key
    return found


def channels_of(product: Product) -> list[tuple[object, ...]]:
    """Where the first query and the first key of a product come from."""
    nodes = (product.left_node, product.right_node)
    return [channels(node, np.zeros((1, len(node.shape)), dtype=np.int64))[0] for node in nodes]
