"""The queries and keys of a product, by head: as they entered it, and how they came from their projections."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.numerics import wide_dtype
from attnscale.tracing.coordinates import NOWHERE, Indices, Points
from attnscale.tracing.following import Way, channels, way
from attnscale.tracing.lineage import Node
from attnscale.tracing.parameters import Origin
from attnscale.tracing.product import Product
from attnscale.watching.written.axes import Arrival, Axes, arrive


@dataclass(frozen=True)
class Operands:
    """The two operands of a product at some rows: `groups` are heads of batch entries, `positions` their queries."""

    axes: Axes
    groups: Indices
    positions: Indices
    arrival: Arrival

    @classmethod
    def of(cls, axes: Axes, groups: Indices, positions: Indices) -> "Operands":
        """Follow these rows to the product."""
        return cls(axes, groups, positions, arrive(axes.node, axes.rows(groups, positions), axes.product))

    @property
    def multiplier(self) -> NDArray[np.float64]:
        """(groups, rows): what multiplies the product on its way to the softmax."""
        return self._by_group(self.arrival.factor) * self.axes.product.alpha

    @property
    def shift(self) -> NDArray[np.float64]:
        """(groups, rows): what the model subtracted from each row, its maximum mostly."""
        return self._by_group(self.arrival.shift)

    def _by_group(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values.reshape(len(self.groups), len(self.positions))

    def way(self, queries: bool) -> Way:
        """How the queries, or the keys, came from their projection; factors (groups, rows)."""
        found = way(self.axes.operand_node(queries), self.axes.operand_points(self.arrival.at, queries))
        return found._replace(factor=self._by_group(found.factor))

    def origin(self, queries: bool) -> Origin:
        """Where the queries of these rows, or the keys at both ends, come from; `groups` are heads of one entry."""
        axes, rows = self.axes, len(self.positions)
        node, axis = axes.operand_node(queries), -1 if queries == axes.keys_are_right else -2
        if queries:
            at = np.concatenate([self.arrival.at[::rows], self.arrival.at[rows - 1 :: rows]])
        else:
            shown = axes.columns[axes.columns != NOWHERE]
            ends = np.unique(np.clip([0, 1, len(shown) - 2, len(shown) - 1], 0, len(shown) - 1))
            at = np.concatenate([self.arrival.at[::rows]] * len(ends))
            at[:, -1 if axes.keys_are_right else -2] = np.repeat(shown[ends], len(self.groups))
        return Origin(node, axes.operand_points(at, queries), len(self.groups), axis, node.shape[axis])

    def queries(self) -> Tensor:
        """(groups, rows, features), as they entered the product."""
        product, at = self.axes.product, self.arrival.at
        operand, row = (product.left, -2) if self.axes.keys_are_right else (product.right.mT, -1)
        chosen = (
            operand[_on(operand, at[:, row])] if operand.dim() == 2 else operand[_on(operand, at[:, 0], at[:, row])]
        )
        return _wide(chosen).unflatten(0, (len(self.groups), -1))  # type: ignore[no-any-return]

    def keys(self, most: int | None = None, chosen: Indices | None = None) -> Tensor:
        """(groups, keys, features), as they entered the product; about so many of the keys, or those chosen."""
        product, columns = self.axes.product, self.axes.columns[self.axes.columns != NOWHERE]
        columns = columns if most is None else columns[:: -(-len(columns) // most)]
        columns = columns if chosen is None else columns[chosen]
        operand = product.right.mT if self.axes.keys_are_right else product.left
        if operand.dim() == 2:
            return _wide(_taken(operand, 0, columns)).expand(len(self.groups), -1, -1)
        entries = self.arrival.at[:: len(self.positions), 0]
        return _wide(_taken(_taken(operand, 1, columns), 0, entries))

    def predicted(self, softcap: float | None = None) -> Tensor:
        """What the operations on the way make of the product, (groups, rows, keys), without what they add."""
        scores = self.queries() @ self.keys().mT
        scores = scores * torch.from_numpy(self.multiplier).to(scores).unsqueeze(-1)
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        if scores.shape[-1] == len(self.axes.columns):
            return scores
        whole = scores.new_zeros(*scores.shape[:2], len(self.axes.columns))
        whole[..., torch.from_numpy(self.axes.columns != NOWHERE)] = scores
        return whole


def key_channels(product: Product, node: Node, points: Points) -> list[tuple[object, ...]]:
    """Return the channel that made the key of each point of a softmax's input; empty where a point leads elsewhere."""
    arrival = arrive(node, points, product)
    found: list[tuple[object, ...]] = [()] * len(points)
    at = arrival.at[arrival.found]
    at[:, -2] = 0
    for index, key in zip(np.flatnonzero(arrival.found), channels(product.right_node, at), strict=True):
        found[index] = key
    return found


def channels_of(product: Product) -> list[tuple[object, ...]]:
    """Return the channels that the first query and the first key of a product come from."""
    nodes = (product.left_node, product.right_node)
    return [channels(node, np.zeros((1, len(node.shape)), dtype=np.int64))[0] for node in nodes]


def _taken(tensor: Tensor, axis: int, index: Indices) -> Tensor:
    """What a tensor has at these places of an axis; a view where they are evenly spaced, as they mostly are."""
    step = int(index[1] - index[0]) if len(index) > 1 else 1
    if step > 0 and len(index) and (np.diff(index) == step).all():
        return tensor[(slice(None),) * axis + (slice(int(index[0]), int(index[-1]) + 1, step),)]
    return tensor.index_select(axis, *_on(tensor, index))


def _on(tensor: Tensor, *index: Indices) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(np.ascontiguousarray(part)).to(tensor.device) for part in index)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(wide_dtype(tensor))
