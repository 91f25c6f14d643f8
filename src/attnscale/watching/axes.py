"""Axes: find which axes of a softmax's input hold keys, queries, heads and batch entries.

Each axis is identified by moving one step along it and following that to the product. So any order and any merging of
axes is understood, and `k @ qᵀ` as well as `q @ kᵀ`.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.numerics import wide_dtype
from attnscale.tracing.coordinates import NOWHERE, Indices, Points, grid
from attnscale.tracing.following import ProjectionPath, Trace, channels, follow, projection_path, row_of_parameter
from attnscale.tracing.lineage import Node
from attnscale.tracing.parameters import Origin
from attnscale.tracing.roles import Product
from attnscale.watching.gradients import key_owners_of


@dataclass(frozen=True)
class ProductPoints:
    """Coordinates in the product of points of the softmax's input; −1 for a point outside the product."""

    at: Points  # (points, rank of the product)
    factor: NDArray[np.float64]
    shift: NDArray[np.float64]
    traces: list[Trace]

    @property
    def are_found(self) -> NDArray[np.bool_]:
        """True for points that are elements of the product."""
        return np.asarray((self.at != NOWHERE).all(1))


def points_in_product(node: Node, points: Points, product: Product) -> ProductPoints:
    """Follow points of the softmax's input to the product."""
    at = np.full((len(points), len(product.shape)), NOWHERE, dtype=np.int64)
    factor, shift = np.ones(len(points)), np.zeros(len(points))
    traces = [trace for trace in follow(node, points, product) if product.made(trace.node)]
    for trace in traces:
        at[trace.index], factor[trace.index], shift[trace.index] = trace.points, trace.factor, trace.shift
    return ProductPoints(at, factor, shift, traces)


@dataclass(frozen=True)
class Axes:
    """Meaning of each axis of a softmax's input."""

    product: Product
    node: Node  # the softmax's input, with merged axes split
    shape: tuple[int, ...]
    key_axis: int
    query_axes: tuple[int, ...]
    other_axes: tuple[int, ...]
    keys_are_right: bool  # the keys are the columns of the product, as in q @ kᵀ
    columns: Indices  # index of each key in the product; −1 for a sink
    groups: Indices  # (batch, heads): flat index, over the other axes, of each head of each entry
    owners: Indices  # (heads): number of the key head of each query head; copies share a number
    first_row: tuple[object, ...] = ()  # parameter row that makes the first head's query
    over_pairs: bool = False  # the softmax runs over queries and keys at once
    between_channels: bool = False  # the product sums over positions: channels attend to channels

    @property
    def kv_heads(self) -> int:
        return int(self.owners.max()) + 1

    @property
    def length(self) -> int:
        return int(np.prod([self.shape[axis] for axis in self.query_axes], dtype=np.int64))

    @property
    def first_key(self) -> int:
        """Index of the first key that is an element of the product."""
        return int(np.argmax(self.columns != NOWHERE))

    def rows(self, groups: Indices, positions: Indices) -> Points:
        """Return the points of these queries at the first key, (groups · positions, rank)."""
        points = np.zeros((len(groups), len(positions), len(self.shape)), dtype=np.int64)
        for axis, index in _unravelled(groups, self.other_axes, self.shape):
            points[:, :, axis] = index[:, None]
        for axis, index in _unravelled(positions, self.query_axes, self.shape):
            points[:, :, axis] = index[None, :]
        points[:, :, self.key_axis] = self.first_key
        return points.reshape(-1, len(self.shape))

    def operand_points(self, at: Points, queries: bool) -> Points:
        """Return the first feature of the query, or key, behind these elements of the product."""
        points = at.copy()
        points[:, -1 if queries == self.keys_are_right else -2] = 0
        return points

    def operand_node(self, queries: bool) -> Node:
        """Return the node of the queries, or of the keys."""
        return self.product.left_node if queries == self.keys_are_right else self.product.right_node


