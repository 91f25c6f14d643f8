"""Lineage: which operations made a tensor, as far back as the projection or the product it comes from.

Nodes hold shapes and small operands, not activations: watching keeps nothing alive that the model let go of, but the
two operands of a product until its softmax.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from attnscale.tracing.coordinates import NOWHERE, Map, Points, Shape, broadcast

if TYPE_CHECKING:
    from attnscale.tracing.operations.products import Product
    from attnscale.tracing.operations.softmaxes import Softmax

LONGEST = 200  # operations between a projection and its use; a residual stream is longer, and leads nowhere


@dataclass(frozen=True)
class View:
    """How what is written to a view reaches the tensor it is a view of."""

    forth: Map  # from a point of the whole to a point of the view
    whole: TensorWeakRef


@dataclass(slots=True, eq=False)
class Step:
    """One operation, looked at from its result: the operand to follow, and what was done to it.

    `effect` is what happens to the value: "same", "times" or "over" an operand, "plus" an operand, "shift" (a statistic
    of its own row was subtracted), "fill" (some elements were replaced), "tanh", "norm" (its length was divided out),
    or "other".
    """

    parent: "Node"
    back: Map | None = None  # None: same coordinates
    effect: str = "same"
    operand: float | Tensor | None = None
    view: "View | None" = None  # the result shares the operand's memory
    other_scores: "Node | None" = None  # what was added, where that is an image of another product
    added: "Node | None" = None  # to the value; after a normalisation, its own bias
    multiplied: "Node | None" = None  # with the value; after a normalisation, its own gain


@dataclass(slots=True, eq=False)
class Node:
    """A tensor's place in the lineage."""

    shape: Shape
    steps: tuple[Step, ...] = ()  # several for a concatenation: each holds some of the points
    learned: bool = False  # comes from a projection or a product, not from inputs, masks and tables alone
    parameter: bool = False  # comes from parameters alone
    name: str | None = None  # is this parameter of the model
    depth: int = 0
    used: bool = False  # another operation took it
    projection: "Projection | None" = None  # is the result of one
    scores: "Product | None" = None  # an elementwise image of this product
    about: "Product | None" = None  # any function of it, its row maximum for instance
    exponent: "Node | None" = None  # the exponential of this node, masked perhaps
    sum_of: "tuple[Node, int] | None" = None  # the sum of the exponential of this node, over this dimension
    log_sum_axis: int | None = None  # the logarithm of the sum of exponentials over this dimension
    log_softmax_axis: int | None = None  # scores less that: the logarithm of a softmax
    outer: tuple[Tensor, Tensor] | None = None  # every pair of elements of these two, multiplied
    mixed_by_powers: "tuple[Node, Tensor] | None" = None  # values, summed with these exponentials
    weights: "Softmax | None" = None  # an elementwise image of the output of this softmax
    log_weights: "Softmax | None" = None  # the logarithm of the output of this softmax
    lost: str = ""  # the output of a softmax that was not followed to a product, in this module
    mixed: "Softmax | None" = None  # the values, summed with the weights of this softmax


@dataclass(frozen=True, eq=False)
class Projection:
    """Activations times a parameter: where queries and keys begin."""

    weight: Node
    channel: Map  # from a point of the result to the point of the weight that made it
    width: int  # features going in
    inputs: tuple[int, ...]  # the axes of the weight that are summed over
    bias: Node | None = None


@dataclass(slots=True)
class Trail:
    """Points followed back to one node, and what was done to their values on the way."""

    node: Node
    index: NDArray[np.int64]  # which of the points asked for
    points: Points
    factor: NDArray[np.float64]
    shift: NDArray[np.float64]  # what the row's own statistics subtracted, undone
    counting: bool = True  # no normalisation passed yet: factors count
    constant: bool = True  # the factors are numbers that the code gives, not tensors
    caps: list[float] = field(default_factory=list)  # what each tanh on the way is multiplied by afterwards
    biases: list[tuple[Tensor, float]] = field(default_factory=list)  # added operands, and the factor that follows
    fills: list[float] = field(default_factory=list)  # what replaces hidden elements
    added: bool = False  # something was added, a bias or another product
    other_scores: "list[tuple[Node, float]]" = field(default_factory=list)  # of the products added, with their factors
    normalised: bool = False
    blended: bool = False  # passed an operation whose effect on the value is not known


