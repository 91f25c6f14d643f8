"""Find the parameter rows that make each head's queries or keys: scaling these rows scales the queries or keys.

Each operation between a query and its projection must preserve a factor. Moves and products do; a sum does if all its
terms are scaled. A normalisation does not: after it, the rows of its gain are used, not those of the weight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attnscale.tracing.coordinates import NOWHERE, Indices, Points, Shape, broadcast, grid
from attnscale.tracing.following import follow, parts_of
from attnscale.tracing.lineage import Node, Projection, Step, view_of
from attnscale.tracing.roles import Scores


class UntraceableError(Exception):
    """No parameters scale exactly these queries or keys; the message gives the reason."""


@dataclass(frozen=True)
class Source:
    """A parameter that makes queries or keys: its row `rows[i]` makes feature `features[i]` of head `heads[i]`.

    A row holds all elements along the axes `across`, which the projection sums over. Row numbers are flat indices over
    the other axes.
    """

    parameter: str
    shape: Shape
    across: tuple[int, ...]
    heads: Indices
    features: Indices
    rows: Indices
    offset: float = 0.0  # added to the values before use: Gemma's gain is 1 + weight


@dataclass(frozen=True)
class Origin:
    """Queries or keys at some positions of one batch entry, which can be followed to their parameters."""

    node: Node
    points: Points  # (positions · heads, rank): first feature of each vector
    heads: int
    axis: int  # axis of the features
    features: int
    known: tuple[Source, ...] | str | None = None  # sources, or why there are none; None if not computed yet

    def sources(self) -> tuple[Source, ...]:
        """Return all parameter rows that must be scaled together to scale the queries or keys."""
        if isinstance(self.known, str):
            raise UntraceableError(self.known)
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
        """Refuse parameters with different values per position, because only some positions were followed."""
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
        """Return an origin with its sources computed and without reference to the lineage."""
        try:
            sources: tuple[Source, ...] | str = self.sources()
        except UntraceableError as error:
            sources = str(error)
        return replace(self, node=Node(self.node.shape), points=self.points[:0], known=sources)

    def amplitude(self) -> float:
        """Return the amplitude of rotations, √(cos² + sin²); NaN without rotation.

        Of the first and last features, return the amplitude further from one: some models rotate only the last.
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
    """Return the origin of queries or keys projected inside a kernel, by rows of its weight starting at `first`."""

    def by_head(node: Node) -> Node:
        rows = view_of(node, "slice", 0, first, first + heads * features)
        return view_of(rows, "view", [heads, features, *node.shape[1:]])

    part = None if bias is None else by_head(bias)
    projection = Projection(by_head(weight), lambda at: np.pad(at, ((0, 0), (0, 1))), weight.shape[1], (2,), part)
    node = Node((heads, features), learned=True, projection=projection)
    return Origin(node, grid(heads, 1), heads, axis=1, features=features)


def sampled_origin(node: Node, axis: int) -> Origin | None:
    """Return the origin of values (…, positions, features), for the first and last head at the first position."""
    if len(node.shape) < 2 or not all(node.shape):
        return None
    ends = np.zeros((2, len(node.shape)), dtype=np.int64)
    ends[1, :-2] = np.array(node.shape[:-2]) - 1
    return released(Origin(node, ends, heads=2, axis=axis, features=node.shape[axis]))


def released(origin: Origin) -> Origin:
    """Resolve an origin now if its lineage holds activations; other origins are resolved on demand."""
    return origin.resolved() if isinstance(origin.node.role, Scores) else origin


@dataclass
class Origins:
    """Origins of the queries, keys and values of one attention; None if they cannot be followed."""

    query: Origin | None = None
    key: Origin | None = None
    value: Origin | None = None


@dataclass(frozen=True)
class _Part:
    """Points located in a parameter; `index` refers to the requested points."""

    name: str
    shape: Shape
    index: Indices
    at: Points
    across: tuple[int, ...] = ()
    offset: float = 0.0
    factor: float = 1.0  # factor on (parameter + offset); NaN if not a constant

    def only(self, chosen: NDArray[np.bool_]) -> "_Part":
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
        raise UntraceableError("they pass an operation that does not preserve a factor")
    if step.multiplied is not None and step.multiplied.learned:
        raise UntraceableError("they are multiplied by activations")
    if step.multiplied is not None and step.multiplied.parameter:
        if not node.learned:  # weight normalisation: scale the length, not the direction
            return _operand(step.multiplied, index, points)
        try:
            return _through(step, index, points)
        except UntraceableError:
            return _operand(step.multiplied, index, points)
    return _through(step, index, points)


def _through(step: Step, index: Indices, points: Points) -> list[_Part]:
    at = points if step.back is None else step.back(points)
    inside = (at != NOWHERE).all(1)
    found, at = (index, at) if inside.all() else (index[inside], at[inside])
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
        raise UntraceableError("they are normalised, and the normalisation has no gain")
    bias = [] if step.added is None else _operand(step.added, index, points)
    return _operand(step.multiplied, index, points) + bias


def _beginning(node: Node, index: Indices, points: Points) -> list[_Part]:
    if node.projection is not None:
        return _weight(node.projection, index, points)
    if node.name is None:
        raise UntraceableError("they come from no parameter of the model that could be followed")
    return [_Part(node.name, node.shape, index, points)]


def _weight(projection: Projection, index: Indices, points: Points) -> list[_Part]:
    """Return the rows of a projection's weight and bias; the first and last input show which axes are inputs."""
    if projection.weight.learned:
        raise UntraceableError("the weight of their projection is not a parameter of the model")
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
            raise UntraceableError("their projection combines several parameters")
        found.append(replace(start, across=across))
    bias = [] if projection.bias is None else _operand(projection.bias, index, points)
    return found + bias


def _check_rows(sources: Sequence[Source]) -> None:
    """Check that every feature has a row of its own; scaling only some features would distort the scores."""
    features: dict[int, set[int]] = {}
    rows: dict[int, set[tuple[str, int]]] = {}
    for source in (source for source in sources if source.across):
        for head, feature, row in zip(
            source.heads.tolist(), source.features.tolist(), source.rows.tolist(), strict=True
        ):
            features.setdefault(head, set()).add(feature)
            rows.setdefault(head, set()).add((source.parameter, row))
    if any(len(rows[head]) < len(features[head]) for head in features):
        raise UntraceableError("some of their features could not be matched to a row of a parameter")
