"""Readers of matrix products: projections, scores, and values mixed by weights."""

import numpy as np
import torch
from torch import Tensor

from attnscale.numerics import is_surely_finite
from attnscale.tracing.arithmetic import reduced_axes
from attnscale.tracing.coordinates import Map, Points, Shape
from attnscale.tracing.following import are_positions, channels, follow
from attnscale.tracing.lineage import Node, Operation, Projection, Reader, Step, view_of
from attnscale.tracing.parameters import Origin, sampled_origin
from attnscale.tracing.roles import (
    Exponentials,
    MixedValues,
    PairwiseProduct,
    Product,
    Scores,
    Softmax,
    UnknownWeights,
    UnnormalisedMix,
    Weights,
    WeightStatistic,
)
from attnscale.tracing.softmaxes import read_sum

OPERANDS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}  # argument positions of both factors
MOST_ENTRIES = 256  # limit on (batch, head) entries whose key and value are compared
NOTHING = 1e-6  # a row with a smaller sum is fully masked


def _matrix_product(op: Operation) -> Node:
    """Read a matrix product: a projection, scores or mixed values, depending on its operands."""
    operands = tuple(op.args[index] for index in OPERANDS[op.name])
    left, right = (op.lineage.node(operand) for operand in operands)
    beta = op.kwargs.get("beta", 1.0) if op.name in ("addmm", "baddbmm") else 0.0
    added = op.node() if beta else None
    _notice_unknown_weights(op, (left, right))
    if left.parameter or right.parameter:
        node = _projected_by(op.shape, left, right, weight=1 if right.parameter else 0, bias=added)
        if len(op.shape) == 3 and node.role is None:
            _are_scores(op, node, operands, learned_query=True)
        return node
    mixed = _mixed(op, (left, right), operands)
    if mixed is not None:
        return mixed
    if len(op.shape) == 2 and left.learned != right.learned:  # a sharded or quantised weight is not a Parameter
        return _projected_by(op.shape, left, right, weight=0 if right.learned else 1, bias=added)
    node = Node(op.shape, learned=left.learned or right.learned)
    if operands[0].shape[-1] >= 2:  # an outer product, such as a table of rotary angles, is not scores
        _are_scores(op, node, operands)
    return node


def _are_scores(op: Operation, node: Node, operands: tuple[Tensor, ...], learned_query: bool = False) -> None:
    left, right = operands
    beta = op.kwargs.get("beta", 1.0)
    bias = op.args[0] * beta if op.name == "baddbmm" and beta else None
    nodes = op.lineage.node(left), op.lineage.node(right)
    alpha, modules = op.kwargs.get("alpha", 1.0), op.tracer.modules()
    node.role = Scores(Product(left, right, *nodes, modules, node.shape, node.token, alpha, bias, learned_query))


def _notice_unknown_weights(op: Operation, operands: tuple[Node, Node]) -> None:
    """Record weights of unknown origin that mix activations: an attention that was not followed, unless a router."""
    if all(operand.learned for operand in operands):
        for (weights, values), axis in ((operands, -2), (operands[::-1], -1)):
            role = weights.role
            if isinstance(role, UnknownWeights) and (not role.over_outputs or are_positions(values, axis)):
                op.tracer.note_not_understood(role.module)


def _mixed(op: Operation, nodes: tuple[Node, Node], operands: tuple[Tensor, ...]) -> Node | None:
    """Read a product of values with weights or unnormalised exponentials; None for other products."""
    own = [node.role.softmax if isinstance(node.role, (Weights, WeightStatistic)) else None for node in nodes]
    if own[0] is not None and own[0] is own[1]:  # both made from the weights, such as their inverse
        return Node(op.shape, learned=True, role=WeightStatistic(own[0]))
    for side, node in enumerate(nodes):
        if isinstance(node.role, Weights):
            values = sampled_origin(nodes[0], axis=-2) if side else sampled_origin(nodes[1], axis=-1)
            keep_values, node.role.softmax.keep_values = node.role.softmax.keep_values, None  # release the operands
            if keep_values is not None:
                keep_values(node, operands[1 - side], side)
            _mix(op, node.role.softmax, node, -2 if side else -1, values, operands[side])
            _compare_pairs(node.role.softmax, node, nodes[1 - side])
            return Node(op.shape, learned=True, role=MixedValues(node.role.softmax))
        if isinstance(node.role, Exponentials):
            op.tracer.mix_unnormalised(node.role.of)
            return Node(op.shape, learned=True, role=UnnormalisedMix(node.role.of, operands[side], node.role.exponent))
    return None


