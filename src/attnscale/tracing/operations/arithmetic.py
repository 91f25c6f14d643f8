"""Operations that change values: what multiplies, shifts, caps, hides or normalises."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attnscale.tracing import coordinates
from attnscale.tracing.lineage import Node, Step
from attnscale.tracing.operations.operation import Operation, Reader, Result, moved, opaque, widened


def _times(op: Operation) -> Node:
    return _arithmetic(op, ("times", "times"))


def _over(op: Operation) -> Node:
    return _arithmetic(op, ("over", "other"))


def _plus(op: Operation) -> Node:
    return _arithmetic(op, ("plus", "plus"))


def _minus(op: Operation) -> Node:
    return _arithmetic(op, ("minus", "rminus"))


def _reverse_minus(op: Operation) -> Node:
    return _arithmetic(op, ("rminus", "minus"))


def _arithmetic(op: Operation, effects: tuple[str, str]) -> Node:
    """`effects`: what the operation does to its first operand, and to its second."""
    operands = op.args[:2]
    side = _main_operand(op, operands)
    if side is None:
        return Node(op.shape)
    main, other = op.ledger.node(operands[side]), operands[1 - side]
    back = None if main.shape == op.shape else coordinates.broadcast(main.shape, len(op.shape))
    effect, operand = _effect(op, effects[side], main, other)
    node = moved(main, op.shape, back, effect, operand)
    second = op.ledger.node(other) if isinstance(other, Tensor) else None
    if node.steps:
        _note_operand(node.steps[0], effects[side], second)
    if second is not None:
        if op.name == "mul" and main.learned and second.learned and main.shape != op.shape != second.shape:
            node.outer = (op.args[0], op.args[1])
        if effect == "shift":
            node.log_softmax_axis = second.log_sum_axis
        if effect == "plus" and main.scores is not None and second.scores not in (None, main.scores):
            node.steps[0].other_scores = second
        node.learned = main.learned or second.learned
        node.parameter = main.parameter and (second.parameter or second.shape == ())
        node.sum_of = main.sum_of if effect in ("plus", "same") else None
        if main.exponent is not None and effect == "other":
            node.exponent = main.exponent  # times a mask of zeros and ones
    elif main.sum_of is not None and effect == "plus":
        node.sum_of = main.sum_of  # plus a small number against division by zero
    return node


def _note_operand(step: Step, meant: str, second: Node | None) -> None:
    """What was added to the value or multiplied with it; of a divisor and of a minuend, only what kind it is."""
    if meant in ("plus", "minus"):
        step.added = second
    elif meant == "rminus":
        step.added = second or Node(())
    elif meant == "times" and step.effect != "norm":
        step.multiplied = second
    elif meant == "over" and step.effect != "norm" and second is not None:
        step.multiplied = Node(second.shape, learned=second.learned)


def _main_operand(op: Operation, operands: Sequence[Any]) -> int | None:
    """Which operand the result is an image of: activations before tables, scores first, whole before broadcast."""
    ranks = {}
    for side, operand in enumerate(operands):
        if isinstance(operand, Tensor):
            node = op.ledger.node(operand)
            followed = node.scores or node.weights or node.exponent or node.mixed
            ranks[side] = (node.learned, followed is not None, node.shape == op.shape, not node.parameter, -side)
    return max(ranks, key=ranks.__getitem__, default=None)


def _effect(op: Operation, effect: str, main: Node, other: Any) -> tuple[str, float | Tensor | None]:
    if not isinstance(other, Tensor):
        number = _number(other)
        if effect in ("times", "over"):
            return (effect, number) if number else ("other", None)
        return ("times", -1.0) if effect == "rminus" else ("plus", number if effect == "plus" else -number)
    second = op.ledger.node(other)
    if effect == "rminus":
        return "times", -1.0
    if effect == "minus" and main.scores is not None and second.about is main.scores and second.scores is None:
        return "shift", other
    if effect in ("plus", "minus"):
        return "plus", other if _worth_keeping(other, second) else None
    after_softmax = main.weights is not None or main.mixed is not None
    if (
        effect in ("times", "over")
        and _even_along_features(other)
        and not (after_softmax and (second.parameter or second.learned))
    ):
        if second.learned and main.scores is None and other.numel() > 1:
            return "norm", None
        return effect, other
    return "other", None


def _even_along_features(tensor: Tensor) -> bool:
    """Whether one value multiplies all features of a query, or all scores of a row."""
    return tensor.numel() == 1 or tensor.shape[-1] == 1 or tensor.stride(-1) == 0


def _worth_keeping(tensor: Tensor, node: Node) -> bool:
    """Masks and tables are; activations are not."""
    return tensor.is_floating_point() and not node.learned


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _negative(op: Operation) -> Node:
    return moved(op.node(), op.shape, None, "times", -1.0)


def _fill(op: Operation) -> Node:
    value = op.argument(2, "value", 0.0)
    return moved(op.node(), op.shape, widened(op.node(), op.shape), "fill", _scalar(value))


def _where(op: Operation) -> Node:
    if len(op.args) < 3:
        return opaque(op)
    side = _main_operand(op, op.args[1:3])
    if side is None:
        return Node(op.shape)
    main, other = op.ledger.node(op.args[1 + side]), op.args[2 - side]
    node = moved(main, op.shape, widened(main, op.shape), "fill", _scalar(other))
    node.learned = any(parent.learned for parent in op.nodes())
    return node


def _scalar(value: Any) -> float:
    """A fill value; a tensor of many is none."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else 0.0
    return _number(value)


