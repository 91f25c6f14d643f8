"""Matrix products of the running model: projections, scores, and values mixed by weights."""

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from attnscale.tracing import coordinates
from attnscale.tracing.coordinates import Map, Points, Shape
from attnscale.tracing.lineage import Ledger, Node, Projection, Step, follow
from attnscale.tracing.parameters import sampled_origin
from attnscale.tracing.place import Place


@dataclass(eq=False)
class Product:
    """A product of two activations, (…, n, d) × (…, d, m): scores perhaps."""

    left: Tensor
    right: Tensor
    left_node: Node
    right_node: Node
    place: Place
    node: Node
    alpha: float = 1.0
    bias: Tensor | None = None  # added by the same operation
    learned_query: bool = False  # one side is a parameter: attention only if its weights go on to mix values
    capped: bool = False  # a tanh was taken of it


def read_product(
    ledger: Ledger,
    place: Place,
    operands: tuple[Tensor, Tensor],
    shape: Shape,
    alpha: float = 1.0,
    bias: Tensor | None = None,
    added: Node | None = None,
) -> Node:
    """What a matrix product is, from what its operands are; `bias` is added to scores, `added` to a projection."""
    left, right = (ledger.node(operand) for operand in operands)
    node = Node(shape, learned=True)
    if left.parameter or right.parameter:
        node = _projected(node, left, right, weight=1 if right.parameter else 0, bias=added)
        if len(shape) == 3 and node.scores is None:
            node.scores = node.about = Product(*operands, left, right, place, node, alpha, bias, learned_query=True)
        return node
    for side, operand in enumerate((left, right)):
        if operand.weights is not None:
            values = sampled_origin(left, axis=-2) if side else sampled_origin(right, axis=-1)
            operand.weights.mixes(operand, -2 if side else -1, values)
            node.mixed = operand.weights
            return node
        if operand.exponent is not None:
            node.mixed_by_powers = (operand, operands[side])
            return node
    if len(shape) == 2 and left.learned != right.learned:  # a weight that is no Parameter: sharded, or quantised
        return _projected(node, left, right, weight=0 if right.learned else 1, bias=added)
    node.learned = left.learned or right.learned
    if operands[0].shape[-1] < 2:  # every pair of two vectors, as in a table of rotary angles
        return node
    node.scores = node.about = Product(*operands, left, right, place, node, alpha, bias)
    return node


def read_outer_sum(place: Place, parent: Node, nodes: tuple[Node, Node], axis: int, shape: Shape) -> Node | None:
    """A sum over every pair of elements, (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1), which is a product too."""
    left, right = (operand.expand(*_aligned(operand, parent.shape)) for operand in parent.outer or ())
    rows = [at for at in range(len(parent.shape)) if at != axis and right.shape[at] < parent.shape[at]]
    columns = [at for at in range(len(parent.shape)) if at != axis and left.shape[at] < parent.shape[at]]
    if len(rows) != 1 or len(columns) != 1:
        return None
    batch = [at for at in range(len(parent.shape)) if at not in (axis, rows[0], columns[0])]
    sizes = tuple(parent.shape[at] for at in batch)
    lead, count = (math.prod(sizes),), len(sizes)
    operands, lineages = [], []
    for operand, node, order in ((left, nodes[0], (*rows, axis)), (right, nodes[1], (axis, *columns))):
        back = coordinates.permuted([*batch, *order, *(at for at in (rows[0], columns[0]) if at not in order)])
        whole = (*sizes, *(operand.shape[at] for at in order))
        turned = operand.permute(*batch, *order, *(at for at in (rows[0], columns[0]) if at not in order)).squeeze(-1)
        node = _moved(node, tuple(operand.shape), coordinates.broadcast(node.shape, operand.dim()))
        node = _moved(node, (*whole, 1), back)
        node = _moved(node, (*lead, *whole[count:]), coordinates.reshaped((*whole, 1), (*lead, *whole[count:])))
        operands.append(turned.expand(*sizes, *turned.shape[count:]).reshape(*lead, *turned.shape[count:]))
        lineages.append(node)
    made = Node((*lead, parent.shape[rows[0]], parent.shape[columns[0]]), learned=True)
    made.scores = made.about = Product(operands[0], operands[1], lineages[0], lineages[1], place, made)
    axes = [*batch, rows[0], columns[0]]
    apart = (*sizes, *made.shape[1:])
    result = _moved(made, apart, coordinates.reshaped(made.shape, apart))
    return _moved(result, shape, coordinates.permuted([axes.index(at) for at in sorted(axes)]))


