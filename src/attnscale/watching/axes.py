"""Axes: find which axes of a softmax's input hold keys, queries, heads and batch entries.

Each axis is identified by a move of one step along it, which is followed to the product. This works for any order and
merging of axes, and for `k @ qᵀ` as well as `q @ kᵀ`.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.tracing.coordinates import NOWHERE, Indices, Points, grid
from attnscale.tracing.following import Trace, channels, follow
from attnscale.tracing.lineage import Node, moved, view_of
from attnscale.tracing.roles import Product

ENTRY, QUERY, KEY = 0, 1, 2


class ProductPoints(NamedTuple):
    """Points of a softmax's input in its product."""

    at: Points  # (points, 3): entry, query and key; −1 for a point outside the product
    factor: NDArray[np.float64]
    shift: NDArray[np.float64]  # number that the model subtracted from the row, usually its maximum
    traces: list[Trace]

    @property
    def are_found(self) -> NDArray[np.bool_]:
        """True for points that are elements of the product."""
        return np.asarray((self.at != NOWHERE).all(1))


class Operand(NamedTuple):
    """Queries or keys of a product, (entries, rows, features)."""

    tensor: Tensor
    node: Node

    def channels(self, entries: Indices, rows: Indices) -> list[tuple[object, ...]]:
        """Return the channel of the first feature of these vectors."""
        return channels(self.node, np.stack([entries, rows, np.zeros_like(rows)], axis=1))

    def is_in_order(self, groups: Indices, first: Indices, step: Indices) -> bool:
        """Return True if each group is one entry, with all its rows in order."""
        size = self.node.shape[1]
        return bool((first == groups * size).all()) and np.array_equal(step, np.arange(size))

    def by_head(self, first: Indices, step: Indices) -> "Operand":
        """Return (batch, heads, length, features); vector n of head [b, h] is row `first[b, h] + step[n]` of all rows.

        The tensor is a view where possible.
        """
        size, features = self.node.shape[1:]
        index = first[..., None] + step
        if index.size == self.tensor.shape[:2].numel() and (index.ravel() == np.arange(index.size)).all():
            tensor = self.tensor.reshape(*index.shape, features)
        else:
            entries, rows = (torch.from_numpy(each).to(self.tensor.device) for each in np.divmod(index, size))
            tensor = self.tensor[entries, rows]

        def back(points: Points) -> Points:
            entries, rows = np.divmod(first[points[:, 0], points[:, 1]] + step[points[:, 2]], size)
            return np.stack([entries, rows, points[:, 3]], axis=1)

        return Operand(tensor, moved(self.node, (*index.shape, features), back))


@dataclass(frozen=True)
class ProductView:
    """A product of queries and keys; with `is_turned`, `k @ qᵀ` is read as `q @ kᵀ`."""

    product: Product
    is_turned: bool

    @cached_property
    def operands(self) -> tuple[Operand, Operand]:
        """Queries and keys."""
        product = self.product
        left, right = _operand(product.left, product.left_node), _operand(product.right, product.right_node)
        right = Operand(right.tensor.mT, view_of(right.node, "transpose", 1, 2))
        return (right, left) if self.is_turned else (left, right)

    def points(self, node: Node, points: Points) -> ProductPoints:
        """Follow points of the softmax's input, or of a node made from it, to the product."""
        at = np.full((len(points), 3), NOWHERE, dtype=np.int64)
        factor, shift = np.ones(len(points)), np.zeros(len(points))
        traces = [trace for trace in follow(node, points, self.product) if self.product.made(trace.node)]
        for trace in traces:
            found = trace.points if trace.points.shape[1] == 3 else np.insert(trace.points, 0, 0, axis=1)
            at[trace.index], factor[trace.index], shift[trace.index] = found, trace.factor, trace.shift
        return ProductPoints(at[:, [ENTRY, KEY, QUERY]] if self.is_turned else at, factor, shift, traces)