def find_axes(product: Product, node: Node, axis: int) -> Axes | None:
    """Return the axes of a softmax's input, which the softmax reduces over `axis`; None if it cannot be followed."""
    shape, rank = node.shape, len(node.shape)
    if not all(shape):
        return None
    along = np.zeros((shape[axis], rank), dtype=np.int64)
    along[:, axis] = np.arange(shape[axis])
    keys = points_in_product(node, along, product)
    if not keys.are_found.any():
        return None
    key_place = _key_place(keys.at[keys.are_found])
    first = along[np.argmax(keys.are_found)]
    query_place = -1 if key_place == -2 else -2
    between_channels = _sums_over_positions(product)
    query_axes, other_axes = [], []
    others = [other for other in range(rank) if other != axis and shape[other] > 1]
    for other, at in zip(others, _ends_along(product, node, first, others), strict=True):
        start, near, far = at
        if near[query_place] == start[query_place] or (
            not between_channels and _is_another_head(product, at[:2], query_place)
        ):
            other_axes.append(other)
        elif len(start) == 3 and far[0] != start[0] and shape[other] > product.shape[query_place]:
            return None  # heads and queries in one axis
        else:
            query_axes.append(other)
    columns = keys.at[:, key_place]
    bare = Axes(
        product, node, shape, axis, tuple(query_axes), tuple(other_axes), key_place != -2, columns, grid(1), grid(1)[0],
        over_pairs=_repeats_a_key(keys.at[keys.are_found], key_place), between_channels=between_channels,
    )  # fmt: skip
    return _with_heads(bare)


def _ends_along(product: Product, node: Node, first: Indices, axes: list[int]) -> Points:
    """Return the coordinates in the product of a point, and of its next and last neighbour along each of these axes."""
    steps = np.tile(first, (len(axes), 3, 1))
    for ends, axis in zip(steps, axes, strict=True):
        ends[1:, axis] += 1, node.shape[axis] - 1
    return points_in_product(node, steps.reshape(-1, len(first)), product).at.reshape(len(axes), 3, len(product.shape))


def _key_place(at: Points) -> int:
    """Return the axis of the product that holds keys: −1 for columns, −2 for rows."""
    moves = (at != at[0]).any(0)
    return -1 if moves[-1] or not moves.any() else -2 if moves[-2] else -1


def _repeats_a_key(at: Points, key_place: int) -> bool:
    """Return True if the softmax covers a key several times, each time with another query."""
    if (np.diff(at[:, key_place]) > 0).all():
        return False
    keys = np.delete(at, len(at[0]) + (-1 if key_place == -2 else -2), axis=1)
    return len(np.unique(keys, axis=0)) < len(np.unique(at, axis=0))


def _sums_over_positions(product: Product) -> bool:
    """Return True if the product sums over positions: its summed axis stays within one output of a projection."""
    node = product.left_node
    if node.shape[-1] < 2 or node.shape[-2] < 2:
        return False
    points = np.zeros((3, len(node.shape)), dtype=np.int64)
    points[1, -1], points[2, -2] = 1, 1
    first, summed, row = channels(node, points)
    return first != () and first == summed and first != row


def _is_another_head(product: Product, at: Points, query_place: int) -> bool:
    points = at.copy()
    points[:, -1 if query_place == -2 else -2] = 0
    first, second = channels(product.left_node if query_place == -2 else product.right_node, points)
    return first != second


def _with_heads(bare: Axes) -> Axes | None:
    count = int(np.prod([bare.shape[axis] for axis in bare.other_axes], dtype=np.int64))
    at = points_in_product(bare.node, bare.rows(np.arange(count), np.zeros(1, dtype=np.int64)), bare.product)
    if not at.are_found.all():
        return None
    query = channels(bare.operand_node(queries=True), bare.operand_points(at.at, queries=True))
    groups = _by_head(query, bare)
    first_row = row_of_parameter(query[groups[0, 0]])
    return replace(bare, groups=groups, owners=_owners(bare, at.at[groups[0]]), first_row=first_row)


def _owners(axes: Axes, at: Points) -> Indices:
    points = np.concatenate([at, at])
    for column, end in ((axes.first_key, slice(len(at))), (-1, slice(len(at), None))):
        points[end, -1 if axes.keys_are_right else -2] = max(axes.columns[column], 0)
    keys = channels(axes.operand_node(queries=False), axes.operand_points(points, queries=False))
    return key_owners_of((keys[: len(at)], keys[len(at) :]), np.arange(len(at)))


def _by_head(keys: list[tuple[object, ...]], axes: Axes) -> Indices:
    """Return group numbers as (batch, heads): groups made by one channel are one head in several batch entries."""
    sizes = [axes.shape[axis] for axis in axes.other_axes]
    order: dict[tuple[object, ...], list[int]] = {}
    for group, key in enumerate(keys):
        order.setdefault(key, []).append(group)
    members = list(order.values())
    if len({len(member) for member in members}) == 1:
        return np.array(members).T
    return np.arange(len(keys)).reshape(-1, sizes[-1] if sizes else 1)  # irregular: assume heads on the last axis


def _unravelled(index: Indices, axes: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, Indices]]:
    parts = np.unravel_index(index, [shape[axis] for axis in axes]) if axes else ()
    return list(zip(axes, (np.asarray(part) for part in parts), strict=True))


