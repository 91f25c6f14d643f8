"""Tracer: reads the operations of a running model one by one, and calls back at every softmax of scores."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from attnscale.tracing import arithmetic, moving, products, softmaxes
from attnscale.tracing.lineage import Lineage, Node, Operation, unknown
from attnscale.tracing.roles import Product, Softmax

# By ATen's names: einsum, matmul and `@` have become bmm and views by then, also in inference mode. The later know
# more of an operation than the earlier, and hand on what they do not: a sum may be that of a product.
READERS = moving.READERS | arithmetic.READERS | softmaxes.READERS | products.READERS


class OnSoftmax(Protocol):
    """Called at a softmax with its input, the node of that, and the axis; None where it is followed to no product."""

    def __call__(self, scores: Tensor, node: Node, axis: int, by: str = "") -> Softmax | None:
        """`by`: the operation that the softmax is, where it is one."""
        ...


class Tracer:
    """Follows tensors from operation to operation, and notes where weights of unknown origin mix values.

    `modules` returns those that are running, outermost first.
    """

    def __init__(self, lineage: Lineage, modules: Callable[[], tuple[str, ...]], softmax: OnSoftmax) -> None:
        self.lineage, self.modules, self.softmax = lineage, modules, softmax
        self._not_understood: dict[str, None] = {}  # modules, in order
        self._unnormalised: Counter[str] = Counter()  # times that exponentials mixed values and were not divided yet

    @property
    def module(self) -> str:
        """The module that is running."""
        return self.modules()[-1]

    @property
    def unfollowed(self) -> list[str]:
        """Modules that seem to attend in a way that was not understood."""
        unnormalised = (name for name, times in self._unnormalised.items() if times > 0)
        return list(dict.fromkeys([*self._not_understood, *unnormalised]))

    def note_not_understood(self, module: str) -> None:
        """Note that this module attends in a way that was not followed."""
        self._not_understood[module] = None

    def mix_unnormalised(self, product: Product) -> None:
        """Note that exponentials of these scores mix values before they are normalised."""
        self._unnormalised[product.modules[-1]] += 1

    def are_normalised(self, product: Product) -> None:
        """Note that what they mixed was divided by their sum."""
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
    """Return True for a nested tensor."""
    return isinstance(value, Tensor) and value.is_nested