def _operand(tensor: Tensor, node: Node) -> Operand:
    if tensor.dim() == 2:
        tensor, node = tensor.unsqueeze(0), moved(node, (1, *node.shape), lambda points: points[:, 1:])
    return Operand(tensor.detach(), node)


@dataclass(frozen=True)
class Axes:
    """A softmax's input as (groups, queries, columns), and the queries and keys of each head in the product.

    A group is one head of one batch entry. A column is a key or a sink.
    """

    view: ProductView
    source: Node  # the softmax's input
    node: Node  # the same as (groups, queries, columns)
    order: tuple[int, ...]  # axes of the softmax's input: those of the groups, then of queries, then of columns
    query_axes: int  # number of axes of queries
    columns: Indices  # index of each key in the product; −1 for a sink
    groups: Indices  # (batch, heads): number of each group
    entries: Indices  # (batch, heads): entry of the product
    query: Operand  # (batch, heads, queries, features)
    key: Operand  # (batch, heads, keys, features)
    is_in_order: bool  # each group is an entry of the product, with all its queries and keys in order
    over_pairs: bool  # the softmax runs over queries and keys at once
    between_channels: bool  # the product sums over positions: channels attend to channels

    def followed(self, groups: Indices, rows: Indices) -> ProductPoints:
        """Follow these rows of these groups, at the first key, to the product: (groups · rows) points."""
        return _follow_rows(self.view, self.node, self.columns, groups, rows)

    def group_of(self, points: Points) -> Indices:
        """Return the number of the group of each point of the softmax's input."""
        sizes = [self.source.shape[axis] for axis in self.order]
        flat = np.ravel_multi_index(tuple(points[:, self.order].T), sizes)
        return np.asarray(flat // math.prod(self.node.shape[1:]))

    def key_channels(self, points: Points) -> list[tuple[object, ...]]:
        """Return the channel of the key at each point of the softmax's input; empty for points outside the product."""
        found = self.view.points(self.source, points)
        at = np.maximum(found.at, 0)
        keys = self.view.operands[1].channels(at[:, ENTRY], at[:, KEY])
        return [key if is_found else () for key, is_found in zip(keys, found.are_found, strict=True)]

    def scores_by_group(self, scores: Tensor) -> Tensor:
        """Return the softmax's input as (…, queries, columns), whose leading axes are the groups."""
        turned = scores.permute(self.order)
        return turned.flatten(-1 - self.query_axes, -2) if self.query_axes else turned.unsqueeze(-2)


def find_axes(product: Product, node: Node, axis: int) -> Axes | None:
    """Return the axes of a softmax's input, which the softmax reduces over `axis`; None if it cannot be followed."""
    shape, rank = node.shape, len(node.shape)
    if not all(shape):
        return None
    along = np.zeros((shape[axis], rank), dtype=np.int64)
    along[:, axis] = np.arange(shape[axis])
    view = ProductView(product, is_turned=False)
    keys = view.points(node, along)
    if not keys.are_found.any():
        return None
    moves = (keys.at[keys.are_found] != keys.at[keys.are_found][0]).any(0)
    if moves[QUERY] and not moves[KEY]:
        view = ProductView(product, is_turned=True)
        keys = view.points(node, along)
    between_channels = _sums_over_positions(product)
    kinds = _kinds_of_axes(view, node, along[np.argmax(keys.are_found)], axis, between_channels)
    if kinds is None:
        return None
    other_axes, query_axes = kinds
    single = [other for other in range(rank) if other != axis and shape[other] == 1]
    order = (*single, *other_axes, *query_axes, axis)
    sizes = tuple(math.prod(shape[each] for each in some) for some in (other_axes, query_axes, [axis]))
    by_group = view_of(view_of(node, "permute", order), "view", sizes)
    columns, heads = keys.at[:, KEY], shape[other_axes[-1]] if other_axes else 1
    repeats = _repeats_a_key(keys.at[keys.are_found])
    starts = _follow_rows(view, by_group, columns, np.arange(sizes[0]), np.zeros(1, dtype=np.int64))
    if not starts.are_found.all():
        return None
    query, key = view.operands
    groups = heads_of(query.channels(starts.at[:, ENTRY], starts.at[:, QUERY]))
    groups = np.arange(sizes[0]).reshape(-1, heads) if groups is None else groups  # irregular: assume the last axis
    rows = _follow_rows(view, by_group, columns, groups[0, :1], np.arange(sizes[1]))
    if not rows.are_found.all():
        return None
    shown = columns[columns != NOWHERE]
    along = rows.at[:, ENTRY] * query.node.shape[1] + rows.at[:, QUERY]
    steps = along - along[0], shown - shown[0]
    sides = ((query, QUERY), (key, KEY))
    firsts = [(starts.at[:, ENTRY] * each.node.shape[1] + starts.at[:, part])[groups] for each, part in sides]
    return Axes(
        view,
        node,
        by_group,
        order,
        len(query_axes),
        columns,
        groups,
        starts.at[:, ENTRY][groups],
        query.by_head(firsts[0], steps[0]),
        key.by_head(firsts[1], steps[1]),
        query.is_in_order(groups, firsts[0], steps[0]) and key.is_in_order(groups, firsts[1], steps[1]),
        repeats,
        between_channels,
    )


def _kinds_of_axes(
    view: ProductView, node: Node, first: Indices, axis: int, between_channels: bool
) -> tuple[list[int], list[int]] | None:
    """Return the axes of heads and batch entries, and those of queries; None if one axis holds heads and queries.

    `first` is a point of the softmax's input in the product, and `axis` that of the keys.
    """
    query, _ = view.operands
    other_axes, query_axes = [], []
    for other, size in enumerate(node.shape):
        if other == axis or size == 1:
            continue
        ends = np.tile(first, (3, 1))
        ends[1:, other] += 1, size - 1
        start, near, far = at = view.points(node, ends).at
        is_head = not between_channels and len(set(query.channels(at[:2, ENTRY], at[:2, QUERY]))) > 1
        if near[QUERY] == start[QUERY] or is_head:
            other_axes.append(other)
        elif far[ENTRY] != start[ENTRY] and size > query.node.shape[1]:
            return None
        else:
            query_axes.append(other)
    return other_axes, query_axes


def _follow_rows(view: ProductView, node: Node, columns: Indices, groups: Indices, rows: Indices) -> ProductPoints:
    points = grid(len(groups), len(rows), 1)
    first_key = np.full(len(points), np.argmax(columns != NOWHERE))
    return view.points(node, np.stack([groups[points[:, 0]], rows[points[:, 1]], first_key], axis=1))


def _repeats_a_key(at: Points) -> bool:
    """Return True if the softmax covers a key several times, each time with another query."""
    if (np.diff(at[:, KEY]) > 0).all():
        return False
    return len(np.unique(at[:, [ENTRY, KEY]], axis=0)) < len(np.unique(at, axis=0))


def _sums_over_positions(product: Product) -> bool:
    """Return True if the product sums over positions: its summed axis stays within one output of a projection."""
    node = product.left_node
    if node.shape[-1] < 2 or node.shape[-2] < 2:
        return False
    points = np.zeros((3, len(node.shape)), dtype=np.int64)
    points[1, -1], points[2, -2] = 1, 1
    first, summed, row = channels(node, points)
    return first != () and first == summed and first != row


def heads_of(found: list[tuple[object, ...]]) -> Indices | None:
    """Return the indices of each head's groups, (batch, heads), from the groups' channels; None if they are irregular.

    Groups with the same channel are one head in several batch entries.
    """
    members: dict[tuple[object, ...], list[int]] = {}
    for place, channel in enumerate(found):
        members.setdefault(channel, []).append(place)
    is_regular = len({len(each) for each in members.values()}) == 1
    return np.array(list(members.values())).T if is_regular else None
