"""Rows of the parameters that make the queries, or the keys, of each head: multiply those, and you multiply these.

From a query back to its projection every step must let a factor through: what moves elements, multiplies or adds does,
where what is added takes the factor too. A normalisation does not, so behind one the gain stands for the weight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attnscale.tracing.coordinates import NOWHERE, Indices, Points, Shape, broadcast
from attnscale.tracing.following import follow, parts_of
from attnscale.tracing.lineage import Node, Projection, Step, moved
from attnscale.tracing.roles import Scores


class UntraceableError(Exception):
    """No parameters whose multiples are multiples of the queries, or keys; the message says why."""


@dataclass(frozen=True)
class Source:
    """A parameter that takes part in the queries or keys: row `rows[i]` of it, in feature `features[i]` of a head.

    A row is what makes one feature: all elements along the axes `across`, which the projection sums over. Rows are
    counted over the other axes, in order.
    """

    parameter: str
    shape: Shape
    across: tuple[int, ...]
    heads: Indices
    features: Indices
    rows: Indices
    offset: float = 0.0  # the values count with this added: Gemma's gain is 1 + weight


@dataclass(frozen=True)
class Origin:
    """Queries or keys at some positions of one batch entry, to be followed to the parameters that made them."""

    node: Node
    points: Points  # (positions · heads, rank): the first feature of each
    heads: int
    axis: int  # along which the features lie
    features: int
    known: "tuple[Source, ...] | UntraceableError | None" = None

    def sources(self) -> tuple[Source, ...]:
        """Return everything that must be multiplied for the queries, or keys, to be multiplied."""
        if isinstance(self.known, UntraceableError):
            raise UntraceableError(*self.known.args)  # another: this one would hold the frames that raise it
        if self.known is not None:
            return self.known
        points = np.repeat(self.points, self.features, axis=0)
        points[:, self.axis] = np.tile(np.arange(self.features), len(self.points))
        found: dict[tuple[object, ...], list[_Part]] = {}
        for part in _parts(self.node, np.arange(len(points)), points):
            found.setdefault((part.name, part.across, part.offset), []).append(part)
        sources = tuple(self._source(parts) for parts in found.values())
        _check_rows(sources)
        self._check_positions(list(found.values()))
        return sources

    def _check_positions(self, found: "list[list[_Part]]") -> None:
        """Refuse values that a parameter holds for each position, of which most were not looked at."""
        size, known = self.heads * self.features, dict[str, list[bytes]]()
        for parts in (parts for parts in found if not parts[0].across):
            for position in range(len(self.points) // self.heads):
                here = [part.only(part.index // size == position) for part in parts]
                if any(len(part.index) for part in here):
                    source = self._source(here)
                    rows = [each.tobytes() for each in (source.heads, source.features, source.rows)]
                    if known.setdefault(source.parameter, rows) != rows:
                        raise UntraceableError(f"{source.parameter} makes them, and differs from position to position")

    def resolved(self) -> "Origin":
        """Return an origin that knows its sources and has let go of the lineage."""
        try:
            sources: tuple[Source, ...] | UntraceableError = self.sources()
        except UntraceableError as error:
            sources = error.with_traceback(None)  # its frames hold the lineage
        return replace(self, node=Node(self.node.shape), points=self.points[:0], known=sources)

    def amplitude(self) -> float:
        """Return what rotations multiply these by, the furthest from one of first and last features; NaN: no rotation.

        Some models rotate the last features of a head only.
        """
        last = self.points.copy()
        last[:, self.axis] += self.features - 1
        traces = follow(self.node, np.concatenate([self.points, last])) if len(self.points) else []
        found = [trace.amplitude for trace in traces if trace.amplitude is not None]
        return max(found, key=lambda amplitude: abs(amplitude - 1), default=math.nan)

    def _source(self, parts: "list[_Part]") -> Source:
        part, at, index = parts[0], np.concatenate([p.at for p in parts]), np.concatenate([p.index for p in parts])
        kept = [axis for axis in range(len(part.shape)) if axis not in part.across]
        rows = (
            np.ravel_multi_index(tuple(at[:, kept].T), tuple(part.shape[axis] for axis in kept)) if kept else at[:, 0]
        )
        places = np.stack([index // self.features % self.heads, index % self.features, rows], axis=1)
        heads, features, rows = np.unique(places, axis=0).T
        return Source(part.name, part.shape, part.across, heads, features, rows, part.offset)


def projected_origin(weight: Node, bias: Node | None, first: int, heads: int, features: int) -> Origin:
    """Return the origin of queries, or keys, that a kernel projects inside by rows of its weight from `first` on."""
    shape = (heads, features)

    def row(at: Points) -> Points:
        rows: Points = first + at @ np.array([[features], [1]])
        return rows

    part = None if bias is None else moved(bias, shape, row)
    projection = Projection(weight, lambda at: row(at) * np.array([1, 0]), weight.shape[1], (1,), part)
    points = np.stack([np.arange(heads), np.zeros(heads, dtype=np.int64)], axis=1)
    return Origin(Node(shape, learned=True, projection=projection), points, heads, axis=1, features=features)


def sampled_origin(node: Node, axis: int) -> Origin | None:
    """Return the origin of values (…, positions, features): of the first and last head, at the first position."""
    if len(node.shape) < 2 or not all(node.shape):
        return None
    ends = np.zeros((2, len(node.shape)), dtype=np.int64)
    ends[1, :-2] = np.array(node.shape[:-2]) - 1
    return released(Origin(node, ends, heads=2, axis=axis, features=node.shape[axis]))


def released(origin: Origin) -> Origin:
    """Resolve an origin now where its lineage holds activations; else when it is asked for."""
    return origin.resolved() if isinstance(origin.node.role, Scores) else origin


@dataclass
class Origins:
    """Origins of the queries, keys and values of one attention; None where there is nothing to follow."""

    query: Origin | None = None
    key: Origin | None = None
    value: Origin | None = None


@dataclass(frozen=True)
class _Part:
    """Points `index` of those asked for, found in a parameter."""

    name: str
    shape: Shape
    index: Indices
    at: Points
    across: tuple[int, ...] = ()
    offset: float = 0.0
    factor: float = 1.0  # of parameter and offset; NaN: not one number

    def only(self, chosen: NDArray[np.bool_]) -> "_Part":
        """Return the part with the chosen points."""
        return replace(self, index=self.index[chosen], at=self.at[chosen])


def _parts(node: Node, index: Indices, points: Points) -> list[_Part]:
    if not len(points):
        return []
    if not node.steps:
        return _beginning(node, index, points)
    if len(node.steps) > 1:
        found = parts_of(node.steps, points)
        return [part for step, held, at in found for part in _parts(step.parent, index[held], at)]
    step = node.steps[0]
    if step.effect == "norm":
        return _gains(step, index, points)
    if step.effect in ("tanh", "exp", "shift") or (step.effect == "other" and step.multiplied is None):
        raise UntraceableError("they pass an operation through which a factor does not go")
    if step.multiplied is not None and step.multiplied.learned:
        raise UntraceableError("they are multiplied by activations")
    if step.multiplied is not None and step.multiplied.parameter:
        if not node.learned:  # a weight that is a direction times its length: its length
            return _operand(step.multiplied, index, points)
        try:
            return _through(step, index, points)
        except UntraceableError:
            return _operand(step.multiplied, index, points)
    return _through(step, index, points)


def _through(step: Step, index: Indices, points: Points) -> list[_Part]:
    at = points if step.back is None else step.back(points)
    held = (at != NOWHERE).all(1)
    found, at = (index, at) if held.all() else (index[held], at[held])
    parts = _parts(step.parent, found, at)
    if step.effect == "pair":  # the imaginary part
        parts += _parts(step.parent, found, at + np.eye(at.shape[1], dtype=np.int64)[-1])
    if step.effect in ("times", "over", "other"):
        factor = step.operand if isinstance(step.operand, float) else math.nan
        parts = [replace(part, factor=part.factor * factor ** (-1 if step.effect == "over" else 1)) for part in parts]
    if step.added is not None:
        return parts + _operand(step.added, index, points)
    if step.effect == "plus":
        added = step.operand if isinstance(step.operand, float) else math.nan
        parts = [replace(part, offset=part.offset + added / part.factor) for part in parts]
    if any(math.isnan(part.offset) or (part.offset and part.across) for part in parts):
        raise UntraceableError("a number is added to them")
    return parts


def _operand(node: Node, index: Indices, points: Points) -> list[_Part]:
    return _parts(node, index, broadcast(node.shape, points.shape[1])(points))


def _gains(step: Step, index: Indices, points: Points) -> list[_Part]:
    if step.multiplied is None:
        raise UntraceableError("they are normalised, and no gain follows")
    bias = [] if step.added is None else _operand(step.added, index, points)
    return _operand(step.multiplied, index, points) + bias


def _beginning(node: Node, index: Indices, points: Points) -> list[_Part]:
    if node.projection is not None:
        return _weight(node.projection, index, points)
    if node.name is None:
        raise UntraceableError("they come from no parameter of the model that could be followed")
    return [_Part(node.name, node.shape, index, points)]


def _weight(projection: Projection, index: Indices, points: Points) -> list[_Part]:
    """Return the rows of a projection's weight and of its bias; the first and last input show where its inputs lie."""
    if projection.weight.learned:
        raise UntraceableError("their projection is no parameter of the model")
    first = projection.channel(points)
    last = first.copy()
    for axis in projection.inputs:
        last[:, axis] = projection.weight.shape[axis] - 1
    found = []
    starts, ends = (_parts(projection.weight, index, at) for at in (first, last))
    for start, end in zip(starts, ends, strict=True):
        across = tuple(int(axis) for axis in (start.at != end.at).any(0).nonzero()[0])
        summed = math.prod(projection.weight.shape[axis] for axis in projection.inputs)
        if start.name != end.name or (across and math.prod(start.shape[axis] for axis in across) != summed):
            raise UntraceableError("their projection is put together of several parameters")
        found.append(replace(start, across=across))
    bias = [] if projection.bias is None else _operand(projection.bias, index, points)
    return found + bias


def _check_rows(sources: Sequence[Source]) -> None:
    """Check that every feature has a row; where some were lost on the way, scaling the others would bend the scores."""
    features: dict[int, set[int]] = {}
    rows: dict[int, set[tuple[str, int]]] = {}
    for source in (source for source in sources if source.across):
        for head, feature, row in zip(
            source.heads.tolist(), source.features.tolist(), source.rows.tolist(), strict=True
        ):
            features.setdefault(head, set()).add(feature)
            rows.setdefault(head, set()).add((source.parameter, row))
    if any(len(rows[head]) < len(features[head]) for head in features):
        raise UntraceableError("not all of their features could be told apart")
