"""Follow points of a tensor back to their projection or product, and record the operations in between."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.tracing.coordinates import NOWHERE, Indices, Points, broadcast
from attnscale.tracing.lineage import Node, Step
from attnscale.tracing.roles import Product, Scores


@dataclass(slots=True)
class Trace:
    """Points followed back to one node, and the operations on their values in between."""

    node: Node
    index: Indices  # indices into the requested points
    points: Points
    factor: NDArray[np.float64]
    shift: NDArray[np.float64]  # statistic of the row that was subtracted, such as its maximum
    counting: bool = True  # factors count, because no normalisation was passed yet
    constant: bool = True  # all factors are numbers in the code, not tensors
    caps: tuple[float, ...] = ()  # for each tanh, the factor that follows it
    biases: tuple[tuple[Tensor, float], ...] = ()  # added operands, each with the factor that follows
    fills: tuple[float, ...] = ()  # values written over hidden elements
    added: bool = False  # something was added, a bias or another product
    other_scores: tuple[tuple[Node, float], ...] = ()  # other products added, with their factors
    normalised: bool = False
    blended: bool = False  # passed an operation with unknown effect on the values
    mixed: bool = False  # passed a projection that sums over heads
    dropped: bool = False  # dropout set some to zero
    detached: bool = False  # no gradient flows further back
    kept: bool = False  # passed a cache
    learned_factor: bool = False  # a parameter of the model is among the factors
    computed_factor: bool = False  # a number computed from activations is among the factors
    learned_terms: int = 0  # added terms other than numbers and tables
    shared_out: bool = False  # one of several terms, multiplied by a learned weight
    after_caps: tuple[float, ...] = ()  # factors that follow a tanh, one by one
    under_cap: tuple[float | Tensor, ...] = ()  # fills and biases applied before a tanh
    amplitude: float | None = None  # of a rotation, √(cos² + sin²); None without rotation
    signed: bool = True  # sign of the factor is valid: no rotation or unknown operation passed

    def keep(self, subset: NDArray[np.bool_], points: Points) -> None:
        """Restrict the trace to a subset of its points, at new coordinates."""
        self.points, self.index = points, self.index[subset]
        self.factor, self.shift = self.factor[subset], self.shift[subset]


def follow(node: Node, points: Points, product: Product | None = None) -> list[Trace]:
    """Follow points back to the start of their lineage, or to `product` if they were computed elementwise from it."""
    whole = np.arange(len(points))
    traces = [Trace(node, whole, points, np.ones(len(points)), np.zeros(len(points)))]
    ends = []
    while traces:
        trace = traces.pop()
        steps = trace.node.steps
        if not steps or (product is not None and _product_of(trace.node) is not product):
            ends.append(trace)
        elif len(steps) == 1:
            _walk(trace, steps[0])
            traces.append(trace)
        else:
            for step, held, at in parts_of(steps, trace.points):
                part = replace(trace, node=step.parent)
                part.keep(held, at)
                traces.append(part)
    return ends


def _product_of(node: Node) -> Product | None:
    """Return the product that this node is an image of."""
    return node.role.of if isinstance(node.role, Scores) else None


def parts_of(steps: Sequence[Step], points: Points) -> Iterator[tuple[Step, NDArray[np.bool_], Points]]:
    """Yield each part of a concatenation that contains points, a mask of these points, and their coordinates in it."""
    left = np.ones(len(points), dtype=bool)
    for step in steps:
        at = points if step.back is None else step.back(points)
        held = (at != NOWHERE).all(1) & left
        left &= ~held
        if held.any():
            yield step, held, at[held]


def _walk(trace: Trace, step: Step) -> None:
    if step.effect in ("times", "over") and trace.counting:
        factor = values_at(step.operand, trace.points)
        factor = factor if step.effect == "times" else 1.0 / factor
        trace.constant = trace.constant and not isinstance(step.operand, Tensor)
        is_learned = step.multiplied is not None and step.multiplied.parameter
        trace.learned_factor |= is_learned
        trace.computed_factor |= step.multiplied is not None and step.multiplied.learned
        trace.shared_out |= is_learned and trace.learned_terms > 0
        trace.factor = trace.factor * factor
        if not trace.caps:
            trace.after_caps += (float(np.mean(factor)),)
    elif step.effect == "plus":
        trace.added = True
        _note_rotation(trace, step)
        trace.learned_terms += 0 if step.added is None else _learned_terms(step.added)
        if step.added is not None and _product_of(step.added) not in (None, _product_of(step.parent)):
            trace.other_scores += ((step.added, float(np.mean(trace.factor))),)
        if isinstance(step.operand, Tensor):
            trace.biases += ((step.operand, float(np.mean(trace.factor))),)
            trace.under_cap += (step.operand,) if trace.caps else ()
    elif step.effect == "fill":
        trace.fills += (float(np.mean(trace.factor)) * float(step.operand or 0.0),)
        trace.under_cap += (float(step.operand or 0.0),) if trace.caps else ()
    elif step.effect == "shift":
        trace.shift = trace.shift + trace.factor * values_at(step.operand, trace.points)
    elif step.effect == "tanh":
        trace.caps += (float(np.mean(trace.factor)),)
    elif step.effect == "norm":
        trace.counting, trace.normalised = False, True
    elif step.effect == "drop":
        trace.dropped = True
    elif step.effect == "detach":
        trace.detached |= not trace.kept
    elif step.effect == "other":
        trace.blended, trace.signed = True, False
        if isinstance(step.operand, Tensor) and step.operand.is_complex():
            trace.amplitude = float(np.abs(values_at(step.operand, trace.points)).mean())
        trace.mixed |= trace.node.projection is not None
    trace.kept |= step.is_cache
    trace.node = step.parent
    if step.back is None:
        return
    trace.points = step.back(trace.points)
    if trace.points.min(initial=0) == NOWHERE:
        held = (trace.points != NOWHERE).all(1)
        trace.keep(held, trace.points[held])


def _note_rotation(trace: Trace, step: Step) -> None:
    """Record the amplitude of x·cos + y·sin if cos and sin are tables."""
    tables = [_table(node) for node in (step.parent, step.added) if node is not None]
    if len(tables) == 2 and tables[0] is not None and tables[1] is not None:
        cos, sin = (values_at(table, trace.points) for table in tables)
        trace.amplitude, trace.signed = float(np.hypot(cos, sin).mean()), False


def _table(node: Node) -> Tensor | None:
    """Return the table in the last elementwise product, which constant factors may follow; None without a table."""
    while len(node.steps) == 1 and node.steps[0].effect in ("same", "times", "over") and node.steps[0].back is None:
        node = node.steps[0].parent
    last = node.steps[0] if len(node.steps) == 1 else None
    return last.operand if last is not None and last.effect == "other" and isinstance(last.operand, Tensor) else None


def _learned_terms(node: Node) -> int:
    terms = int(node.learned)
    while terms and len(node.steps) == 1:
        step = node.steps[0]
        if step.effect == "plus" and step.added is not None and step.added.learned:
            terms += 1
        node = step.parent
    return terms


def values_at(operand: float | Tensor | None, points: Points) -> NDArray[np.float64]:
    """Return the values of a number, or of a tensor that broadcasts, at these points."""
    if not isinstance(operand, Tensor):
        return np.full(len(points), 1.0 if operand is None else float(operand))
    if operand.numel() == 1:
        return np.full(len(points), float(operand.detach()))
    at = broadcast(tuple(operand.shape), points.shape[1])(points)
    index = tuple(torch.from_numpy(column.copy()).to(operand.device) for column in at.T)
    found = operand.detach()[index].cpu()
    return (found.to(torch.complex128) if found.is_complex() else found.double()).numpy()


class ProjectionPath(NamedTuple):
    """Summary of the operations on queries, or keys, since their projection."""

    factor: NDArray[np.float64]  # factor on each point
    normalised: bool
    width: int | None  # width of the projection's input
    constant: bool  # the factors are the same at every step
    learned_factor: bool = False  # a parameter of the model is among the factors
    detached: bool = False  # no gradient reaches the projection
    lost: bool = False  # made from activations by an unrecognised operation instead of a projection
    source: object = None  # token of the projection's input
    shared_out: bool = False  # one of several terms, multiplied by a learned weight
    is_signed: bool = True  # the sign of the factor is known
    computed_factor: bool = False  # a number computed from activations is among the factors

    @property
    def signed_factor(self) -> NDArray[np.float64]:
        """Factor, or its absolute value if the sign is unknown."""
        return self.factor if self.is_signed else np.abs(self.factor)


def projection_path(traces: list[Trace], count: int) -> ProjectionPath:
    """Summarise the traces of `count` points as their path from the projection."""
    factor = np.ones(count)
    for trace in traces:
        factor[trace.index] = trace.factor
    projection = traces[0].node.projection
    sources = {trace.node.token if trace.node.projection is None else trace.node.projection.source for trace in traces}
    return ProjectionPath(
        factor,
        all(trace.normalised for trace in traces),
        None if projection is None else projection.width,
        all(trace.constant for trace in traces),
        any(trace.learned_factor for trace in traces),
        all(trace.detached for trace in traces),
        any(trace.node.learned and trace.node.projection is None and trace.counting for trace in traces),
        sources.pop() if len(sources) == 1 else None,
        any(trace.shared_out for trace in traces),
        all(trace.signed for trace in traces),
        any(trace.computed_factor for trace in traces),
    )


def channels(node: Node, points: Points) -> list[tuple[object, ...]]:
    """Return the projection output behind each point of a query or key, which identifies its head."""
    return channels_along(follow(node, points), len(points))


def channels_along(traces: list[Trace], count: int) -> list[tuple[object, ...]]:
    """Return the projection output behind each of `count` followed points."""
    found: list[tuple[object, ...]] = [()] * count
    for trace in traces:
        for at, channel in zip(trace.index.tolist(), _channels_at(trace.node, trace.points), strict=True):
            found[at] = channel
    return found


def row_of_parameter(channel: tuple[object, ...]) -> tuple[object, ...]:
    """Return the channel if it is a row of a model parameter, which is the same in every forward; otherwise ()."""
    return channel if channel and isinstance(channel[0], str) else ()


def are_outputs_of_one_projection(node: Node, axis: int) -> bool:
    """Return True if neighbours along an axis are two outputs of one projection: logits of classes or of experts."""
    found = _neighbours(node, axis)
    return found is not None and found[0] != found[1]


def are_positions(node: Node, axis: int) -> bool:
    """Return True if neighbours along an axis are the same output of one projection: positions of a sequence."""
    found = _neighbours(node, axis)
    return found is not None and found[0] == found[1]


def _neighbours(node: Node, axis: int) -> list[tuple[object, ...]] | None:
    if node.role is not None or not all(node.shape) or node.shape[axis] < 2:
        return None
    points = np.zeros((2, len(node.shape)), dtype=np.int64)
    points[1, axis] = 1
    traces = follow(node, points)
    if any(trace.node.projection is None for trace in traces) or sum(len(trace.index) for trace in traces) < 2:
        return None
    return channels_along(traces, 2)


def _channels_at(node: Node, points: Points) -> list[tuple[object, ...]]:
    if node.projection is None:  # not projected: heads are a slice of the features, or the third-last axis
        apart = points[:, -3] if points.shape[1] > 3 else np.zeros(len(points), dtype=np.int64)
        return [(id(node), int(feature), int(head)) for feature, head in zip(points[:, -1], apart, strict=True)]
    keys: list[tuple[object, ...]] = [()] * len(points)
    for trace in follow(node.projection.weight, node.projection.channel(points)):
        for at, row in zip(trace.index.tolist(), trace.points.tolist(), strict=True):
            keys[at] = (trace.node.name or id(trace.node), *row)
    return keys
