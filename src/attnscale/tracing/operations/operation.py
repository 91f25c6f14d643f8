"""One operation of the running model, and the node of a result that holds the elements of its operand."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from attnscale.tracing.coordinates import Map, Shape, broadcast
from attnscale.tracing.lineage import LONGEST, Ledger, Node, Step, shape_of

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


Reader = Callable[[Operation], Result]


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
    main = max(like, key=lambda parent: (parent.scores is not None, parent.learned), default=None)
    if main is not None and main.learned:
        return moved(main, shape, None, "other")
    return Node(
        shape,
        learned=any(parent.learned for parent in parents),
        parameter=bool(parents) and all(parent.parameter for parent in parents),
        about=next((parent.about for parent in parents if parent.about is not None), None),
    )
