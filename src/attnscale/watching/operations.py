"""Every operation of the running model -> its place in the lineage.

Operations reach this as ATen's: einsum, matmul and `@` have become bmm and views by then. What is not named here is
taken as elementwise where its result has the shape of an operand, and as the beginning of a lineage otherwise.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from attnscale.watching import coordinates
from attnscale.watching.coordinates import Map, Shape
from attnscale.watching.lineage import LONGEST, Ledger, Node, Step, View, shape_of

Result = Node | Sequence[Node | None]


class Operation:
    """One call of ATen, done."""

    __slots__ = ("args", "kwargs", "ledger", "name", "result", "shape")

    def __init__(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any, ledger: Ledger) -> None:
        self.name = name  # without namespace, overload and the underscore of in-place forms
        self.args, self.kwargs, self.result, self.ledger = args, kwargs, result, ledger
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        self.shape: Shape = shape_of(first) if isinstance(first, Tensor) else ()  # of the first of several results

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """An argument, by position or by name."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)

    def node(self, index: int = 0) -> Node:
        """The node of a tensor argument."""
        return self.ledger.node(self.args[index])

    def nodes(self) -> list[Node]:
        """The nodes of all tensor arguments, of lists of tensors too."""
        flat = [item for arg in self.args for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        return [self.ledger.node(item) for item in flat if isinstance(item, Tensor)]


def read(operation: Operation) -> Result:
    """The node of the result, or of each of several results."""
    return READERS.get(operation.name, _unknown)(operation)


# --- one operand, elements moved -----------------------------------------------------------------------------------


def moved(
    parent: Node, shape: Shape, back: Map | None, effect: str = "same", operand: float | Tensor | None = None
) -> Node:
    """The node of a result that holds the elements of its parent, elsewhere or changed one by one."""
    if parent.depth >= LONGEST:
        return Node(shape, learned=parent.learned, parameter=parent.parameter)
    keeps = effect not in ("norm", "exp")
    return Node(
        shape,
        steps=(Step(parent, back, effect, operand),),
        learned=parent.learned,
        parameter=parent.parameter,
        depth=parent.depth + 1,
        scores=parent.scores if keeps else None,
        about=parent.about,
        exponent=parent.exponent if effect in ("same", "fill", "other") else None,
        sum_of=parent.sum_of,
        weights=parent.weights if keeps else None,
        lost=parent.lost if keeps else "",
        mixed=parent.mixed if effect in ("same", "times", "over") else None,
        mixed_by_powers=parent.mixed_by_powers if effect == "same" else None,
    )


def _viewed(op: Operation, back: Map, forth: Map) -> Node:
    """The node of a view, which shares the memory of its operand: writing to it writes to both."""
    node = moved(op.node(), op.shape, back)
    if node.steps:
        node.steps[0].view = View(forth, TensorWeakRef(op.args[0]))
    return node


def _same(op: Operation) -> Node:
    return moved(op.node(), op.shape, None)


def _alias(op: Operation) -> Node:
    return _viewed(op, lambda points: points, lambda points: points)


def _reshape(op: Operation) -> Node:
    parent = op.node()
    return _viewed(op, coordinates.reshaped(parent.shape, op.shape), coordinates.reshaped(op.shape, parent.shape))


def _reshape_copy(op: Operation) -> Node:
    return moved(op.node(), op.shape, coordinates.reshaped(op.node().shape, op.shape))


def _expand(op: Operation) -> Node:
    return moved(op.node(), op.shape, coordinates.broadcast(op.node().shape, len(op.shape)))


def _permute(op: Operation) -> Node:
    order = [axis % len(op.shape) for axis in op.args[1]]
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return _viewed(op, coordinates.permuted(order), coordinates.permuted(inverse))


def _transpose(op: Operation) -> Node:
    first, second = (op.args[1], op.args[2]) if len(op.args) > 2 else (0, -1)
    swap = coordinates.transposed(len(op.shape), first, second)
    return _viewed(op, swap, swap)


def _slice(op: Operation) -> Node:
    parent = op.node()
    axis = op.argument(1, "dim", 0) % max(len(parent.shape), 1)
    size, start = parent.shape[axis], op.argument(2, "start") or 0
    start = min(max(start + size if start < 0 else start, 0), size)
    step = op.argument(4, "step", 1)
    return _viewed(
        op,
        coordinates.sliced(axis, start, step),
        coordinates.into_slice(axis, start, step, op.shape[axis]),
    )


def _select(op: Operation) -> Node:
    parent = op.node()
    axis = op.args[1] % len(parent.shape)
    index = op.args[2] % max(parent.shape[axis], 1)
    return _viewed(op, coordinates.selected(axis, index), coordinates.stacked(axis, index))


def _split(op: Operation) -> list[Node]:
    parent, axis, start, nodes = op.node(), op.argument(2, "dim", 0), 0, []
    axis %= max(len(parent.shape), 1)
    for part in op.result:
        nodes.append(moved(parent, shape_of(part), coordinates.sliced(axis, start)))
        start += part.shape[axis]
    return nodes


def _unbind(op: Operation) -> list[Node]:
    parent = op.node()
    axis = op.argument(1, "dim", 0) % len(parent.shape)
    return [moved(parent, shape_of(part), coordinates.selected(axis, i)) for i, part in enumerate(op.result)]


def _repeat(op: Operation) -> Node:
    return moved(op.node(), op.shape, coordinates.repeated(op.node().shape, len(op.shape)))


def _unfold(op: Operation) -> Node:
    return moved(op.node(), op.shape, coordinates.unfolded(op.args[1] % len(op.node().shape), op.args[3]))


def _as_strided(op: Operation) -> Node:
    parent = op.node()
    source = op.args[0]
    if any(size > 1 and stride == 0 for size, stride in zip(source.shape, source.stride(), strict=True)):
        return _opaque(op)
    given = op.argument(3, "storage_offset")
    offset = 0 if given is None else given - source.storage_offset()
    return moved(parent, op.shape, coordinates.strided(parent.shape, source.stride(), op.args[2], offset))


def _pad(op: Operation) -> Node:
    pads, parent = op.args[1], op.node()
    before = [0] * len(parent.shape)
    for pair in range(len(pads) // 2):
        before[-1 - pair] = pads[2 * pair]
    return moved(parent, op.shape, coordinates.padded(parent.shape, before))


def _view_as_complex(op: Operation) -> Node:
    return moved(op.node(), op.shape, coordinates.selected(len(op.shape), 0), "pair")


def _view_as_real(op: Operation) -> Node:
    return moved(op.node(), op.shape, lambda points: points[:, :-1])


def _roll(op: Operation) -> Node:
    parent = op.node()
    if len(op.args) < 3 or not op.args[2]:
        return _opaque(op)

    def back(points: coordinates.Points) -> coordinates.Points:
        points = points.copy()
        for shift, axis in zip(op.args[1], op.args[2], strict=True):
            points[:, axis] = (points[:, axis] - shift) % parent.shape[axis]
        return points

    return moved(parent, op.shape, back)


# --- several operands side by side ---------------------------------------------------------------------------------


def _cat(op: Operation) -> Node:
    axis = op.argument(1, "dim", 0) % max(len(op.shape), 1)
    steps, start = [], 0
    for tensor in op.args[0]:
        if len(tensor.shape) != len(op.shape):  # torch lets an empty one through
            continue
        stop = start + tensor.shape[axis]
        steps.append(Step(op.ledger.node(tensor), coordinates.piece(axis, start, stop)))
        start = stop
    return _joined(op, steps)


def _stack(op: Operation) -> Node:
    axis = op.argument(1, "dim", 0) % len(op.shape)
    return _joined(op, [Step(op.ledger.node(t), coordinates.stacked(axis, i)) for i, t in enumerate(op.args[0])])


def _joined(op: Operation, steps: list[Step]) -> Node:
    parents = [step.parent for step in steps]
    if max((parent.depth for parent in parents), default=0) >= LONGEST:
        return Node(op.shape, learned=any(parent.learned for parent in parents))
    return Node(
        op.shape,
        steps=tuple(steps),
        learned=any(parent.learned for parent in parents),
        parameter=all(parent.parameter for parent in parents),
        depth=1 + max((parent.depth for parent in parents), default=0),
        scores=next((parent.scores for parent in parents if parent.scores), None),
        about=next((parent.about for parent in parents if parent.about), None),
        weights=next((parent.weights for parent in parents if parent.weights), None),
    )


# --- arithmetic ----------------------------------------------------------------------------------------------------


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
    return moved(op.node(), op.shape, _back(op.node(), op.shape), "fill", _scalar(value))


def _where(op: Operation) -> Node:
    if len(op.args) < 3:
        return _opaque(op)
    side = _main_operand(op, op.args[1:3])
    if side is None:
        return Node(op.shape)
    main, other = op.ledger.node(op.args[1 + side]), op.args[2 - side]
    node = moved(main, op.shape, _back(main, op.shape), "fill", _scalar(other))
    node.learned = any(parent.learned for parent in op.nodes())
    return node


def _scalar(value: Any) -> float:
    """A fill value; a tensor of many is none."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else 0.0
    return _number(value)


def _back(parent: Node, shape: Shape) -> Map | None:
    return None if parent.shape == shape else coordinates.broadcast(parent.shape, len(shape))


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


def _copy(op: Operation) -> Node:
    source = op.node(1)
    return moved(source, op.shape, _back(source, op.shape))


def _written_into(op: Operation) -> Node:
    """A cache that received new keys: at its other positions it holds what it received before."""
    source = next((op.ledger.node(arg) for arg in reversed(op.args) if isinstance(arg, Tensor)), op.node())
    if len(source.shape) != len(op.shape):
        return _opaque(op)
    last = np.array([size - 1 for size in source.shape])
    return moved(source, op.shape, lambda points: np.minimum(points, last))


# --- reductions and normalisations ---------------------------------------------------------------------------------


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


def _first_of_several(op: Operation) -> Result:
    return [_same(op)] if isinstance(op.result, (tuple, list)) else _same(op)


def _unknown(op: Operation) -> Result:
    node = _opaque(op)
    return [node] if isinstance(op.result, (tuple, list)) else node


def _opaque(op: Operation) -> Node:
    shape = op.shape
    parents = op.nodes()
    like = [parent for parent in parents if parent.shape == shape]
    main = max(like, key=lambda parent: (parent.scores is not None, parent.learned), default=None)
    if main is not None and main.learned:
        return moved(main, shape, None, "other")
    return Node(
        shape,
        learned=any(parent.learned for parent in parents),
        parameter=bool(parents) and all(parent.parameter for parent in parents),
        about=next((parent.about for parent in parents if parent.about is not None), None),
    )


READERS: dict[str, Callable[[Operation], Result]] = {
    **dict.fromkeys(
        ("clone", "_to_copy", "contiguous", "lift_fresh", "to", "clamp", "clamp_min", "clamp_max",
         "nan_to_num", "resolve_conj", "resolve_neg", "maximum", "minimum", "triu", "tril", "_conj"),
        _same,
    ),
    **dict.fromkeys(
        ("view", "_reshape_alias", "unsqueeze", "squeeze"), _reshape
    ),
    **dict.fromkeys(("_unsafe_view", "reshape", "flatten", "unflatten"), _reshape_copy),
    **dict.fromkeys(("detach", "alias"), _alias),
    **dict.fromkeys(("transpose", "t", "swapaxes", "adjoint", "mT"), _transpose),
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "chunk", "unsafe_chunk"), _split),
    **dict.fromkeys(("sum", "amax", "amin", "max", "mean", "logsumexp", "min", "linalg_vector_norm"), _reduce),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "native_group_norm", "native_batch_norm"), _norm),
    "_weight_norm_interface": _weight_norm,
    **dict.fromkeys(("native_dropout", "_fused_dropout"), _first_of_several),
    **dict.fromkeys(("index_copy", "index_put", "scatter", "slice_scatter", "select_scatter"), _written_into),
    "expand": _expand, "permute": _permute, "slice": _slice, "select": _select, "unbind": _unbind, "repeat": _repeat,
    "unfold": _unfold, "as_strided": _as_strided, "constant_pad_nd": _pad, "roll": _roll,
    "view_as_complex": _view_as_complex, "view_as_real": _view_as_real,
    "cat": _cat, "stack": _stack,
    "mul": _times, "div": _over, "add": _plus, "sub": _minus, "rsub": _reverse_minus, "neg": _negative,
    "masked_fill": _fill, "where": _where, "tanh": _tanh, "exp": _exp, "exp2": _exp, "copy": _copy,
}  # fmt: skip
