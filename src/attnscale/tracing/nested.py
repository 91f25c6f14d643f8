"""Strided nested tensors: what is done to one is done to each of its sequences, and these are followed.

torch's SDPA of nested tensors is made of their products where no kernel takes them, as on a CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from attnscale.tracing.coordinates import Points, transposed
from attnscale.tracing.lineage import Ledger, Node, moved
from attnscale.tracing.roles import Effect, Mixed, Softmax

COPIES = ("clone", "contiguous", "detach", "alias", "_to_copy")
SOFTMAXES = ("_safe_softmax", "_softmax", "softmax")


@dataclass(frozen=True, eq=False)
class Parts:
    """The sequences of a nested tensor, each a batch of one, and what is known of it as a whole."""

    tensors: tuple[Tensor, ...]
    nodes: tuple[Node, ...]
    product: "tuple[Parts, Parts] | None" = None  # is that of these
    is_weights: bool = False  # and its softmax
    softmax: Softmax | None = None  # holds values that this has mixed


class NestedTensors:
    """Nested tensors of the running model -> their parts, for as long as they live."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._held = ledger, WeakTensorKeyDictionary()

    def of(self, tensor: Tensor) -> Parts:
        """The parts of a nested tensor; one never seen begins a lineage."""
        found: Parts | None = self._held.get(tensor)
        if found is None:
            tensors = _unbound(tensor)
            found = Parts(tensors, tuple(Node(tuple(part.shape), learned=True) for part in tensors))
            self._held[tensor] = found
        return found

    def read(self, name: str, args: Sequence[Any], result: Any) -> None:
        """An operation ran that takes or gives nested tensors."""
        if name == "_nested_tensor_from_tensor_list":
            nodes = [moved(self._ledger.node(part), (1, *part.shape), lambda points: points[:, 1:]) for part in args[0]]
            self._write(result, nodes)
        elif name in ("values", "unbind", "cat") and isinstance(args[0], Tensor):
            self._leave(self.of(args[0]), result)
        elif isinstance(result, Tensor) and result.is_nested:
            self._write_from(name, args, result)

    def _write_from(self, name: str, args: Sequence[Any], result: Tensor) -> None:
        if name == "matmul" and all(isinstance(arg, Tensor) and arg.is_nested for arg in args[:2]):
            left, right = self.of(args[0]), self.of(args[1])
            self._held[result] = replace(self.of(result), product=(left, right))
            return
        given = self.of(args[0]) if isinstance(args[0], Tensor) and args[0].is_nested else None
        step = None if given is None else _step(name, args)
        if given is None or step is None:
            return
        self._write(result, [step(node) for node in given.nodes])
        self._held[result] = replace(
            self.of(result),
            product=given.product if name in SOFTMAXES else None,
            is_weights=name in SOFTMAXES,
            softmax=given.softmax,
        )

    def _write(self, nested: Tensor, nodes: Sequence[Node]) -> None:
        self._held[nested] = Parts(_unbound(nested), tuple(nodes))

    def mixed(self, nested: Tensor, softmax: Softmax) -> None:
        """A nested tensor holds values that the weights of a softmax mixed."""
        self._held[nested] = replace(self.of(nested), softmax=softmax)

    def _leave(self, parts: Parts, result: Any) -> None:
        """What its sequences hold stands in plain tensors again."""
        results = [result] if isinstance(result, Tensor) else list(result)
        for each, node in zip(results, parts.nodes if len(results) == len(parts.nodes) else (), strict=False):
            if parts.softmax is None and tuple(each.shape) == node.shape[1:]:
                self._ledger.write(each, moved(node, tuple(each.shape), _in_a_batch_of_one))
        if parts.softmax is not None:
            for each in results:
                self._ledger.write(each, Node(tuple(each.shape), learned=True, role=Mixed(parts.softmax)))


def _in_a_batch_of_one(points: Points) -> Points:
    return np.pad(points, ((0, 0), (1, 0)))


def _step(name: str, args: Sequence[Any]) -> Callable[[Node], Node] | None:
    """What an operation does to each part; None where it is not one of those that SDPA is made of."""
    if name in COPIES or name in SOFTMAXES:
        return lambda node: moved(node, node.shape, None)
    if name == "transpose":
        first, second = args[1:3]

        def turned(node: Node) -> Node:
            rank, shape = len(node.shape), list(node.shape)
            shape[first], shape[second] = shape[second], shape[first]
            return moved(node, tuple(shape), transposed(rank, first % rank, second % rank))

        return turned
    if name in ("mul", "div") and isinstance(args[1], Real | Tensor):
        factor = float(args[1]) if isinstance(args[1], Real) or args[1].dim() == 0 else None
        effect: Effect = "times" if name == "mul" else "over"
        return None if factor is None else lambda node: moved(node, node.shape, None, effect, factor)
    return None


def _unbound(nested: Tensor) -> tuple[Tensor, ...]:
    return tuple(part.unsqueeze(0) for part in nested.unbind())
