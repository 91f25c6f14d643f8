"""Readers of operations that move or copy elements: views, copies, concatenations."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from attnscale.torch_internals import inside_nested_tensors
from attnscale.tracing import arithmetic
from attnscale.tracing.coordinates import NOWHERE, Points, piece, viewed
from attnscale.tracing.lineage import (
    Node,
    Operation,
    Reader,
    Result,
    Step,
    joined,
    moved,
    opaque,
    shape_of,
    widened,
)
from attnscale.tracing.roles import DropoutMask

VIEWS = (
    "alias", "_unsafe_view", "view", "unsqueeze", "squeeze", "expand", "transpose", "t", "permute", "slice", "select",
    "unfold", "split", "split_with_sizes", "unsafe_split", "unbind",
)  # fmt: skip


def _view(op: Operation) -> Result:
    if isinstance(op.argument(1, "dtype"), torch.dtype):
        return opaque(op)
    if isinstance(op.result, Tensor):
        return _linked(op, op.result)
    return [_linked(op, part, output) for output, part in enumerate(op.result)]


def _linked(op: Operation, result: Tensor, output: int | None = None) -> Node:
    """Return the node of a view, linked to its operand because a write changes both."""
    parent, source = op.node(), op.args[0]
    shape = parent.shape if result is source else shape_of(source)  # in place, the source has its new shape already
    back, forth = viewed(op.name, shape, *op.args[1:], output=output, **op.kwargs)
    node = moved(parent, shape_of(result), back)
    if node.steps:
        node.steps[0].view = forth, TensorWeakRef(source)
    return node


def _copied(op: Operation) -> Node:
    return moved(op.node(), op.shape, None)


def _detach(op: Operation) -> Node:
    node = _linked(op, op.result)
    if node.steps and not inside_nested_tensors():  # nested tensors detach their values but have own gradients
        node.steps[0].effect = "detach"
    return node


def _bernoulli(op: Operation) -> Node:
    return Node(op.shape, role=DropoutMask())


def _axis(op: Operation, axis: int) -> int:
    return axis % max(len(op.node().shape), 1)


def _pad(op: Operation) -> Node:
    pads, parent = op.args[1], op.node()
    before = np.zeros(len(parent.shape), dtype=np.int64)
    for pair in range(len(pads) // 2):
        before[-1 - pair] = pads[2 * pair]

    def back(points: Points) -> Points:
        points = points - before
        points[((points < 0) | (points >= np.array(parent.shape))).any(1)] = NOWHERE
        return points

    return moved(parent, op.shape, back)


def _repeat(op: Operation) -> Node:
    parent = op.node()
    missing, sizes = len(op.shape) - len(parent.shape), np.maximum(np.array(parent.shape, dtype=np.int64), 1)
    return moved(parent, op.shape, lambda points: points[:, missing:] % sizes)


def _view_as_complex(op: Operation) -> Node:
    return moved(op.node(), op.shape, viewed("select", op.node().shape, -1, 0)[0], "pair")


def _dropout(op: Operation) -> Node:
    return moved(op.node(), op.shape, None, "drop")


def _index_select(op: Operation) -> Node:
    return _chosen(op, _axis(op, op.args[1]), op.args[2])


def _index(op: Operation) -> Node:
    """Read x[:, [2, 0]]: one list of indices among full slices."""
    indices = [(axis, index) for axis, index in enumerate(op.args[1]) if index is not None]
    return _chosen(op, *indices[0]) if len(indices) == 1 else opaque(op)


def _chosen(op: Operation, axis: int, index: Tensor) -> Node:
    parent = op.node()
    is_list = index.dim() == 1 and index.dtype in (torch.int32, torch.int64)
    if not is_list or not (parent.learned or parent.parameter):
        return opaque(op)
    places = index.cpu().numpy() % parent.shape[axis]

    def back(points: Points) -> Points:
        points = points.copy()
        points[:, axis] = places[points[:, axis]]
        return points

    return moved(parent, op.shape, back)


def _topk(op: Operation) -> Node:
    """Read topk of values such as router logits; topk of scores is opaque, because their keys become unknown."""
    parent = op.node()
    return opaque(op) if parent.role is not None else moved(parent, op.shape, None, "other")


def _mean(op: Operation) -> Node:
    """Read a mean over positions, which preserves factors; a mean of scores or weights is a statistic."""
    parent, plain = op.node(), arithmetic.reduced(op)
    if parent.role is not None or not parent.learned:
        return plain
    axes, keepdim = sorted(arithmetic.reduced_axes(op)), bool(op.argument(2, "keepdim", False))

    def back(points: Points) -> Points:
        """Return the first of the elements that were reduced to each point."""
        for axis in axes:
            points = points if keepdim else np.insert(points, axis, 0, axis=1)
        return points * np.array([axis not in axes for axis in range(len(parent.shape))], dtype=np.int64)

    return moved(parent, op.shape, back)


def _cat(op: Operation) -> Node:
    """Read a cat or a stack."""
    axis = op.argument(1, "dim", 0) % max(len(op.shape), 1)
    steps, start = [], 0
    for tensor in op.args[0]:
        if op.name == "cat" and len(tensor.shape) != len(op.shape):  # torch ignores empty tensors of another rank
            continue
        stop = start + (tensor.shape[axis] if op.name == "cat" else 1)
        steps.append(Step(op.lineage.node(tensor), piece(axis, start, stop, op.name == "stack")))
        start = stop
    return joined(op.shape, steps)


def _copy(op: Operation) -> Node:
    source = op.node(1)
    return moved(source, op.shape, widened(source, op.shape))


def _written_into(op: Operation) -> Node:
    """Read a write into a cache or a padded batch; other elements keep their values.

    One number written over some scores, as in `scores[mask] = -inf`, hides them.
    """
    if op.name == "index_put" and op.args[2].numel() == 1 and not op.node(2).learned:
        return moved(op.node(), op.shape, None, "fill", float(op.args[2]))
    source = next((op.lineage.node(arg) for arg in reversed(op.args) if isinstance(arg, Tensor)), op.node())
    own = len(source.shape)
    is_packed = 1 < own < len(op.shape) and tuple(source.shape[1:]) == tuple(op.shape[1 - own :])
    if own != len(op.shape) and not is_packed:
        return opaque(op)
    last = np.array([size - 1 for size in source.shape])
    if is_packed:  # packed positions share one axis; their coordinates depend on the mask
        last[0] = 0
    node = moved(source, op.shape, lambda points: np.minimum(points[:, -own:], last))
    for step in node.steps:
        step.is_cache = True
    return node


READERS: dict[str, Reader] = {
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(("clone", "_to_copy", "lift_fresh", "_conj", "triu", "tril"), _copied),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max", "nan_to_num", "maximum", "minimum"), _copied),
    "repeat": _repeat,
    "view_as_real": lambda op: moved(op.node(), op.shape, lambda points: points[:, :-1]),
    "detach": _detach,
    "bernoulli": _bernoulli,
    "index_select": _index_select,
    "index": _index,
    "topk": _topk,
    "mean": _mean,
    **dict.fromkeys(("native_dropout", "_fused_dropout"), _dropout),
    **dict.fromkeys(
        ("index_copy", "index_put", "scatter", "slice_scatter", "select_scatter", "masked_scatter"), _written_into
    ),
    "constant_pad_nd": _pad,
    "view_as_complex": _view_as_complex,
    "cat": _cat,
    "stack": _cat,
    "copy": _copy,
}