def _moved(node: Node, shape: Shape, back: Map) -> Node:
    return Node(shape, (Step(node, back),), learned=True, depth=node.depth + 1, scores=node.scores, about=node.about)


def _aligned(tensor: Tensor, shape: Shape) -> Shape:
    return (1,) * (len(shape) - tensor.dim()) + tuple(tensor.shape)


def _projected(node: Node, left: Node, right: Node, weight: int, bias: Node | None) -> Node:
    parameter, activation = (right, left) if weight else (left, right)
    axis = -2 if weight else -1
    inputs = (axis % len(parameter.shape),)
    node.projection = Projection(parameter, _zeroed(axis), parameter.shape[axis], inputs, bias)
    if activation.shape == node.shape and _runs_over_heads(activation):  # heads that talk to heads
        node.steps = (Step(activation, effect="other"),)
        node.scores, node.about, node.weights = activation.scores, activation.about, activation.weights
    return node


def _runs_over_heads(node: Node) -> bool:
    """Whether the last axis of an image of scores, or of weights, leads to other products, not along one."""
    points = np.zeros((2, len(node.shape)), dtype=np.int64)
    points[1, -1] = 1
    trails = follow(node, points) if node.shape[-1] > 1 and (node.scores or node.weights) else []
    if len(trails) != 1 or len(trails[0].points) != 2 or trails[0].points.shape[1] < 3:
        return False
    moved = (trails[0].points[0] != trails[0].points[1]).nonzero()[0]
    return bool(len(moved)) and int(moved[0]) < trails[0].points.shape[1] - 2


def _zeroed(axis: int) -> Map:
    def back(points: Points) -> Points:
        points = points.copy()
        points[:, axis] = 0
        return points

    return back


def convolved(weight: Node, shape: Shape, bias: Node | None) -> Node:
    """The result of a convolution, whose channels stand second where it has a batch."""

    def channel(points: Points) -> Points:
        at = np.zeros((len(points), len(weight.shape)), dtype=np.int64)
        at[:, 0] = points[:, 1] if len(shape) == len(weight.shape) else points[:, 0]
        return at

    inputs = tuple(range(1, len(weight.shape)))
    if bias is not None:
        apart = (*bias.shape, *(1 for _ in inputs[1:]))
        bias = Node(apart, (Step(bias, coordinates.reshaped(bias.shape, apart)),), parameter=bias.parameter)
    return Node(shape, learned=True, projection=Projection(weight, channel, weight.shape[1], inputs, bias))


def channels(node: Node, points: Points) -> list[tuple[object, ...]]:
    """Which output of which projection each point of a query or key comes from: what tells heads apart."""
    found: list[tuple[object, ...]] = [()] * len(points)
    for trail in follow(node, points):
        for at, key in zip(trail.index, _keys(trail.node, trail.points), strict=True):
            found[at] = key
    return found


def _keys(node: Node, points: Points) -> list[tuple[object, ...]]:
    if node.projection is None:  # not projected: heads are cut from the features, or stand third from the end
        apart = points[:, -3] if points.shape[1] > 3 else np.zeros(len(points), dtype=np.int64)
        return [(id(node), int(feature), int(head)) for feature, head in zip(points[:, -1], apart, strict=True)]
    keys: list[tuple[object, ...]] = [()] * len(points)
    for trail in follow(node.projection.weight, node.projection.channel(points)):
        for at, row in zip(trail.index, trail.points, strict=True):
            keys[at] = (id(trail.node), *row.tolist())
    return keys