@dataclass(frozen=True)
class Operands:
    """Both operands of a product at some rows: `groups` are flat indices of heads, `positions` are queries."""

    axes: Axes
    groups: Indices
    positions: Indices
    product_points: ProductPoints

    @classmethod
    def of(cls, axes: Axes, groups: Indices, positions: Indices) -> "Operands":
        """Follow these rows to the product."""
        return cls(axes, groups, positions, points_in_product(axes.node, axes.rows(groups, positions), axes.product))

    @property
    def multiplier(self) -> NDArray[np.float64]:
        """Factor between the product and the softmax, (groups, rows)."""
        return self._by_group(self.product_points.factor) * self.axes.product.alpha

    @property
    def shift(self) -> NDArray[np.float64]:
        """Number that the model subtracted from each row, usually its maximum, (groups, rows)."""
        return self._by_group(self.product_points.shift)

    def _by_group(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values.reshape(len(self.groups), len(self.positions))

    def path(self, queries: bool) -> ProjectionPath:
        """Return the operations on queries, or keys, since their projection; factors are (groups, rows)."""
        points = self.axes.operand_points(self.product_points.at, queries)
        found = projection_path(follow(self.axes.operand_node(queries), points), len(points))
        return found._replace(factor=self._by_group(found.factor))

    def origin(self, queries: bool) -> Origin:
        """Return the origin of these queries, or of the first and last two keys; groups are of one batch entry."""
        axes, rows = self.axes, len(self.positions)
        node, axis = axes.operand_node(queries), -1 if queries == axes.keys_are_right else -2
        if queries:
            at = np.concatenate([self.product_points.at[::rows], self.product_points.at[rows - 1 :: rows]])
        else:
            shown = axes.columns[axes.columns != NOWHERE]
            ends = np.unique(np.clip([0, 1, len(shown) - 2, len(shown) - 1], 0, len(shown) - 1))
            at = np.concatenate([self.product_points.at[::rows]] * len(ends))
            at[:, -1 if axes.keys_are_right else -2] = np.repeat(shown[ends], len(self.groups))
        return Origin(node, axes.operand_points(at, queries), len(self.groups), axis, node.shape[axis])

    def queries(self) -> Tensor:
        """Return the queries in the product, (groups, rows, features)."""
        product, at = self.axes.product, self.product_points.at
        operand, row = (product.left, -2) if self.axes.keys_are_right else (product.right.mT, -1)
        chosen = (
            operand[_on(operand, at[:, row])] if operand.dim() == 2 else operand[_on(operand, at[:, 0], at[:, row])]
        )
        return _wide(chosen).unflatten(0, (len(self.groups), -1))  # type: ignore[no-any-return]

    def keys(self, chosen: Indices | None = None) -> Tensor:
        """Return all or the chosen keys in the product, (groups, keys, features)."""
        product, columns = self.axes.product, self.axes.columns[self.axes.columns != NOWHERE]
        columns = columns if chosen is None else columns[chosen]
        operand = product.right.mT if self.axes.keys_are_right else product.left
        if operand.dim() == 2:
            return _wide(operand[_on(operand, columns)]).expand(len(self.groups), -1, -1)
        entries = self.product_points.at[:: len(self.positions), 0]
        return _wide(operand[_on(operand, entries[:, None], columns[None, :])])

    def predicted(self, softcap: float | None = None) -> Tensor:
        """Return scores predicted from the product, multiplier and soft-cap, without biases: (groups, rows, keys)."""
        scores = self.queries() @ self.keys().mT
        scores = scores * torch.from_numpy(self.multiplier).to(scores).unsqueeze(-1)
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        if scores.shape[-1] == len(self.axes.columns):
            return scores
        whole = scores.new_zeros(*scores.shape[:2], len(self.axes.columns))
        whole[..., torch.from_numpy(self.axes.columns != NOWHERE)] = scores
        return whole


def key_channels(product: Product, node: Node, points: Points) -> list[tuple[object, ...]]:
    """Return the channel of the key at each point of a softmax's input; empty for points outside the product."""
    product_points = points_in_product(node, points, product)
    found: list[tuple[object, ...]] = [()] * len(points)
    at = product_points.at[product_points.are_found]
    at[:, -2] = 0
    for index, key in zip(np.flatnonzero(product_points.are_found), channels(product.right_node, at), strict=True):
        found[index] = key
    return found


def channels_of(product: Product) -> list[tuple[object, ...]]:
    """Return the channels of a product's first query and first key."""
    nodes = (product.left_node, product.right_node)
    return [channels(node, np.zeros((1, len(node.shape)), dtype=np.int64))[0] for node in nodes]


def _on(tensor: Tensor, *index: Indices) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(np.ascontiguousarray(part)).to(tensor.device) for part in index)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(wide_dtype(tensor))
