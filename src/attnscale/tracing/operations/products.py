"""Matrix products of the running model: projections, scores, and values mixed by weights."""

import math

import numpy as np
from torch import Tensor

from attnscale.tracing import coordinates
from attnscale.tracing.coordinates import Map, Points, Shape
from attnscale.tracing.following import are_positions, follow
from attnscale.tracing.lineage import Node, Projection, Step, moved
from attnscale.tracing.operations import softmaxes
from attnscale.tracing.operations.mixing import Mixture, mix, pair_heads
from attnscale.tracing.operations.operation import Operation, Reader, Result
from attnscale.tracing.parameters import sampled_origin
from attnscale.tracing.product import Product
from attnscale.tracing.roles import AboutWeights, Exponential, LostWeights, Mixed, MixedByPowers, Outer, Scores, Weights

OPERANDS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}  # where the two stand


def _matrix_product(op: Operation) -> Node:
    """A projection, scores, or mixed values: what a product is shows by what its operands are."""
    operands = tuple(op.args[index] for index in OPERANDS[op.name])
    left, right = (op.ledger.node(operand) for operand in operands)
    beta = op.kwargs.get("beta", 1.0) if op.name in ("addmm", "baddbmm") else 0.0
    added = op.node() if beta else None
    _notice_lost(op, (left, right))
    if left.parameter or right.parameter:
        node = _projected_by(op.shape, left, right, weight=1 if right.parameter else 0, bias=added)
        if len(op.shape) == 3 and node.role is None:
            _are_scores(op, node, operands, learned_query=True)
        return node
    mixed = _mixed(op, (left, right), operands)
    if mixed is not None:
        return mixed
    if len(op.shape) == 2 and left.learned != right.learned:  # a weight that is no Parameter: sharded, or quantised
        return _projected_by(op.shape, left, right, weight=0 if right.learned else 1, bias=added)
    node = Node(op.shape, learned=left.learned or right.learned)
    if operands[0].shape[-1] >= 2:  # else every pair of two vectors, as in a table of rotary angles
        _are_scores(op, node, operands)
    return node


def _product_of_heads(op: Operation) -> Node:
    """A product of (batch, heads, …), of which batch and heads are one axis to a kernel."""
    operands = [_folded(op, operand, op.ledger.node(operand)) for operand in op.args]
    result = op.result.flatten(0, 1)
    node = _matrix_product(Operation("bmm", operands, {}, result, op.tracer))
    return moved(node, op.shape, coordinates.reshaped(node.shape, op.shape))


def _folded(op: Operation, operand: Tensor, node: Node) -> Tensor:
    view = operand.flatten(0, 1)
    shape = tuple(view.shape)
    op.ledger.write(view, moved(node, shape, coordinates.reshaped(node.shape, shape)))
    return view


def _are_scores(op: Operation, node: Node, operands: tuple[Tensor, ...], learned_query: bool = False) -> None:
    left, right = operands
    beta = op.kwargs.get("beta", 1.0)
    bias = op.args[0] * beta if op.name == "baddbmm" and beta else None
    nodes = op.ledger.node(left), op.ledger.node(right)
    alpha, modules = op.kwargs.get("alpha", 1.0), op.tracer.modules()
    node.role = Scores(Product(left, right, *nodes, modules, node.shape, node.token, alpha, bias, learned_query))


def _notice_lost(op: Operation, operands: tuple[Node, Node]) -> None:
    """Weights of unknown origin that mix activations: an attention that was not followed, or experts of a router."""
    if all(operand.learned for operand in operands):
        for (weights, values), axis in ((operands, -2), (operands[::-1], -1)):
            if isinstance(weights.role, LostWeights) and (not weights.role.over_outputs or are_positions(values, axis)):
                op.tracer.loses(weights.role.module)


def _mixed(op: Operation, nodes: tuple[Node, Node], operands: tuple[Tensor, ...]) -> Node | None:
    """Values summed with weights, or with exponentials that are yet to be normalised; None: neither is one."""
    own = [node.role.softmax if isinstance(node.role, (Weights, AboutWeights)) else None for node in nodes]
    if own[0] is not None and own[0] is own[1]:  # an inverse of the weights, say, not values
        return Node(op.shape, learned=True, role=AboutWeights(own[0]))
    for side, node in enumerate(nodes):
        if isinstance(node.role, Weights):
            values = sampled_origin(nodes[0], axis=-2) if side else sampled_origin(nodes[1], axis=-1)
            node.role.softmax.keep_values(node, operands[1 - side], side)
            mix(node.role.softmax, node, -2 if side else -1, values, Mixture(operands[side], op.result))
            pair_heads(node.role.softmax, node, nodes[1 - side])
            return Node(op.shape, learned=True, role=Mixed(node.role.softmax))
        if isinstance(node.role, Exponential):
            op.tracer.mix_unnormalised(node.role.of)
            return Node(op.shape, learned=True, role=MixedByPowers(node.role.of, operands[side], node.role.exponent))
    return None


def _outer_sum(op: Operation) -> Result:
    """Products, and mixtures of values, written as a multiplication and a sum."""
    parent, axes = op.node(), op.argument(1, "dim")
    role = parent.role
    if not isinstance(role, Outer):
        return softmaxes.READERS["sum"](op)
    axis = axes % len(parent.shape) if isinstance(axes, int) else axes[0] % len(parent.shape) if axes else 0
    if role.softmax is not None:
        mix(role.softmax, parent, axis)
        return Node(op.shape, learned=True, role=Mixed(role.softmax))
    nodes = op.ledger.node(role.left), op.ledger.node(role.right)
    found = None
    if not op.argument(2, "keepdim", False):
        found = _product_of_pairs(op.tracer.modules(), parent, nodes, axis, op.shape)
    return found or softmaxes.READERS["sum"](op)