def _mix(
    op: Operation, softmax: Softmax, weights: Node, axis: int, values: Origin | None, operand: Tensor | None
) -> None:
    """Record that values are summed along an axis of the weights, and check that weights sum to one along it.

    `operand` holds the weights; None if they are multiplied with the values already.
    """
    softmax.proves_attention()
    softmax.values = values
    if weights.shape[axis] < 2:
        return
    points = np.zeros((2, len(weights.shape)), dtype=np.int64)
    points[1, axis] = 1
    for trace in follow(weights, points):
        role = trace.node.role
        if len(trace.points) == 2 and isinstance(role, Weights) and role.softmax is softmax:
            moves = (trace.points[0] != trace.points[1]).nonzero()[0]
            along_axis = bool((moves == softmax.axis).any()) or trace.blended
            softmax.mixes(along_axis, float(trace.factor[0]), int(moves[-1]) if len(moves) else None)
            softmax.is_masked |= bool(trace.fills)
            softmax.drops |= trace.dropped
            softmax.is_obscure |= trace.blended or trace.added
            if operand is not None:
                is_known = not softmax.is_short and _only_moved(weights)  # an unchanged softmax sums to one
                is_known |= trace.blended or trace.added or trace.dropped
                is_known |= trace.node.shape[softmax.axis] != weights.shape[axis]
                off_one = None if is_known else _distance_from_one(operand, axis, float(trace.factor[0]))
                is_finite = is_surely_finite(op.result)
                softmax.measured(off_one, torch.tensor(False) if is_finite else operand.detach().isnan().any())


def _distance_from_one(weights: Tensor, axis: int, factor: float) -> Tensor:
    """Return the largest distance of a row's sum from one, ignoring fully masked rows."""
    sums = weights.detach().sum(axis, dtype=torch.promote_types(weights.dtype, torch.float32)) / factor
    return torch.where(sums.abs() > NOTHING, (sums - 1).abs(), 0.0).nan_to_num(0.0).amax()


def _only_moved(weights: Node) -> bool:
    while len(weights.steps) == 1 and weights.steps[0].only_moves:
        weights = weights.steps[0].parent
    return not weights.steps


def _compare_pairs(softmax: Softmax, weights: Node, values: Node) -> None:
    """Record if heads that share a key do not share its value."""
    keys_of, softmax.keys_of = softmax.keys_of, None  # release the product
    if keys_of is None or len(weights.shape) != 3 or len(values.shape) != 3 or weights.shape[0] < 4:
        return
    points = np.zeros((min(weights.shape[0], MOST_ENTRIES), 3), dtype=np.int64)
    points[:, 0] = np.arange(len(points))
    found: list[tuple[object, ...]] = [()] * len(points)
    for trace in follow(weights, points):
        if isinstance(trace.node.role, Weights) and trace.node.role.softmax is softmax:
            for at, key in zip(trace.index, keys_of(trace.points), strict=True):
                found[at] = key
    softmax.pairs_differ |= are_paired_otherwise(found, channels(values, points))


def are_paired_otherwise(keys: list[tuple[object, ...]], values: list[tuple[object, ...]]) -> bool:
    """Return True if keys and values form the same number of head groups, but different groups."""
    if () in keys or () in values:
        return False
    groups = len(set(keys))
    return 1 < groups == len(set(values)) < len(set(zip(keys, values, strict=True)))


def _sum_of_pairs(op: Operation) -> Node:
    """Read a product, or a mixture of values, written as a multiplication and a sum."""
    parent, role = op.node(), op.node().role
    if not isinstance(role, PairwiseProduct):
        return read_sum(op)
    axis = reduced_axes(op)[0]
    if role.softmax is not None:
        _mix(op, role.softmax, parent, axis, None, None)
        return Node(op.shape, learned=True, role=MixedValues(role.softmax))
    found = None if op.argument(2, "keepdim", False) else _product_of_pairs(op, role, parent.shape, axis)
    return found or read_sum(op)


