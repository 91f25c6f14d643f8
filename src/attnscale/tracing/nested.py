"""Strided nested tensors: what is done to one is done to each of its sequences, and these are followed.

torch's SDPA of nested tensors is made of their products where no kernel takes them, as on a CPU.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from attnscale.tracing.lineage import Node
from attnscale.tracing.operations.softmaxes import OF_SDPA
from attnscale.tracing.roles import Mixed, Softmax
from attnscale.tracing.tracer import Tracer

SOFTMAXES = (OF_SDPA, "_softmax", "softmax")


@dataclass(frozen=True, eq=False)
class Parts:
    """The sequences of a nested tensor, each a batch of one; their nodes are in the ledger."""

    tensors: tuple[Tensor, ...]
    product: "tuple[Operand, Operand] | None" = None  # is that of these
    is_weights: bool = False  # is the softmax of it
    by_sdpa: bool = False  # by one that SDPA alone takes
    factor: float = 1.0  # is another one times this


class Operand:
    """One side of a product, or of a kernel: a nested tensor with its parts, and who asks for their gradients."""

    def __init__(self, nested: Tensor, parts: Parts) -> None:
        self.nested, self.parts, self.factor = nested, parts, parts.factor
        self._told: list[tuple[int, Callable[[Tensor], None]]] = []

    def tell(self, number: int, hook: Callable[[Tensor], None]) -> None:
        """Let a hook have the gradient of one sequence, (1, …)."""
        if not self._told:
            self.nested.register_hook(self._passed)
        self._told.append((number, hook))

    def _passed(self, gradient: Tensor) -> None:
        parts = gradient.detach().unbind()
        for number, hook in self._told:
            hook(parts[number].unsqueeze(0))


class NestedTensors:
    """Nested tensors of the running model -> their parts, for as long as they live."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer, self._held = tracer, WeakTensorKeyDictionary()

    def of(self, nested: Tensor) -> Parts:
        """The parts of a nested tensor; those of one never seen begin a lineage."""
        found: Parts | None = self._held.get(nested)
        if found is None:
            found = self._held[nested] = Parts(tuple(part.unsqueeze(0) for part in nested.unbind()))
        return found

    def read(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """An operation ran that takes or gives nested tensors."""
        if name == "_nested_tensor_from_tensor_list":
            for source, part in zip(args[0], self.of(result).tensors, strict=True):
                self._follow("unsqueeze", (source, 0), part)
        elif name == "matmul" and all(map(is_nested, args[:2])):
            left, right = (Operand(arg, self.of(arg)) for arg in args[:2])
            self._held[result] = replace(self.of(result), product=(left, right))
        elif name in SOFTMAXES:
            product, by_sdpa = self.of(args[0]).product, name == OF_SDPA
            self._held[result] = replace(self.of(result), product=product, is_weights=True, by_sdpa=by_sdpa)
        elif is_nested(result):
            for at, part in enumerate(self.of(result).tensors):
                given = [self.of(arg).tensors[at] if is_nested(arg) else arg for arg in args]
                self.tracer.read(name, given, dict(kwargs), part, False)
            if name == "mul" and isinstance(args[1], float):
                self._held[result] = replace(self.of(result), factor=args[1])
        elif is_nested(args[0]) and name in ("unbind", "values"):
            self._leave(self.of(args[0]), [result] if isinstance(result, Tensor) else result)

    def mixed(self, nested: Tensor, softmax: Softmax) -> None:
        """A nested tensor holds values that the weights of a softmax mixed."""
        for part in self.of(nested).tensors:
            self.tracer.ledger.write(part, Node(tuple(part.shape), learned=True, role=Mixed(softmax)))

    def _leave(self, parts: Parts, results: Sequence[Tensor]) -> None:
        """What its sequences hold stands in plain tensors again: one each, or all in one."""
        if len(results) == len(parts.tensors):
            for part, each in zip(parts.tensors, results, strict=True):
                self._follow("squeeze", (part, 0), each)
        elif parts.tensors:
            node = self.tracer.ledger.node(parts.tensors[0])
            self.tracer.ledger.write(results[0], Node(tuple(results[0].shape), learned=node.learned, role=node.role))

    def _follow(self, name: str, args: Sequence[Any], result: Tensor) -> None:
        self.tracer.read(name, args, {}, result, False)


def is_nested(value: Any) -> bool:
    """Whether it is a nested tensor."""
    return isinstance(value, Tensor) and value.is_nested


def any_nested(values: Sequence[Any]) -> bool:
    """Whether some of them are; asked of every operation, so without a call a value."""
    for value in values:  # noqa: SIM110
        if isinstance(value, Tensor) and value.is_nested:
            return True
    return False
