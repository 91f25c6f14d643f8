"""Every way of writing a softmax: torch's, its logarithm exponentiated, exponentials over their sum.

A tensor's role says how far it has come: Scores → Exponential → (with its ExponentialSum) Weights, or
Scores → (less their LogSum) LogWeights → Weights. A new way is a reader here and an attention in tests/zoo.
"""

import math

import numpy as np
import torch
from torch import Tensor

from attnscale.tracing.coordinates import Shape
from attnscale.tracing.following import are_outputs_of_one_projection, follow
from attnscale.tracing.lineage import Node, moved
from attnscale.tracing.operations import arithmetic
from attnscale.tracing.operations.operation import Operation, Reader, Result, opaque, unknown, widened
from attnscale.tracing.roles import (
    Exponential,
    ExponentialSum,
    InverseSum,
    LogSum,
    LogWeights,
    LostWeights,
    Mixed,
    MixedByPowers,
    Role,
    Scores,
    Softmax,
    Weights,
)

PLAIN, OF_SDPA = KERNELS = ("_softmax", "_safe_softmax")  # torch's own; the second SDPA's alone
SUM_TOLERANCE = 0.02  # of a row of weights from one: half precision rounds a long row by as much


def _softmax(op: Operation) -> Node:
    axis = op.argument(1, "dim", -1)
    role = op.node().role
    if isinstance(role, Weights) and axis % len(op.shape) == len(op.shape) - 1 == role.softmax.axis:
        role.softmax.taken_twice |= op.node().shape == op.shape and not _is_mixture(op.node())
        return Node(op.shape, learned=True, role=role)
    softmax = op.tracer.softmax(op.args[0], op.node(), axis, by=op.name)
    return _weights(op, softmax, are_outputs_of_one_projection(op.node(), axis))


def _is_mixture(weights: Node) -> bool:
    """Whether anything but moving happened to the weights of a softmax."""
    return any(
        trail.blended or trail.added for trail in follow(weights, np.zeros((1, len(weights.shape)), dtype=np.int64))
    )


def _log_softmax(op: Operation) -> Node:
    axis = op.argument(1, "dim", -1)
    softmax = op.tracer.softmax(op.args[0], op.node(), axis)
    role = LogWeights(softmax, are_outputs_of_one_projection(op.node(), axis))
    return Node(op.shape, learned=op.node().learned, role=role)


def _weights(op: Operation, softmax: Softmax | None, over_outputs: bool = False) -> Node:
    """The output of a softmax; of one that was not followed it is told where its weights mix values."""
    if softmax is not None:
        softmax.ran()
        return Node(op.shape, learned=True, role=Weights(softmax))
    if any(node.learned for node in op.nodes()):
        return Node(op.shape, learned=True, role=LostWeights(op.tracer.module, over_outputs))
    return opaque(op)


def _exponential(op: Operation) -> Node:
    """Of scores, or of the logarithm of weights: exp(log_softmax(z)), exp(z − logsumexp(z))."""
    parent = op.node()
    if isinstance(parent.role, LogWeights) and op.name == "exp":
        return _weights(op, parent.role.softmax, parent.role.over_outputs)
    node = moved(parent, op.shape, None, "exp")
    if isinstance(parent.role, Scores):
        exponent = parent if op.name == "exp" else moved(parent, op.shape, None, "times", math.log(2))
        node.role = Exponential(parent.role.of, exponent)
    return node


def _sum(op: Operation) -> Result:
    """Σe of exponentials, over one axis."""
    result, role, axes = arithmetic.reduced(op), op.node().role, arithmetic.reduced_axes(op)
    if isinstance(role, Exponential) and len(axes) == 1 and isinstance(result, Node):
        result.role = ExponentialSum(role.of, role.exponent, axes[0])
    return result


def _log(op: Operation) -> Result:
    """ln Σe."""
    role = op.node().role
    if not isinstance(role, ExponentialSum):
        return unknown(op)
    return Node(op.shape, learned=True, role=LogSum(role.of, role.axis))


def _log_sum(op: Operation) -> Result:
    """ln Σe of scores, by one operation."""
    result, role, axes = arithmetic.reduced(op), op.node().role, arithmetic.reduced_axes(op)
    if isinstance(role, Scores) and len(axes) == 1 and isinstance(result, Node):
        result.role = LogSum(role.of, axes[0])
    return result


def _inverse(op: Operation) -> Result:
    """1/Σe."""
    role = _role(op, 0)
    if not isinstance(role, ExponentialSum) or (op.name == "pow" and op.args[1] != -1):
        return unknown(op)
    return Node(op.shape, learned=True, role=InverseSum(role.of, role.exponent, role.axis))