def _product_of_pairs(
    modules: tuple[str, ...], parent: Node, nodes: tuple[Node, Node], axis: int, shape: Shape
) -> Node | None:
    """A sum over every pair of elements, (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1), which is a product too."""
    assert isinstance(parent.role, Outer)
    pair = (parent.role.left, parent.role.right)
    left, right = (operand.expand(*_aligned(operand, parent.shape)) for operand in pair)
    rows = [at for at in range(len(parent.shape)) if at != axis and right.shape[at] < parent.shape[at]]
    columns = [at for at in range(len(parent.shape)) if at != axis and left.shape[at] < parent.shape[at]]
    if len(rows) != 1 or len(columns) != 1:
        return None
    batch = [at for at in range(len(parent.shape)) if at not in (axis, rows[0], columns[0])]
    sizes = tuple(parent.shape[at] for at in batch)
    lead, count = (math.prod(sizes),), len(sizes)
    operands, lineages = [], []
    for operand, node, order in ((left, nodes[0], (*rows, axis)), (right, nodes[1], (axis, *columns))):
        turn = [*batch, *order, *(at for at in (rows[0], columns[0]) if at not in order)]
        whole = (*sizes, *(operand.shape[at] for at in order))
        turned = operand.permute(*turn).squeeze(-1)
        node = moved(node, tuple(operand.shape), coordinates.broadcast(node.shape, operand.dim()))
        node = moved(node, (*whole, 1), coordinates.permuted(turn))
        node = moved(node, (*lead, *whole[count:]), coordinates.reshaped((*whole, 1), (*lead, *whole[count:])))
        operands.append(turned.expand(*sizes, *turned.shape[count:]).reshape(*lead, *turned.shape[count:]))
        lineages.append(node)
    made = Node((*lead, parent.shape[rows[0]], parent.shape[columns[0]]), learned=True)
    made.role = Scores(Product(operands[0], operands[1], lineages[0], lineages[1], modules, made.shape, made.token))
    axes = [*batch, rows[0], columns[0]]
    apart = (*sizes, *made.shape[1:])
    result = moved(made, apart, coordinates.reshaped(made.shape, apart))
    return moved(result, shape, coordinates.permuted([axes.index(at) for at in sorted(axes)]))


def _aligned(tensor: Tensor, shape: Shape) -> Shape:
    return (1,) * (len(shape) - tensor.dim()) + tuple(tensor.shape)


def _projected_by(shape: Shape, left: Node, right: Node, weight: int, bias: Node | None) -> Node:
    parameter, activation = (right, left) if weight else (left, right)
    axis = -2 if weight else -1
    inputs = (axis % len(parameter.shape),)
    return _projected(
        shape,
        activation,
        Projection(parameter, _zeroed(axis), parameter.shape[axis], inputs, bias, activation.whole.token),
    )


def _linear(op: Operation) -> Node:
    """A projection as a layer calls it, whose weight is (outputs, inputs)."""
    activation, weight, given = op.node(0), op.node(1), op.argument(2, "bias")
    bias = None if given is None else op.ledger.node(given)
    projection = Projection(weight, _output_of_linear, weight.shape[1], (1,), bias, activation.whole.token)
    return _projected(op.shape, activation, projection)


def _output_of_linear(points: Points) -> Points:
    return np.stack([points[:, -1], np.zeros_like(points[:, -1])], axis=1)


def _projected(shape: Shape, activation: Node, projection: Projection) -> Node:
    if activation.shape == shape and _runs_over_heads(activation):  # heads that talk to heads
        return Node(shape, (Step(activation, effect="other"),), True, projection=projection, role=activation.role)
    return Node(shape, learned=True, projection=projection)


def _runs_over_heads(node: Node) -> bool:
    """Whether the last axis of an image of scores, or of weights, leads to other products, not along one."""
    if node.shape[-1] < 2 or not isinstance(node.role, (Scores, Weights)):
        return False
    points = np.zeros((2, len(node.shape)), dtype=np.int64)
    points[1, -1] = 1
    trails = follow(node, points)
    if len(trails) != 1 or len(trails[0].points) != 2 or trails[0].points.shape[1] < 3:
        return False
    moves = (trails[0].points[0] != trails[0].points[1]).nonzero()[0]
    return bool(len(moves)) and int(moves[0]) < trails[0].points.shape[1] - 2


def _zeroed(axis: int) -> Map:
    def back(points: Points) -> Points:
        points = points.copy()
        points[:, axis] = 0
        return points

    return back


def _convolution(op: Operation) -> Node:
    """The result of a convolution, whose channels stand second where it has a batch."""
    weight, shape, given = op.node(1), op.shape, op.argument(2, "bias")
    bias = None if given is None else op.ledger.node(given)

    def channel(points: Points) -> Points:
        at = np.zeros((len(points), len(weight.shape)), dtype=np.int64)
        at[:, 0] = points[:, 1] if len(shape) == len(weight.shape) else points[:, 0]
        return at

    inputs = tuple(range(1, len(weight.shape)))
    if bias is not None:
        apart = (*bias.shape, *(1 for _ in inputs[1:]))
        bias = Node(apart, (Step(bias, coordinates.reshaped(bias.shape, apart)),), parameter=bias.parameter)
    source = op.node(0).whole.token
    return Node(shape, learned=True, projection=Projection(weight, channel, weight.shape[1], inputs, bias, source))


READERS: dict[str, Reader] = {
    **dict.fromkeys(OPERANDS, _matrix_product),
    "matmul": _product_of_heads,
    "linear": _linear,
    "convolution": _convolution,
    "sum": _outer_sum,
}
