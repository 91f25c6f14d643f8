"""Lineage: the operations that made a tensor, back to its projection or product.

Nodes hold shapes and small operands, not activations. The only activations that a lineage keeps alive are the two
operands of a product, until its softmax.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from attnscale.tracing.coordinates import Map, Shape, broadcast, viewed
from attnscale.tracing.roles import Effect, Role, Scores, role_of_parts, statistic_of

if TYPE_CHECKING:
    from attnscale.tracing import Tracer

LONGEST = 200  # limit on operations between a projection and its use; only residual streams are longer


@dataclass(slots=True, eq=False)
class Step:
    """One operation: the operand to follow from its result, and the effect on the operand.

    `effect` is the change of the value: "same", "detach" (no gradient flows back), "drop" (some are zero at random),
    "times" or "over" an operand, "plus" an operand, "shift" (a statistic of its own row was subtracted), "fill" (some
    elements were replaced), "tanh", "exp", "norm" (its length was divided out), "pair" (two became a complex number),
    or "other".
    """

    parent: "Node"
    back: Map | None = None  # None: same coordinates
    effect: Effect = "same"
    operand: float | Tensor | None = None
    # set for views, to follow writes to them: a map from the operand to the view, and the operand
    view: tuple[Map, TensorWeakRef] | None = None
    added: "Node | None" = None  # node added to the value; for a normalisation, its bias
    multiplied: "Node | None" = None  # node multiplied with it; for a normalisation, its gain
    is_cache: bool = False  # the result contains values of an earlier call

    @property
    def only_moves(self) -> bool:
        """True if the operation moved elements and changed none."""
        return self.effect == "same" and self.back is not None and not self.is_cache


@dataclass(slots=True, eq=False)
class Node:
    """A tensor in the lineage."""

    shape: Shape
    steps: tuple[Step, ...] = ()  # several for a concatenation, one per part
    learned: bool = False  # comes from a projection or a product, not from inputs, masks and tables alone
    parameter: bool = False  # comes from parameters alone
    name: str | None = None  # name of the model parameter, if it is one
    depth: int = 0
    used: bool = False  # another operation read it
    projection: "Projection | None" = None  # set if it is the result of a projection
    role: Role | None = None  # between a product and mixed values; None elsewhere
    token: object = field(default_factory=object)  # identity that outlives the node

    @property
    def whole(self) -> "Node":
        """Earliest node with the same elements, through views and copies."""
        node, size = self, math.prod(self.shape)
        while len(node.steps) == 1 and node.steps[0].effect == "same":
            parent = node.steps[0].parent
            if math.prod(parent.shape) != size:
                break
            node = parent
        return node


@dataclass(frozen=True, eq=False)
class Projection:
    """Activations times a parameter: the start of queries and keys."""

    weight: Node
    channel: Map  # maps points of the result to points of the weight
    width: int  # input features
    inputs: tuple[int, ...]  # axes of the weight that are summed over
    bias: Node | None = None
    source: object = None  # token of the activations


def moved(
    parent: Node, shape: Shape, back: Map | None, effect: Effect = "same", operand: float | Tensor | None = None
) -> Node:
    """Return the node of a result that moves, or changes elementwise, the elements of its parent."""
    role = None if parent.role is None else parent.role.after(effect)
    return _new_node(shape, [Step(parent, back, effect, operand)], role)


def joined(shape: Shape, steps: Sequence[Step]) -> Node:
    """Return the node of a result made of several parts."""
    return _new_node(shape, steps, role_of_parts(step.parent.role for step in steps))


def _new_node(shape: Shape, steps: Sequence[Step], role: Role | None) -> Node:
    parents = [step.parent for step in steps]
    depth = max((parent.depth for parent in parents), default=0)
    node = Node(
        shape,
        learned=any(parent.learned for parent in parents),
        parameter=all(parent.parameter for parent in parents),
    )
    if depth < LONGEST:
        node.steps, node.depth, node.role = tuple(steps), depth + 1, role
    return node


def view_of(parent: Node, name: str, *args: Any) -> Node:
    """Return the node of a view of a tensor that the model does not make itself."""
    shape = tuple(getattr(torch.ops.aten, name)(torch.empty(parent.shape, device="meta"), *args).shape)
    return moved(parent, shape, viewed(name, parent.shape, *args)[0])


class Lineage:
    """Nodes of a running model's tensors, each for the lifetime of its tensor."""

    def __init__(self, name_of: Callable[[Tensor], str | None] = lambda tensor: None) -> None:
        self._name_of = name_of
        self._nodes = WeakTensorKeyDictionary()

    def node(self, tensor: Tensor) -> Node:
        """Return the node of a tensor; a new tensor starts a lineage."""
        node = self.known(tensor)
        if node is not None and (node.learned or node.name is not None):
            return node
        name = self._name_of(tensor)  # operations of FSDP2 make parameters, or their parts under tensor parallelism
        if node is None or name is not None:
            is_parameter = name is not None or isinstance(tensor, nn.Parameter)
            node = Node(shape_of(tensor), parameter=is_parameter, name=name)
            self.write(tensor, node)
        return node

    def known(self, tensor: Tensor) -> Node | None:
        """Return the node of a tensor; None for a new tensor."""
        return self._nodes.get(tensor)  # type: ignore[no-any-return]  # torch's class is untyped

    def write(self, tensor: Tensor, node: Node) -> None:
        """Set the node of a tensor."""
        self._nodes[tensor] = node

    def write_through(self, view: Node, written: Node) -> None:
        """Record a write to a view: its base now holds the written values there, and its old values elsewhere."""
        while len(view.steps) == 1 and (link := view.steps[0].view) is not None:
            forth, whole = link
            view, tensor = view.steps[0].parent, whole()
            old = view if tensor is None else self.node(tensor)
            if max(written.depth, old.depth) >= LONGEST:
                return
            written = joined(old.shape, [Step(written, forth), Step(old)])
            if tensor is not None:
                self.write(tensor, written)


def shape_of(tensor: Tensor) -> Shape:
    """Return the shape; () for nested tensors."""
    return () if tensor.is_nested else tuple(tensor.shape)


Result = Node | Sequence[Node]  # of the first result, or of all


@dataclass(frozen=True)
class Operation:
    """One completed call of an ATen operation."""

    name: str  # without namespace, overload and the underscore of in-place forms
    args: Sequence[Any]
    kwargs: dict[str, Any]
    result: Any
    tracer: "Tracer"

    @property
    def shape(self) -> Shape:
        """Shape of the first result."""
        first = self.result[0] if isinstance(self.result, (tuple, list)) and self.result else self.result
        return shape_of(first) if isinstance(first, Tensor) else ()

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
        """Return the nodes of all tensor arguments, including those in lists."""
        flat = [item for arg in self.args for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        return [self.lineage.node(item) for item in flat if isinstance(item, Tensor)]


Reader = Callable[[Operation], Result]


def widened(parent: Node, shape: Shape) -> Map | None:
    """Return the map of an operand broadcast to this shape; None if the shape is unchanged."""
    return None if parent.shape == shape else broadcast(parent.shape, len(shape))


def opaque(op: Operation) -> Node:
    """Read an operation without a reader of its own: elementwise if shapes match, else a new lineage."""
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