def _put_back(op: Operation) -> Node:
    """m + ln Σe, where the maximum m was taken off the scores before: the logarithm of a sum still."""
    node, roles = arithmetic.plus(op), (_role(op, 0), _role(op, 1))
    for role, other in (roles, roles[::-1]):
        if isinstance(role, LogSum) and other is not None and other.product is role.of:
            node.role = role
    return node


def _difference(op: Operation) -> Node:
    """z − ln Σe, the logarithm of weights, where it really is that of the same scores."""
    node = arithmetic.minus(op)
    role = _role(op, 1)
    if not isinstance(role, LogSum) or not node.steps or node.steps[0].effect != "shift":
        return node
    axis = role.axis
    if axis >= op.result.dim() or not _sums_to_one(op.result.detach().exp(), axis):
        return node
    softmax = op.tracer.softmax(op.result, node, axis)
    return node if softmax is None else Node(op.shape, learned=True, role=LogWeights(softmax))


def _sums_to_one(weights: Tensor, axis: int) -> bool:
    sums = weights.sum(axis, dtype=torch.promote_types(weights.dtype, torch.float32))
    sums = sums[torch.isfinite(sums)]  # a row that sees nothing has none
    return bool(((sums - 1).abs() < SUM_TOLERANCE).all())


def _quotient(op: Operation) -> Node:
    """e / Σe, or (e @ values) / Σe."""
    role = _role(op, 1)
    found = _normalised(op, 0, role) if isinstance(role, ExponentialSum) else None
    if found is None and _is_weighed(op, 0):
        found = _weights(op, None)
    return found or arithmetic.over(op)


def _product(op: Operation) -> Node:
    """e · (1/Σe), either way round; or scores, e or weights times a mask."""
    for side in (0, 1):
        role = _role(op, side)
        found = _normalised(op, 1 - side, role) if isinstance(role, InverseSum) else None
        if found is not None:
            return found
        if isinstance(_role(op, 1 - side), (Exponential, Weights, Scores)) and _is_mask(op.args[side], op.shape):
            return moved(op.node(1 - side), op.shape, widened(op.node(1 - side), op.shape), "fill", 0.0)
    return _weights(op, None) if _is_weighed(op, 0) or _is_weighed(op, 1) else arithmetic.times(op)


def _is_mask(factor: object, shape: Shape) -> bool:
    """Whether a factor of powers is zeros and ones: hidden keys."""
    if not isinstance(factor, Tensor) or factor.numel() <= 1 or len(factor.shape) > len(shape):
        return False
    return bool(((factor == 0) | (factor == 1)).all())


def _role(op: Operation, side: int) -> Role | None:
    return op.node(side).role if len(op.args) > side and isinstance(op.args[side], Tensor) else None


def _is_weighed(op: Operation, side: int) -> bool:
    """Whether exponentials meet another number of their row than their sum, √Σe say: weights of no softmax."""
    powers, other = _role(op, side), _role(op, 1 - side)
    if not isinstance(powers, Exponential) or other is None or other.product is not powers.of:
        return False
    return not other.is_image and tuple(op.args[1 - side].shape) != op.shape


def _normalised(op: Operation, top: int, bottom: ExponentialSum | InverseSum) -> Node | None:
    """Exponentials over their own sum; None where the sum is that of others."""
    role = _role(op, top)
    if not isinstance(role, (Exponential, MixedByPowers)) or role.exponent is not bottom.exponent:
        return None
    powers = op.args[top] if isinstance(role, Exponential) else role.powers
    softmax = op.tracer.softmax(powers.reshape(role.exponent.shape).log(), role.exponent, bottom.axis)
    if isinstance(role, Exponential):
        if softmax is not None and bottom.axis < op.result.dim():
            softmax.is_short = not _sums_to_one(op.result.detach(), bottom.axis)
        return _weights(op, softmax)
    op.tracer.are_normalised(role.of)
    if softmax is None:
        op.tracer.loses(op.tracer.module)
        return None
    softmax.ran()
    return Node(op.shape, learned=True, role=Mixed(softmax))


READERS: dict[str, Reader] = {
    **dict.fromkeys(KERNELS, _softmax),
    "_log_softmax": _log_softmax,
    "exp": _exponential,
    "exp2": _exponential,
    "sum": _sum,
    "log": _log,
    "logsumexp": _log_sum,
    "reciprocal": _inverse,
    "pow": _inverse,
    "add": _put_back,
    "sub": _difference,
    "div": _quotient,
    "mul": _product,
}
