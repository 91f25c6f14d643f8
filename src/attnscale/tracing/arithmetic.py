"""Readers of operations that change values: multiply, add, cap, mask or normalise."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor

from attnscale.tracing.lineage import Node, Operation, Reader, Step, moved, opaque, widened
from attnscale.tracing.roles import (
    DropoutMask,
    Effect,
    MixedValues,
    PairwiseProduct,
    Scores,
    Weights,
    WeightStatistic,
    statistic_of,
)

Meaning = Literal["times", "over", "plus", "minus", "rminus", "other"]  # in the code; the effect may differ
WITH_A_GAIN = ("native_layer_norm", "_fused_rms_norm")


def _arithmetic(op: Operation, meaning: tuple[Meaning, Meaning]) -> Node:
    """Read an elementwise sum or product; `meaning` is one for the first operand and one for the second."""
    operands = op.args[:2]
    side = _main_operand(op, operands)
    main, other = op.lineage.node(operands[side]), operands[1 - side]
    second = op.lineage.node(other) if isinstance(other, Tensor) else None
    effect, operand = _effect(meaning[side], main, other, second)
    node = moved(main, op.shape, widened(main, op.shape), effect, operand)
    if node.steps:
        _note_operand(node.steps[0], meaning[side], second)
        _note_scaled(node)
    if second is None:
        return node
    if meaning[side] == "over" and isinstance(main.role, (Weights, MixedValues)):
        is_sum = isinstance(second.role, WeightStatistic) and second.role.softmax is main.role.softmax
        main.role.softmax.renormalised |= is_sum
    if op.name == "mul" and main.learned and second.learned and main.shape != op.shape != second.shape:
        softmax = main.role.softmax if isinstance(main.role, Weights) else None
        node.role = PairwiseProduct(op.args[0], op.args[1], softmax)
    if op.name == "mul" and isinstance(main.role, Scores) and isinstance(second.role, Scores):
        main.role.of.times_own_tanh |= main.role.of is second.role.of and main.role.of.capped
    node.learned = main.learned or second.learned
    node.parameter = main.parameter and (second.parameter or second.shape == ())
    return node


def _note_scaled(node: Node) -> None:
    step = node.steps[0]
    if isinstance(node.role, MixedValues) and step.effect in ("times", "over") and isinstance(step.operand, float):
        node.role.softmax.factor_after *= step.operand if step.effect == "times" else 1.0 / step.operand


def _note_operand(step: Step, meaning: Meaning, second: Node | None) -> None:
    """Record the node that was added or multiplied; for a divisor, only whether it is learned."""
    if meaning in ("plus", "minus"):
        step.added = second
    elif meaning == "rminus":
        step.added = second or Node(())
    elif meaning == "times" and step.effect != "norm":
        step.multiplied = second
    elif meaning == "over" and step.effect != "norm" and second is not None:
        step.multiplied = Node(second.shape, learned=second.learned, parameter=second.parameter)


def _main_operand(op: Operation, operands: Sequence[Any]) -> int:
    """Return the operand to follow: activations before tables, full tensors before broadcast ones."""
    ranks = {}
    for side, operand in enumerate(operands):
        if isinstance(operand, Tensor):
            node = op.lineage.node(operand)
            followed = node.role is not None and node.role.is_image
            is_new = not (isinstance(node.role, Scores) and node.role.of.has_softmax)  # not from an earlier layer
            ranks[side] = (node.learned, followed, is_new, node.shape == op.shape, not node.parameter, -side)
    return max(ranks, key=ranks.__getitem__)


def _effect(meaning: Meaning, main: Node, other: Any, second: Node | None) -> tuple[Effect, float | Tensor | None]:
    if second is None:
        number = _number(other)
        if meaning in ("times", "over"):  # from 1 / x, and from SDPA with scale 1
            return ("same", number) if number == 1.0 else (meaning, number) if number else ("other", None)
        return ("times", -1.0) if meaning == "rminus" else ("plus", number if meaning == "plus" else -number)
    if meaning == "rminus":
        return "times", -1.0
    if meaning == "minus" and isinstance(main.role, Scores) and _is_of_its_row(second, main.role):
        return "shift", other
    if meaning in ("plus", "minus"):
        is_table = other.is_floating_point() and not second.learned  # a table or mask
        return "plus", other if is_table else None
    if meaning == "times" and isinstance(second.role, DropoutMask):
        return "drop", None
    after_softmax = isinstance(main.role, (Weights, MixedValues))
    if (
        meaning in ("times", "over")
        and _even_along_features(other)
        and not (after_softmax and (second.parameter or second.learned))
    ):
        if second.learned and not isinstance(main.role, Scores) and other.numel() > 1:
            return "norm", None
        return meaning, other
    is_table = meaning == "times" and main.role is None and not (second.learned or second.parameter)
    return "other", other if is_table else None  # a table, such as a rotary embedding's cosines


def _is_of_its_row(node: Node, scores: Scores) -> bool:
    return node.role is not None and node.role.product is scores.of and not isinstance(node.role, Scores)


def _even_along_features(tensor: Tensor) -> bool:
    return tensor.numel() == 1 or tensor.shape[-1] == 1 or tensor.stride(-1) == 0


def _number(value: Any) -> float:
    is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    return float(value) if is_number else math.nan


def _negative(op: Operation) -> Node:
    node = moved(op.node(), op.shape, None, "times", -1.0)
    if node.steps:
        _note_scaled(node)
    return node


def _fill(op: Operation) -> Node:
    """Read masked_fill(x, mask, value), index_fill(x, axis, index, value) and fill(x, value)."""
    value = op.argument({"fill": 1, "index_fill": 3}.get(op.name, 2), "value", 0.0)
    return moved(op.node(), op.shape, widened(op.node(), op.shape), "fill", _number(value))


def _where(op: Operation) -> Node:
    if len(op.args) < 3:
        return opaque(op)
    side = _main_operand(op, op.args[1:3])
    main, other = op.lineage.node(op.args[1 + side]), op.args[2 - side]
    node = moved(main, op.shape, widened(main, op.shape), "fill", _number(other))
    node.learned = any(parent.learned for parent in op.nodes())
    return node


def _tanh(op: Operation) -> Node:
    node = moved(op.node(), op.shape, None, "tanh")
    if isinstance(node.role, Scores):
        node.role.of.capped = True
    return node


def reduced(op: Operation) -> Node:
    """Read a sum, a maximum or the like over some dimensions."""
    parent = op.node()
    return Node(op.shape, learned=parent.learned, parameter=parent.parameter, role=statistic_of(parent.role))


def reduced_axes(op: Operation) -> list[int]:
    """Return the reduced dimensions as non-negative numbers."""
    rank, axes = len(op.node().shape), op.argument(1, "dim")
    if axes is None or axes == []:
        return list(range(rank))
    return [axis % max(rank, 1) for axis in ([axes] if isinstance(axes, int) else axes)]


def _norm(op: Operation) -> Node:
    node = moved(op.node(), op.shape, None, "norm")
    if node.steps and op.name in WITH_A_GAIN:
        gain, bias = op.argument(2, "weight"), op.argument(3, "bias") if op.name != "_fused_rms_norm" else None
        node.steps[0].multiplied = None if gain is None else op.lineage.node(gain)
        node.steps[0].added = None if bias is None else op.lineage.node(bias)
    return node


def _batch_norm(op: Operation) -> Node:
    """Read a batch norm; in evaluation it only multiplies and adds constants, like part of the projection."""
    if op.argument(5, "training") is False:
        return moved(op.node(), op.shape, None, "other")
    return _norm(op)


def _weight_norm(op: Operation) -> Node:
    node = moved(op.node(), op.shape, None, "norm")
    node.steps[0].multiplied = op.node(1)
    return node


Elementwise = Callable[[Operation], Node]
times: Elementwise = partial(_arithmetic, meaning=("times", "times"))
over: Elementwise = partial(_arithmetic, meaning=("over", "other"))
plus: Elementwise = partial(_arithmetic, meaning=("plus", "plus"))
minus: Elementwise = partial(_arithmetic, meaning=("minus", "rminus"))
READERS: dict[str, Reader] = {
    "mul": times,
    "div": over,
    "add": plus,
    "sub": minus,
    "rsub": partial(_arithmetic, meaning=("rminus", "minus")),
    "neg": _negative,
    **dict.fromkeys(("masked_fill", "index_fill", "fill"), _fill),
    "where": _where,
    "tanh": _tanh,
    "_weight_norm_interface": _weight_norm,
    "native_batch_norm": _batch_norm,
    **dict.fromkeys((*WITH_A_GAIN, "native_group_norm"), _norm),
    **dict.fromkeys(("sum", "amax", "amin", "max", "min", "linalg_vector_norm"), reduced),
}
