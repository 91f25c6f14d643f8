"""Axes: find which axes of a softmax's input hold keys, queries, heads and batch entries.

Each axis is identified by moving one step along it and following that to the product. So any order and any merging of
axes is understood, and `k @ qᵀ` as well as `q @ kᵀ`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.tracing.coordinates import NOWHERE, Indices, Points
from attnscale.tracing.following import Trace, channels, follow
from attnscale.tracing.lineage import Node, moved
from attnscale.tracing.roles import Product

FIRST = np.zeros(1, dtype=np.int64)


class ProductPoints(NamedTuple):
    """Coordinates in the product of points of the softmax's input; −1 for a point outside the product."""

    at: Points  # (points, rank of the product)
    factor: NDArray[np.float64]
    shift: NDArray[np.float64]  # number that the model subtracted from the row, usually its maximum
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
class Operand:
    """Queries or keys as an operand of the product: vector n of head [b, h] is its row `first[b, h] + step[n]`.

    Rows count through all entries of the operand.
    """

    tensor: Tensor
    lineage: Node
    is_transposed: bool  # (…, features, rows)
    first: Indices  # (batch, heads)
    step: Indices  # (length,)

    @property
    def rows(self) -> int:
        """Rows in each entry."""
        return int(self.tensor.shape[-1 if self.is_transposed else -2])

    def by_head(self, tensor: Tensor) -> Tensor:
        """Return the operand, or its gradient, as (batch, heads, length, features), a view where possible."""
        tensor = tensor.detach().mT if self.is_transposed else tensor.detach()
        index = self.first[..., None] + self.step
        if index.size * tensor.shape[-1] == tensor.numel() and (index.ravel() == np.arange(index.size)).all():
            return tensor.reshape(*index.shape, -1)
        entries, rows = (torch.from_numpy(each).to(tensor.device) for each in np.divmod(index, self.rows))
        return tensor[rows] if tensor.dim() == 2 else tensor[entries, rows]

    def node(self) -> Node:
        """Return the lineage of by_head()."""
        first, step, size, order = self.first, self.step, self.rows, [0, 2, 1] if self.is_transposed else [0, 1, 2]
        rank, features = len(self.lineage.shape), self.lineage.shape[-2 if self.is_transposed else -1]

        def back(points: Points) -> Points:
            entries, rows = np.divmod(first[points[:, 0], points[:, 1]] + step[points[:, 2]], size)
            return np.stack([entries, rows, points[:, 3]], axis=1)[:, order][:, -rank:]

        return moved(self.lineage, (*first.shape, len(step), features), back)

    def is_in_order(self, entries: Indices) -> bool:
        """Return True if the vectors of each head are all rows of one of these entries, (batch, heads), in order."""
        is_whole = np.array_equal(self.step, np.arange(self.rows))
        return is_whole and bool((self.first == entries * self.rows).all())

    @property
    def entries(self) -> Indices:
        """Entry of the operand that holds each head's vectors, (batch, heads)."""
        return self.first // self.rows


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
    over_pairs: bool  # the softmax runs over queries and keys at once
    between_channels: bool  # the product sums over positions: channels attend to channels

    @property
    def length(self) -> int:
        return int(np.prod([self.shape[axis] for axis in self.query_axes], dtype=np.int64))

    @property
    def first_key(self) -> int:
        """Index of the first key that is an element of the product."""
        return int(np.argmax(self.columns != NOWHERE))

    def followed(self, groups: Indices, positions: Indices) -> ProductPoints:
        """Follow these queries of these heads, at the first key, to the product: (groups · positions) points.

        `groups` are flat indices over the other axes.
        """
        points = np.zeros((len(groups), len(positions), len(self.shape)), dtype=np.int64)
        for axis, index in _unravelled(groups, self.other_axes, self.shape):
            points[:, :, axis] = index[:, None]
        for axis, index in _unravelled(positions, self.query_axes, self.shape):
            points[:, :, axis] = index[None, :]
        points[:, :, self.key_axis] = self.first_key
        return points_in_product(self.node, points.reshape(-1, len(self.shape)), self.product)

    def is_right(self, queries: bool) -> bool:
        """Return True if the queries, or the keys, are the right operand of the product."""
        return queries != self.keys_are_right

    def rows_of(self, at: Points, queries: bool) -> Indices:
        """Return the row of the query operand, or of the key operand, behind each element of the product."""
        axis = -1 if self.is_right(queries) else -2
        entries = at[:, 0] if at.shape[1] == 3 else 0
        return np.asarray(entries * self.product.shape[axis] + at[:, axis])

    def channels(self, at: Points, queries: bool) -> list[tuple[object, ...]]:
        """Return the channel of the query, or of the key, behind each element of the product."""
        is_right, points = self.is_right(queries), at.copy()
        points[:, -2 if is_right else -1] = 0
        return channels(self.product.right_node if is_right else self.product.left_node, points)

    def key_channels(self, points: Points) -> list[tuple[object, ...]]:
        """Return the channel of the key at each point of the softmax's input; empty for points outside the product."""
        found = points_in_product(self.node, points, self.product)
        keys = self.channels(np.maximum(found.at, 0), queries=False)
        return [key if is_found else () for key, is_found in zip(keys, found.are_found, strict=True)]

    def operand(self, queries: bool, first: Indices, step: Indices) -> Operand:
        """Return the queries or keys of the product; `first` and `step` as in Operand."""
        is_right, product = self.is_right(queries), self.product
        tensor, node = (product.right, product.right_node) if is_right else (product.left, product.left_node)
        return Operand(tensor, node, is_right, first, step)


