"""Matrix products of the running model: projections, scores, and values mixed by weights."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from attnscale.watching.coordinates import Map, Points, Shape
from attnscale.watching.lineage import Ledger, Node, Projection, Step, follow

if TYPE_CHECKING:
    from attnscale.watching.names import Place


@dataclass(eq=False)
class Product:
    """A product of two activations, (…, n, d) × (…, d, m): scores perhaps."""

    left: Tensor
    right: Tensor
    left_node: Node
    right_node: Node
    alpha: float
    place: "Place"
    node: Node
    capped: bool = False  # a tanh was taken of it


def read_product(
    ledger: Ledger, place: "Place", operands: tuple[Tensor, Tensor], shape: Shape, alpha: float = 1.0
) -> Node:
    """What a matrix product is, from what its operands are."""
    left, right = (ledger.node(operand) for operand in operands)
    node = Node(shape, learned=True)
    if left.parameter or right.parameter:
        return _projected(node, left, right, weight=1 if right.parameter else 0)
    for side, operand in enumerate((left, right)):
        if operand.weights is not None:
            operand.weights.mixes(operand, axis=-2 if side else -1)
            node.mixed = operand.weights
            return node
    if len(shape) == 2 and left.learned != right.learned:  # a weight that is no Parameter: sharded, or quantised
        return _projected(node, left, right, weight=0 if right.learned else 1)
    node.scores = node.about = Product(*operands, left, right, alpha, place, node)
    return node


def _projected(node: Node, left: Node, right: Node, weight: int) -> Node:
    parameter, activation = (right, left) if weight else (left, right)
    axis = -2 if weight else -1
    node.projection = Projection(parameter, _zeroed(axis), width=parameter.shape[axis])
    if activation.shape == node.shape and (activation.scores or activation.weights):  # heads that talk to heads
        node.steps = (Step(activation, effect="other"),)
        node.scores, node.about, node.weights = activation.scores, activation.about, activation.weights
    return node


def _zeroed(axis: int) -> Map:
    def back(points: Points) -> Points:
        points = points.copy()
        points[:, axis] = 0
        return points

    return back


def convolved(weight: Node, shape: Shape) -> Node:
    """The result of a convolution, whose channels stand second."""

    def channel(points: Points) -> Points:
        at = np.zeros((len(points), len(weight.shape)), dtype=np.int64)
        at[:, 0] = points[:, 1] if len(shape) == len(weight.shape) else points[:, 0]
        return at

    return Node(shape, learned=True, projection=Projection(weight, channel, width=weight.shape[1]))


def channels(node: Node, points: Points) -> list[tuple[object, ...]]:
    """Which output of which projection each point of a query or key comes from: what tells heads apart."""
    found: list[tuple[object, ...]] = [()] * len(points)
    for trail in follow(node, points):
        for at, key in zip(trail.index, _keys(trail.node, trail.points), strict=True):
            found[at] = key
    return found


def _keys(node: Node, points: Points) -> list[tuple[object, ...]]:
    if node.projection is None:  # given, not projected: heads stand third from the end, as in SDPA
        column = points[:, -3] if points.shape[1] > 3 else np.zeros(len(points), dtype=np.int64)
        return [(id(node), int(head)) for head in column]
    keys: list[tuple[object, ...]] = [()] * len(points)
    for trail in follow(node.projection.weight, node.projection.channel(points)):
        for at, row in zip(trail.index, trail.points, strict=True):
            keys[at] = (id(trail.node), *row.tolist())
    return keys
