"""Lineage: which operations made a tensor, as far back as the projection or the product it comes from.

Nodes hold shapes and small operands, not activations: the lineage keeps nothing alive that the model let go of, except
the two operands of a product until its softmax.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from attnscale.tracing.coordinates import Map, Shape, broadcast
from attnscale.tracing.roles import Effect, Role, Scores, role_of_parts, statistic_of

if TYPE_CHECKING:
    from attnscale.tracing import Tracer

LONGEST = 200  # operations between a projection and its use; a residual stream is longer, and leads nowhere


@dataclass(frozen=True)
class View:
    """The way from a view to the tensor it is a view of, for what is written to the view."""

    forth: Map  # from a point of the whole to a point of the view
    whole: TensorWeakRef


@dataclass(slots=True, eq=False)
class Step:
    """One operation, seen from its result: the operand to follow, and what was done to it.

    `effect` is what happens to the value: "same", "detach" (no gradient goes back), "drop" (some are zero at random),
    "times" or "over" an operand, "plus" an operand, "shift" (a statistic of its own row was subtracted), "fill" (some
    elements were replaced), "tanh", "exp", "norm" (its length was divided out), "pair" (two became a complex number),
    or "other".
    """

    parent: "Node"
    back: Map | None = None  # None: same coordinates
    effect: Effect = "same"
    operand: float | Tensor | None = None
    view: View | None = None  # the result shares the operand's memory
    other_scores: "Node | None" = None  # what was added, where that is an image of another product
    added: "Node | None" = None  # to the value; after a normalisation, its own bias
    multiplied: "Node | None" = None  # with the value; after a normalisation, its own gain
    is_cache: bool = False  # the result holds what was computed before

    @property
    def only_moves(self) -> bool:
        """True if it moved elements and changed none."""
        return self.effect == "same" and (self.view is not None or self.back is not None) and not self.is_cache


@dataclass(slots=True, eq=False)
class Node:
    """A tensor's place in the lineage."""

    shape: Shape
    steps: tuple[Step, ...] = ()  # several for a concatenation: each holds some of the points
    learned: bool = False  # comes from a projection or a product, not from inputs, masks and tables alone
    parameter: bool = False  # comes from parameters alone
    name: str | None = None  # of the parameter of the model that it is
    depth: int = 0
    used: bool = False  # another operation took it
    projection: "Projection | None" = None  # it is the result of one
    role: Role | None = None  # on the way from a product to mixed values; None: not on it
    token: object = field(default_factory=object)  # identifies it when it is gone

    @property
    def whole(self) -> "Node":
        """The tensor with the same elements that it is a view or a copy of, or itself."""
        node, size = self, math.prod(self.shape)
        while len(node.steps) == 1 and node.steps[0].effect == "same":
            parent = node.steps[0].parent
            if math.prod(parent.shape) != size:
                break
            node = parent
        return node


@dataclass(frozen=True, eq=False)
class Projection:
    """Activations times a parameter: where queries and keys begin."""

    weight: Node
    channel: Map  # from a point of the result to the point of the weight that made it
    width: int  # features going in
    inputs: tuple[int, ...]  # the axes of the weight that are summed over
    bias: Node | None = None
    source: object = None  # the token of the activations


def moved(
    parent: Node, shape: Shape, back: Map | None, effect: Effect = "same", operand: float | Tensor | None = None
) -> Node:
    """Return the node of a result that holds the elements of its parent, elsewhere or changed one by one."""
    if parent.depth >= LONGEST:
        return Node(shape, learned=parent.learned, parameter=parent.parameter)
    return Node(
        shape,
        steps=(Step(parent, back, effect, operand),),
        learned=parent.learned,
        parameter=parent.parameter,
        depth=parent.depth + 1,
        role=None if parent.role is None else parent.role.after(effect),
    )


def joined(shape: Shape, steps: list[Step]) -> Node:
    """Return the node of a result that is put together of parts."""
    parents = [step.parent for step in steps]
    learned, depth = any(parent.learned for parent in parents), max((parent.depth for parent in parents), default=0)
    if depth >= LONGEST:
        return Node(shape, learned=learned)
    return Node(
        shape,
        steps=tuple(steps),
        learned=learned,
        parameter=all(parent.parameter for parent in parents),
        depth=depth + 1,
        role=role_of_parts(parent.role for parent in parents),
    )


class _Entry(weakref.ref[Tensor]):
    """A weak reference to a tensor, and its node."""

    __slots__ = ("key", "node")
    key: int
    node: Node