class Vectors(NamedTuple):
    """Place of the queries and keys of each head."""

    groups: Indices  # (batch, heads): flat index of each head, over the other axes of the softmax's input
    query: Operand
    key: Operand  # without sinks


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
    over_pairs = _repeats_a_key(keys.at[keys.are_found], key_place)
    return Axes(
        product, node, shape, axis, tuple(query_axes), tuple(other_axes), key_place != -2, keys.at[:, key_place],
        over_pairs, between_channels,
    )  # fmt: skip


def find_vectors(axes: Axes) -> Vectors | None:
    """Return the place of each head's queries and keys; None if a row of scores is not followed to the product."""
    count = int(np.prod([axes.shape[axis] for axis in axes.other_axes], dtype=np.int64))
    starts = axes.followed(np.arange(count), FIRST)
    if not starts.are_found.all():
        return None
    groups = by_head(axes.channels(starts.at, queries=True))
    if groups is None:  # irregular: assume heads on the last axis
        groups = np.arange(count).reshape(-1, axes.shape[axes.other_axes[-1]] if axes.other_axes else 1)
    rows = axes.followed(groups[0, :1], np.arange(axes.length))
    if not rows.are_found.all():
        return None
    along = axes.rows_of(rows.at, queries=True)
    columns = axes.columns[axes.columns != NOWHERE]
    query, key = (axes.rows_of(starts.at, queries)[groups] for queries in (True, False))
    return Vectors(
        groups,
        axes.operand(True, query, along - along[0]),
        axes.operand(False, key, columns - columns[0]),
    )


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


def by_head(found: list[tuple[object, ...]]) -> Indices | None:
    """Return the entries of a merged axis as (batch, heads), from their channels; None if they are irregular.

    Entries of one channel are one head in several batch entries.
    """
    members: dict[tuple[object, ...], list[int]] = {}
    for entry, channel in enumerate(found):
        members.setdefault(channel, []).append(entry)
    same = len({len(each) for each in members.values()}) == 1
    return np.array(list(members.values())).T if same else None


def _unravelled(index: Indices, axes: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, Indices]]:
    parts = np.unravel_index(index, [shape[axis] for axis in axes]) if axes else ()
    return list(zip(axes, (np.asarray(part) for part in parts), strict=True))


def channels_of(product: Product) -> list[tuple[object, ...]]:
    """Return the channels of a product's first query and first key."""
    nodes = (product.left_node, product.right_node)
    return [channels(node, np.zeros((1, len(node.shape)), dtype=np.int64))[0] for node in nodes]
