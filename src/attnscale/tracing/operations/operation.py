"""One operation of the running model, and the node of a result that cannot be followed any better."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attnscale.tracing.coordinates import Map, Shape, broadcast
from attnscale.tracing.lineage import Ledger, Node, moved, shape_of
from attnscale.tracing.roles import Scores, about

if TYPE_CHECKING:
    from attnscale.tracing.tracer import Tracer

Result = Node | Sequence[Node | None]


class Operation:
    """One call of ATen, done."""

    __slots__ = ("args", "kwargs", "name", "result", "shape", "tracer")

    def __init__(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any, tracer: "Tracer") -> None:
        self.name = name  # without namespace, overload and the underscore of in-place forms
        self.args, self.kwargs, self.result, self.tracer = args, kwargs, result, tracer
        if not isinstance(result, Tensor):
            result = result[0] if isinstance(result, (tuple, list)) and result else None
        self.shape: Shape = shape_of(result) if isinstance(result, Tensor) else ()  # of the first of several results

    @property
    def ledger(self) -> Ledger:
        """Where the nodes of tensors are kept."""
        return self.tracer.ledger

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """An argument, by position or by name."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)

    def node(self, index: int = 0) -> Node:
        """The node of a tensor argument."""
        return self.tracer.ledger.node(self.args[index])

    def nodes(self) -> list[Node]:
        """The nodes of all tensor arguments, of lists of tensors too."""
        flat = [item for arg in self.args for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        return [self.ledger.node(item) for item in flat if isinstance(item, Tensor)]


Reader = Callable[[Operation], Result]


def widened(parent: Node, shape: Shape) -> Map | None:
    """The coordinates of an operand that was broadcast to this shape; None: they are the same."""
    return None if parent.shape == shape else broadcast(parent.shape, len(shape))


def unknown(op: Operation) -> Result:
    """Taken as elementwise where the result has the shape of an operand, else as the beginning of a lineage."""
    node = opaque(op)
    return [node] if isinstance(op.result, (tuple, list)) else node


def opaque(op: Operation) -> Node:
    """The node of a result that cannot be followed any better."""
    shape = op.shape
    parents = op.nodes()
    like = [parent for parent in parents if parent.shape == shape]
    main = max(like, key=lambda parent: (isinstance(parent.role, Scores), parent.learned), default=None)
    if main is not None and main.learned:
        return moved(main, shape, None, "other")
    return Node(
        shape,
        learned=any(parent.learned for parent in parents),
        parameter=bool(parents) and all(parent.parameter for parent in parents),
        role=next((role for parent in parents if (role := about(parent.role)) is not None), None),
    )
