"""Tracer: read the operations of a running model one by one, and call back at every softmax of scores."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from attnscale.tracing import arithmetic, moving, products, softmaxes
from attnscale.tracing.lineage import Lineage, Node, Operation, unknown
from attnscale.tracing.roles import Product, Softmax

# By ATen name: einsum, matmul and `@` arrive as bmm and views, also in inference mode. Later modules override the
# readers of earlier ones, and call them for cases that they do not handle: a sum may belong to a product.
READERS = moving.READERS | arithmetic.READERS | softmaxes.READERS | products.READERS


class OnSoftmax(Protocol):
    """Callback for a softmax, with its input, the input's node and the axis; returns None if no product is found."""

    def __call__(self, scores: Tensor, node: Node, axis: int, by: str = "") -> Softmax | None:
        """`by` is the name of the operation, if the softmax is a single one."""
        ...


class Tracer:
    """Follow tensors from operation to operation, and record where weights of unknown origin mix values.

    `modules` returns the running modules, outermost first.
    """

    def __init__(self, lineage: Lineage, modules: Callable[[], tuple[str, ...]], softmax: OnSoftmax) -> None:
        self.lineage, self.modules, self.softmax = lineage, modules, softmax
        self._not_understood: dict[str, None] = {}  # modules, in order
        self._unnormalised: Counter[str] = Counter()  # mixtures by exponentials that are not divided by their sum yet

    @property
    def module(self) -> str:
        """The module that is running."""
        return self.modules()[-1]

    @property
    def unfollowed(self) -> list[str]:
        """Modules that seem to attend in an unrecognised way."""
        unnormalised = (name for name, times in self._unnormalised.items() if times > 0)
        return list(dict.fromkeys([*self._not_understood, *unnormalised]))

    def note_not_understood(self, module: str) -> None:
        """Record that this module attends in an unrecognised way."""
        self._not_understood[module] = None

    def mix_unnormalised(self, product: Product) -> None:
        """Record that exponentials of these scores mix values before normalisation."""
        self._unnormalised[product.modules[-1]] += 1

    def are_normalised(self, product: Product) -> None:
        """Record that their mixture was divided by their sum."""
        self._unnormalised[product.modules[-1]] -= 1

    def read(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any, is_mutable: bool) -> None:
        """Read an operation that ran."""
        node = READERS.get(name, unknown)(Operation(name, args, kwargs, result, self))
        if not isinstance(node, Node):
            for tensor, its in zip(result, node, strict=False):
                if isinstance(tensor, Tensor) and its is not None:
                    self.lineage.write(tensor, its)
            return
        if is_mutable and isinstance(args[0], Tensor):
            self.lineage.write_through(self.lineage.node(args[0]), node)
        if isinstance(result, Tensor):
            self.lineage.write(result, node)


def is_nested(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_nested