def _product_of_pairs(op: Operation, pair: PairwiseProduct, shape: Shape, axis: int) -> Node | None:
    """Return the node of (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1), read as a batched matrix product."""
    sizes = [(1,) * (len(shape) - side.dim()) + tuple(side.shape) for side in (pair.left, pair.right)]
    rows = [at for at in range(len(shape)) if at != axis and sizes[1][at] < shape[at]]
    columns = [at for at in range(len(shape)) if at != axis and sizes[0][at] < shape[at]]
    if len(rows) != 1 or len(columns) != 1:
        return None
    batch = [at for at in range(len(shape)) if at not in (axis, rows[0], columns[0])]
    left, left_node = _as_matrices(op, pair.left, shape, [*batch, *rows, axis, *columns])
    right, right_node = _as_matrices(op, pair.right, shape, [*batch, axis, *columns, *rows])
    made = Node((*left.shape[:2], right.shape[2]), learned=True)
    made.role = Scores(Product(left, right, left_node, right_node, op.tracer.modules(), made.shape, made.token))
    axes = [*batch, *rows, *columns]
    unmerged = view_of(made, "view", [shape[at] for at in axes])
    return view_of(unmerged, "permute", [axes.index(at) for at in sorted(axes)])


def _as_matrices(op: Operation, factor: Tensor, shape: Shape, order: list[int]) -> tuple[Tensor, Node]:
    """Return a factor of all pairs, and its node, as (batch, n, m): its axes in this order, without the last."""
    node, sizes = op.lineage.node(factor), [shape[at] for at in order[-3:-1]]
    for name, args in (
        ("expand", [list(shape)]), ("permute", [order]), ("select", [-1, 0]), ("reshape", [[-1, *sizes]])
    ):  # fmt: skip
        factor = getattr(factor, name)(*args)
        node = view_of(node, "view" if name == "reshape" else name, *args)
    return factor, node


def _projected_by(shape: Shape, left: Node, right: Node, weight: int, bias: Node | None) -> Node:
    parameter, activation = (right, left) if weight else (left, right)
    axis = -2 if weight else -1

    def channel(points: Points) -> Points:
        points = points.copy()
        points[:, axis] = 0
        return points

    return _projected(shape, activation, parameter, channel, (axis % len(parameter.shape),), bias)


def _projected(
    shape: Shape, activation: Node, weight: Node, channel: Map, inputs: tuple[int, ...], bias: Node | None
) -> Node:
    width, source = weight.shape[inputs[0]], activation.whole.token
    projection = Projection(weight, channel, width, inputs, bias, source)
    if activation.shape == shape and _runs_over_heads(activation):  # talking heads: a projection over heads
        return Node(shape, (Step(activation, effect="other"),), True, projection=projection, role=activation.role)
    return Node(shape, learned=True, projection=projection)


def _runs_over_heads(node: Node) -> bool:
    if node.shape[-1] < 2 or not isinstance(node.role, (Scores, Weights)):
        return False
    points = np.zeros((2, len(node.shape)), dtype=np.int64)
    points[1, -1] = 1
    traces = follow(node, points)
    if len(traces) != 1 or len(traces[0].points) != 2 or traces[0].points.shape[1] < 3:
        return False
    moves = (traces[0].points[0] != traces[0].points[1]).nonzero()[0]
    return bool(len(moves)) and int(moves[0]) < traces[0].points.shape[1] - 2


def _convolution(op: Operation) -> Node:
    """Read a convolution; its channels are axis 1, or axis 0 without a batch."""
    weight, shape, bias_tensor = op.node(1), op.shape, op.argument(2, "bias")
    bias = None if bias_tensor is None else op.lineage.node(bias_tensor)

    def channel(points: Points) -> Points:
        at = np.zeros((len(points), len(weight.shape)), dtype=np.int64)
        at[:, 0] = points[:, 1] if len(shape) == len(weight.shape) else points[:, 0]
        return at

    inputs = tuple(range(1, len(weight.shape)))
    if bias is not None:
        bias = view_of(bias, "view", [*bias.shape, *(1 for _ in inputs[1:])])
    return _projected(shape, op.node(0), weight, channel, inputs, bias)


READERS: dict[str, Reader] = {
    **dict.fromkeys(OPERANDS, _matrix_product),
    "convolution": _convolution,
    "sum": _sum_of_pairs,
}
