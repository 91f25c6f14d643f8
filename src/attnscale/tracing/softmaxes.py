"""Readers of all forms of softmax: torch's own, exp of log-softmax, and exponentials divided by their sum.

Roles record the progress: Scores → Exponentials → (divided by ExponentialSum) Weights, or Scores → (minus log of the
sum) LogWeights → Weights. To support a new form, add a reader here and an attention in tests/zoo.
"""

import math

import numpy as np
import torch
from torch import Tensor

from attnscale.tracing import arithmetic
from attnscale.tracing.coordinates import Shape
from attnscale.tracing.following import are_outputs_of_one_projection, follow
from attnscale.tracing.lineage import Node, Operation, Reader, moved, opaque, widened
from attnscale.tracing.roles import (
    Exponentials,
    ExponentialSum,
    LogWeights,
    MixedValues,
    Role,
    Scores,
    Softmax,
    UnknownWeights,
    UnnormalisedMix,
    Weights,
)

PLAIN, OF_SDPA = KERNELS = ("_softmax", "_safe_softmax")  # torch's own; only SDPA uses the second
SUM_TOLERANCE = 0.02  # distance of a row's sum from one, by rounding of long rows in half precision


def _softmax(op: Operation) -> Node:
    axis = op.argument(1, "dim", -1)
    role = op.node().role
    if isinstance(role, Weights) and axis % len(op.shape) == len(op.shape) - 1 == role.softmax.axis:
        role.softmax.taken_twice |= op.node().shape == op.shape and not _is_mixture(op.node())
        return Node(op.shape, learned=True, role=role)
    softmax = op.tracer.softmax(op.args[0], op.node(), axis, by=op.name)
    return _weights(op, softmax, are_outputs_of_one_projection(op.node(), axis))


def _is_mixture(weights: Node) -> bool:
    """Return True if the weights of a softmax were combined with other values."""
    first = np.zeros((1, len(weights.shape)), dtype=np.int64)
    return any(trace.blended or trace.added for trace in follow(weights, first))


def _log_softmax(op: Operation) -> Node:
    axis = op.argument(1, "dim", -1)
    softmax = op.tracer.softmax(op.args[0], op.node(), axis)
    role = LogWeights(softmax, are_outputs_of_one_projection(op.node(), axis))
    return Node(op.shape, learned=op.node().learned, role=role)


def _weights(op: Operation, softmax: Softmax | None, over_outputs: bool = False) -> Node:
    """Return the node of a softmax's output; None means weights of unknown origin, reported if they mix values."""
    if softmax is not None:
        softmax.ran()
        return Node(op.shape, learned=True, role=Weights(softmax))
    if any(node.learned for node in op.nodes()):
        return Node(op.shape, learned=True, role=UnknownWeights(op.tracer.module, over_outputs))
    return opaque(op)


def _exponential(op: Operation) -> Node:
    """Read exp of scores, or of log-weights: exp(log_softmax(z)), exp(z − logsumexp(z))."""
    parent = op.node()
    if isinstance(parent.role, LogWeights) and op.name == "exp":
        return _weights(op, parent.role.softmax, parent.role.over_outputs)
    node = moved(parent, op.shape, None, "exp")
    if isinstance(parent.role, Scores):
        exponent = parent if op.name == "exp" else moved(parent, op.shape, None, "times", math.log(2))
        node.role = Exponentials(parent.role.of, exponent)
    return node


def read_sum(op: Operation) -> Node:
    """Read the sum of exponentials over one axis, or a logsumexp of scores."""
    result, role, axes = arithmetic.reduced(op), op.node().role, arithmetic.reduced_axes(op)
    if len(axes) != 1:
        return result
    if op.name == "sum" and isinstance(role, Exponentials):
        result.role = ExponentialSum(role.of, axes[0], role.exponent)
    elif op.name == "logsumexp" and isinstance(role, Scores):
        result.role = ExponentialSum(role.of, axes[0], form="log")
    return result


def _log(op: Operation) -> Node:
    role = _sum_at(op, 0, "sum")
    if role is None:
        return opaque(op)
    return Node(op.shape, learned=True, role=ExponentialSum(role.of, role.axis, form="log"))


def _inverse(op: Operation) -> Node:
    role = _sum_at(op, 0, "sum")
    if role is None or (op.name == "pow" and op.args[1] != -1):
        return opaque(op)
    return Node(op.shape, learned=True, role=ExponentialSum(role.of, role.axis, role.exponent, "inverse"))


