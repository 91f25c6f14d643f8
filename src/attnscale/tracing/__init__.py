"""Tracer: read the operations of a running model one by one, and call back at every softmax of scores."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from attnscale.tracing import arithmetic, moving, products, softmaxes
from attnscale.tracing.lineage import Lineage, Node, Operation, opaque
from attnscale.tracing.roles import Product, Softmax

# By ATen name: einsum, matmul and `@` arrive as bmm and views, also in inference mode. Later modules override the
# readers of earlier ones, and call them for cases that they do not handle: a sum may belong to a product.
READERS = moving.READERS | arithmetic.READERS | softmaxes.READERS | products.READERS


# Callback for a softmax: `(scores, node, axis, by="")`. `node` is the node of the scores. `by` is the name of the
# operation if one operation computes the softmax. It returns None if no product is found.
OnSoftmax = Callable[..., Softmax | None]


class Tracer:
    """Follow tensors from operation to operation, and record where weights of unknown origin mix values.

    `modules` returns the running modules, outermost first.
    """

    def __init__(self, lineage: Lineage, modules: Callable[[], tuple[str, ...]], softmax: OnSoftmax) -> None:
        self.lineage, self.modules, self.softmax = lineage, modules, softmax
        self._not_understood: dict[object, str] = {}  # by module, or by product whose exponentials mixed values

    @property
    def module(self) -> str:
        """The module that is running."""
        return self.modules()[-1]

    @property
    def unfollowed(self) -> list[str]:
        """Modules that seem to attend in an unrecognised way."""
        return list(dict.fromkeys(self._not_understood.values()))

    def note_not_understood(self, module: str) -> None:
        """Record that this module attends in an unrecognised way."""
        self._not_understood[module] = module

    def mix_unnormalised(self, product: Product) -> None:
        """Record that exponentials of these scores mix values before normalisation."""
        self._not_understood[product.token] = product.modules[-1]

    def are_normalised(self, product: Product) -> None:
        """Record that the values mixed by exponentials of these scores were divided by the sum of the exponentials."""
        self._not_understood.pop(product.token, None)

    def read(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any, is_mutable: bool) -> None:
        """Read an operation that ran."""
        found = READERS.get(name, opaque)(Operation(name, args, kwargs, result, self))
        nodes = [found] if isinstance(found, Node) else found
        if is_mutable and isinstance(args[0], Tensor):
            self.lineage.write_through(self.lineage.node(args[0]), nodes[0])
        for tensor, node in zip(result if isinstance(result, (tuple, list)) else [result], nodes, strict=False):
            if isinstance(tensor, Tensor):
                self.lineage.write(tensor, node)


def is_nested(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_nested