class Ledger:
    """Tensors of the running model -> their nodes, for as long as the tensors live."""

    def __init__(self, name_of: Callable[[Tensor], str | None] = lambda tensor: None) -> None:
        self._name_of = name_of
        self._nodes: dict[int, tuple[weakref.ref[Tensor], Node]] = {}

    def node(self, tensor: Tensor) -> Node:
        """The node of a tensor; one never seen begins a lineage."""
        node = self.known(tensor)
        if node is None:
            name = self._name_of(tensor)
            is_parameter = name is not None or isinstance(tensor, nn.Parameter)
            node = Node(shape_of(tensor), parameter=is_parameter, name=name)
            self.write(tensor, node)
        return node

    def known(self, tensor: Tensor) -> Node | None:
        """The node of a tensor seen before."""
        entry = self._nodes.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def write(self, tensor: Tensor, node: Node) -> None:
        """Note what a tensor is now."""
        key, nodes = id(tensor), self._nodes

        def forget(gone: weakref.ref[Tensor]) -> None:
            if key in nodes and nodes[key][0] is gone:
                del nodes[key]

        nodes[key] = (weakref.ref(tensor, forget), node)

    def write_through(self, view: Node, written: Node) -> None:
        """A view was written to: what it is a view of now holds what was written, and elsewhere what it held."""
        while len(view.steps) == 1 and (link := view.steps[0].view) is not None:
            view, tensor = view.steps[0].parent, link.whole()
            held = view if tensor is None else self.node(tensor)
            if max(written.depth, held.depth) >= LONGEST:
                return
            written = Node(
                held.shape,
                steps=(Step(written, link.forth), Step(held)),
                learned=held.learned or written.learned,
                depth=1 + max(written.depth, held.depth),
                scores=written.scores or held.scores,
                about=written.about or held.about,
            )
            if tensor is not None:
                self.write(tensor, written)


def shape_of(tensor: Tensor) -> Shape:
    """The shape; nested tensors have none."""
    return () if tensor.is_nested else tuple(tensor.shape)


def follow(node: Node, points: Points, product: "Product | None" = None) -> list[Trail]:
    """Follow points of a node back to where their lineage begins, or to the product they are an image of."""
    whole = np.arange(len(points))
    trails = [Trail(node, whole, points, np.ones(len(points)), np.zeros(len(points)))]
    ends = []
    while trails:
        trail = trails.pop()
        while trail.node.steps and not (product is not None and trail.node.scores is not product):
            if len(trail.node.steps) > 1:
                trails += _split(trail)
                break
            _walk(trail, trail.node.steps[0], product)
        else:
            ends.append(trail)
    return ends


def _split(trail: Trail) -> Iterable[Trail]:
    left = np.ones(len(trail.points), dtype=bool)
    for step in trail.node.steps:
        points = trail.points if step.back is None else step.back(trail.points)
        held = (points != NOWHERE).all(1) & left
        left &= ~held
        if held.any():
            yield replace(
                trail,
                node=step.parent,
                index=trail.index[held],
                points=points[held],
                factor=trail.factor[held],
                shift=trail.shift[held],
                caps=list(trail.caps),
                biases=list(trail.biases),
                fills=list(trail.fills),
                other_scores=list(trail.other_scores),
            )


def _walk(trail: Trail, step: Step, product: "Product | None") -> None:
    if step.effect in ("times", "over") and trail.counting:
        factor = values_at(step.operand, trail.points)
        trail.constant = trail.constant and not isinstance(step.operand, Tensor)
        trail.factor = trail.factor * (factor if step.effect == "times" else 1.0 / factor)
    elif step.effect == "plus":
        trail.added = True
        if step.other_scores is not None:
            trail.other_scores.append((step.other_scores, float(np.mean(trail.factor))))
        if isinstance(step.operand, Tensor):
            trail.biases.append((step.operand, float(np.mean(trail.factor))))
    elif step.effect == "fill":
        trail.fills.append(float(np.mean(trail.factor)) * float(step.operand or 0.0))
    elif step.effect == "shift":
        trail.shift = trail.shift + trail.factor * values_at(step.operand, trail.points)
    elif step.effect == "tanh":
        trail.caps.append(float(np.mean(trail.factor)))
    elif step.effect == "norm":
        trail.counting, trail.normalised = False, True
    elif step.effect == "other":
        trail.blended = True
    points = trail.points if step.back is None else step.back(trail.points)
    held = (points != NOWHERE).all(1)
    if not held.all():
        trail.index, trail.factor, trail.shift = trail.index[held], trail.factor[held], trail.shift[held]
        points = points[held]
    trail.node, trail.points = step.parent, points


def values_at(operand: float | Tensor | None, points: Points) -> NDArray[np.float64]:
    """The values of a number, or of a tensor that broadcasts, at these points."""
    if not isinstance(operand, Tensor):
        return np.full(len(points), 1.0 if operand is None else float(operand))
    if operand.numel() == 1:
        return np.full(len(points), float(operand.detach()))
    at = broadcast(tuple(operand.shape), points.shape[1])(points)
    index = tuple(torch.from_numpy(column.copy()).to(operand.device) for column in at.T)
    return operand.detach()[index].double().cpu().numpy()
