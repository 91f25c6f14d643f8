"""Tracer: the operations of a running model, read one by one; tells of every softmax of scores."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from attnscale.tracing.lineage import Ledger, Node
from attnscale.tracing.operations import WHOLE, Operation, read
from attnscale.tracing.product import Product
from attnscale.tracing.roles import Softmax


class SeeSoftmax(Protocol):
    """Told of a softmax: its input, the node of it and the axis; None where it cannot be followed to a product."""

    def __call__(self, scores: Tensor, node: Node, axis: int, by: str = "") -> Softmax | None:
        """`by`: the operation that it is, where it is one."""
        ...


class Tracer:
    """Follows tensors from operation to operation, and notes where weights of unknown origin mix values.

    `modules` tells those that are running, outermost first.
    """

    def __init__(self, ledger: Ledger, modules: Callable[[], tuple[str, ...]], softmax: SeeSoftmax) -> None:
        self.ledger, self.modules, self.softmax = ledger, modules, softmax
        self._lost: dict[str, None] = {}  # modules, in order
        self._unnormalised: Counter[str] = Counter()  # times that exponentials mixed values and were not divided yet

    @property
    def module(self) -> str:
        """The module that is running."""
        return self.modules()[-1]

    @property
    def unfollowed(self) -> list[str]:
        """Modules that seem to attend in a way that was not understood."""
        return list(dict.fromkeys([*self._lost, *(name for name, times in self._unnormalised.items() if times > 0)]))

    def loses(self, module: str) -> None:
        """An attention of this module was not followed."""
        self._lost[module] = None

    def mix_unnormalised(self, product: Product) -> None:
        """Exponentials of these scores mix values before they are normalised."""
        self._unnormalised[product.modules[-1]] += 1

    def are_normalised(self, product: Product) -> None:
        """What they mixed was divided by their sum."""
        self._unnormalised[product.modules[-1]] -= 1

    def reads_whole(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether an operation that is made of others, and about to run, is read as one."""
        condition = WHOLE.get(name)
        return condition is not None and condition(self.ledger, args, kwargs)

    def read(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any, is_mutable: bool) -> None:
        """An operation ran."""
        node = read(Operation(name, args, kwargs, result, self))
        if not isinstance(node, Node):
            for tensor, its in zip(result, node, strict=False):
                if isinstance(tensor, Tensor) and its is not None:
                    self.ledger.write(tensor, its)
            return
        if is_mutable and isinstance(args[0], Tensor):
            self.ledger.write_through(self.ledger.node(args[0]), node)
        if isinstance(result, Tensor):
            self.ledger.write(result, node)