def _tanh(op: Operation) -> Node:
    node = moved(op.node(), op.shape, None, "tanh")
    if node.scores is not None:
        node.scores.capped = True
    return node


def _exp(op: Operation) -> Node:
    node = moved(op.node(), op.shape, None, "exp")
    if node.about is not None and op.node().scores is not None:
        node.exponent = op.node() if op.name == "exp" else moved(op.node(), op.shape, None, "times", math.log(2))
    return node


def _reduce(op: Operation) -> Result:
    parent, axes = op.node(), op.argument(1, "dim")
    axes = list(range(len(parent.shape))) if axes is None or axes == [] else [axes] if isinstance(axes, int) else axes
    node = Node(op.shape, learned=parent.learned, parameter=parent.parameter, about=parent.about)
    if op.name == "sum" and parent.exponent is not None and len(axes) == 1:
        node.sum_of = (parent.exponent, axes[0] % len(parent.shape))
    if op.name == "logsumexp" and parent.scores is not None and len(axes) == 1:
        node.log_sum_axis = axes[0] % len(parent.shape)
    return [node, None] if isinstance(op.result, (tuple, list)) else node


def _norm(op: Operation) -> Result:
    node = moved(op.node(), op.shape, None, "norm")
    if node.steps and op.name in ("native_layer_norm", "_fused_rms_norm"):
        gain, bias = op.argument(2, "weight"), op.argument(3, "bias") if op.name == "native_layer_norm" else None
        node.steps[0].multiplied = None if gain is None else op.ledger.node(gain)
        node.steps[0].added = None if bias is None else op.ledger.node(bias)
    return [node] if isinstance(op.result, (tuple, list)) else node


def _weight_norm(op: Operation) -> Result:
    node = moved(op.node(), op.shape, None, "norm")
    node.steps[0].multiplied = op.node(1)
    return [node]


READERS: dict[str, Reader] = {
    "mul": _times,
    "div": _over,
    "add": _plus,
    "sub": _minus,
    "rsub": _reverse_minus,
    "neg": _negative,
    "masked_fill": _fill,
    "where": _where,
    "tanh": _tanh,
    "exp": _exp,
    "exp2": _exp,
    "_weight_norm_interface": _weight_norm,
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "native_group_norm", "native_batch_norm"), _norm),
    **dict.fromkeys(("sum", "amax", "amin", "max", "mean", "logsumexp", "min", "linalg_vector_norm"), _reduce),
}