def _sum_at(op: Operation, side: int, form: str) -> ExponentialSum | None:
    role = _role(op, side)
    return role if isinstance(role, ExponentialSum) and role.form == form else None


def _add_maximum(op: Operation) -> Node:
    """Read m + ln Σe, the logarithm of the sum, where the maximum m was subtracted from the scores before."""
    node = arithmetic.plus(op)
    for side in (0, 1):
        role, other = _sum_at(op, side, "log"), _role(op, 1 - side)
        if role is not None and other is not None and other.product is role.of:
            node.role = role
    return node


def _difference(op: Operation) -> Node:
    """Read z − ln Σe, the logarithm of weights, if both come from the same scores."""
    node, role = arithmetic.minus(op), _sum_at(op, 1, "log")
    if role is None or not node.steps or node.steps[0].effect != "shift":
        return node
    if role.axis >= op.result.dim() or not _sums_to_one(op.result.detach().exp(), role.axis):
        return node
    softmax = op.tracer.softmax(op.result, node, role.axis)
    return node if softmax is None else Node(op.shape, learned=True, role=LogWeights(softmax))


def _sums_to_one(weights: Tensor, axis: int) -> bool:
    sums = weights.sum(axis, dtype=torch.promote_types(weights.dtype, torch.float32))
    sums = sums[torch.isfinite(sums)]  # a row that sees no key has no finite sum
    return bool(((sums - 1).abs() < SUM_TOLERANCE).all())


def _quotient(op: Operation) -> Node:
    """Read e / Σe, or (e @ values) / Σe."""
    role = _sum_at(op, 1, "sum")
    found = None if role is None else _normalised(op, 0, role)
    if found is None and _is_weighed(op, 0):
        found = _weights(op, None)
    return found or arithmetic.over(op)


def _product(op: Operation) -> Node:
    """Read e · (1/Σe) in either order; or a mask times scores, exponentials or weights."""
    for side in (0, 1):
        role, other = _sum_at(op, side, "inverse"), _role(op, 1 - side)
        found = None if role is None else _normalised(op, 1 - side, role)
        if found is not None:
            return found
        if isinstance(other, (Exponentials, Weights, Scores)) and _is_mask(op.args[side], op.shape):
            return moved(op.node(1 - side), op.shape, widened(op.node(1 - side), op.shape), "fill", 0.0)
    return _weights(op, None) if _is_weighed(op, 0) or _is_weighed(op, 1) else arithmetic.times(op)


def _is_mask(factor: object, shape: Shape) -> bool:
    if not isinstance(factor, Tensor) or factor.numel() <= 1 or len(factor.shape) > len(shape):
        return False
    return bool(((factor == 0) | (factor == 1)).all())


def _role(op: Operation, side: int) -> Role | None:
    return op.node(side).role if len(op.args) > side and isinstance(op.args[side], Tensor) else None


def _is_weighed(op: Operation, side: int) -> bool:
    """Return True if exponentials are combined with a row statistic other than their sum, such as √Σe: no softmax."""
    exponentials, other = _role(op, side), _role(op, 1 - side)
    if not isinstance(exponentials, Exponentials) or other is None or other.product is not exponentials.of:
        return False
    return not other.is_image and tuple(op.args[1 - side].shape) != op.shape


def _normalised(op: Operation, side: int, total: ExponentialSum) -> Node | None:
    """Read exponentials divided by their own sum; None for another divisor."""
    role = _role(op, side)
    if not isinstance(role, (Exponentials, UnnormalisedMix)) or role.exponent is not total.exponent:
        return None
    exponentials = op.args[side] if isinstance(role, Exponentials) else role.exponentials
    softmax = op.tracer.softmax(exponentials.reshape(role.exponent.shape).log(), role.exponent, total.axis)
    if isinstance(role, Exponentials):
        if softmax is not None and total.axis < op.result.dim():
            softmax.is_short = not _sums_to_one(op.result.detach(), total.axis)
        return _weights(op, softmax)
    op.tracer.are_normalised(role.of)
    if softmax is None:
        op.tracer.note_not_understood(op.tracer.module)
        return None
    softmax.ran()
    return Node(op.shape, learned=True, role=MixedValues(softmax))


READERS: dict[str, Reader] = {
    **dict.fromkeys(KERNELS, _softmax),
    "_log_softmax": _log_softmax,
    "exp": _exponential,
    "exp2": _exponential,
    "sum": read_sum,
    "log": _log,
    "logsumexp": read_sum,
    "reciprocal": _inverse,
    "pow": _inverse,
    "add": _add_maximum,
    "sub": _difference,
    "div": _quotient,
    "mul": _product,
}