class Lineage:
    """The nodes of the tensors of a running model, for as long as the tensors live."""

    def __init__(self, name_of: Callable[[Tensor], str | None] = lambda tensor: None) -> None:
        self._name_of = name_of
        self._entries: dict[int, _Entry] = {}
        lineage = weakref.ref(self)  # which the callback must not keep alive

        def forget(gone: weakref.ref[Tensor]) -> None:
            own = lineage()
            if own is not None and isinstance(gone, _Entry) and own._entries.get(gone.key) is gone:
                del own._entries[gone.key]

        self._forget = forget

    def node(self, tensor: Tensor) -> Node:
        """Return the node of a tensor; one never seen begins a lineage."""
        node = self.known(tensor)
        if node is not None and (node.learned or node.name is not None):
            return node
        name = self._name_of(tensor)  # FSDP2 puts a parameter together by operations, under tensor parallel its part
        if node is None or name is not None:
            is_parameter = name is not None or isinstance(tensor, nn.Parameter)
            node = Node(shape_of(tensor), parameter=is_parameter, name=name)
            self.write(tensor, node)
        return node

    def known(self, tensor: Tensor) -> Node | None:
        """Return the node of a tensor seen before."""
        entry = self._entries.get(id(tensor))
        return entry.node if entry is not None and entry() is tensor else None

    def write(self, tensor: Tensor, node: Node) -> None:
        """Note what a tensor is now."""
        entry = _Entry(tensor, self._forget)
        entry.key, entry.node = id(tensor), node
        self._entries[entry.key] = entry

    def write_through(self, view: Node, written: Node) -> None:
        """Note a write to a view: what it is a view of now holds what was written, and elsewhere what it held."""
        while len(view.steps) == 1 and (link := view.steps[0].view) is not None:
            view, tensor = view.steps[0].parent, link.whole()
            held = view if tensor is None else self.node(tensor)
            if max(written.depth, held.depth) >= LONGEST:
                return
            written = joined(held.shape, [Step(written, link.forth), Step(held)])
            if tensor is not None:
                self.write(tensor, written)


def shape_of(tensor: Tensor) -> Shape:
    """Return the shape; nested tensors have none."""
    return () if tensor.is_nested else tuple(tensor.shape)


Result = Node | Sequence[Node | None]


class Operation:
    """One call of an ATen operation, which has run."""

    __slots__ = ("args", "kwargs", "name", "result", "shape", "tracer")

    def __init__(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any, tracer: "Tracer") -> None:
        self.name = name  # without namespace, overload and the underscore of in-place forms
        self.args, self.kwargs, self.result, self.tracer = args, kwargs, result, tracer
        if not isinstance(result, Tensor):
            result = result[0] if isinstance(result, (tuple, list)) and result else None
        self.shape: Shape = shape_of(result) if isinstance(result, Tensor) else ()  # of the first of several results

    @property
    def lineage(self) -> Lineage:
        """The nodes of the model's tensors."""
        return self.tracer.lineage

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """Return an argument, by position or by name."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)

    def node(self, index: int = 0) -> Node:
        """Return the node of a tensor argument."""
        return self.tracer.lineage.node(self.args[index])

    def nodes(self) -> list[Node]:
        """Return the nodes of all tensor arguments, also of those in lists."""
        flat = [item for arg in self.args for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        return [self.lineage.node(item) for item in flat if isinstance(item, Tensor)]


Reader = Callable[[Operation], Result]


def widened(parent: Node, shape: Shape) -> Map | None:
    """Return the coordinates of an operand that was broadcast to this shape; None: they are the same."""
    return None if parent.shape == shape else broadcast(parent.shape, len(shape))


def unknown(op: Operation) -> Result:
    """Read an operation that nothing is known of."""
    node = opaque(op)
    return [node] if isinstance(op.result, (tuple, list)) else node


def opaque(op: Operation) -> Node:
    """Return a node that takes an operation for elementwise if its result has an operand's shape, else a beginning."""
    shape, parents = op.shape, op.nodes()
    like = [parent for parent in parents if parent.shape == shape]
    main = max(like, key=lambda parent: (isinstance(parent.role, Scores), parent.learned), default=None)
    if main is not None and main.learned:
        return moved(main, shape, None, "other")
    return Node(
        shape,
        learned=any(parent.learned for parent in parents),
        parameter=bool(parents) and all(parent.parameter for parent in parents),
        role=next((role for parent in parents if (role := statistic_of(parent.role)) is not None), None),
    )
