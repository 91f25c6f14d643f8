"""The queries and keys of a product, by head: as they entered it, and how they came from their projections."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.numerics import wide_dtype
from attnscale.tracing.coordinates import NOWHERE
from attnscale.tracing.lineage import follow
from attnscale.tracing.parameters import Origin
from attnscale.watching.written.axes import Arrival, Indices, Layout, arrive


@dataclass(frozen=True)
class Way:
    """How queries, or keys, came from their projection."""

    factor: NDArray[np.float64]  # (groups, rows): what multiplied them since
    normalised: bool
    width: int | None  # of what was projected


@dataclass(frozen=True)
class Operands:
    """The two operands of a product at some rows: `groups` are heads of batch entries, `positions` their queries."""

    layout: Layout
    groups: Indices
    positions: Indices
    arrival: Arrival

    @classmethod
    def of(cls, layout: Layout, groups: Indices, positions: Indices) -> "Operands":
        """Follow these rows to the product."""
        return cls(layout, groups, positions, arrive(layout.node, layout.rows(groups, positions), layout.product))

    @property
    def multiplier(self) -> NDArray[np.float64]:
        """(groups, rows): what multiplies the product on its way to the softmax."""
        return self._by_group(self.arrival.factor) * self.layout.product.alpha

    @property
    def shift(self) -> NDArray[np.float64]:
        """(groups, rows): what the model subtracted from each row, its maximum mostly."""
        return self._by_group(self.arrival.shift)

    def _by_group(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values.reshape(len(self.groups), len(self.positions))

    def way(self, queries: bool) -> Way:
        """Follow the queries, or the keys, to their projection."""
        trails = follow(self.layout.operand_node(queries), self.layout.operand_points(self.arrival.at, queries))
        factor = np.ones(len(self.arrival.at))
        for trail in trails:
            factor[trail.index] = trail.factor
        projection = trails[0].node.projection
        return Way(
            self._by_group(factor),
            all(trail.normalised for trail in trails),
            None if projection is None else projection.width,
        )

    def origin(self, queries: bool) -> Origin:
        """Where the queries of these rows, or their first and last keys, come from; `groups` are heads of one entry."""
        layout, rows = self.layout, len(self.positions)
        node, axis = layout.operand_node(queries), -1 if queries == layout.keys_are_right else -2
        if queries:
            at = np.concatenate([self.arrival.at[::rows], self.arrival.at[rows - 1 :: rows]])
        else:
            shown = layout.columns[layout.columns != NOWHERE]
            at = np.concatenate([self.arrival.at[::rows]] * 2)
            at[:, -1 if layout.keys_are_right else -2] = np.repeat(shown[[0, -1]], len(self.groups))
        return Origin(node, layout.operand_points(at, queries), len(self.groups), axis, node.shape[axis])

    def queries(self) -> Tensor:
        """(groups, rows, features), as they entered the product."""
        product, at = self.layout.product, self.arrival.at
        operand, row = (product.left, -2) if self.layout.keys_are_right else (product.right.mT, -1)
        chosen = (
            operand[_on(operand, at[:, row])] if operand.dim() == 2 else operand[_on(operand, at[:, 0], at[:, row])]
        )
        return _wide(chosen).unflatten(0, (len(self.groups), -1))  # type: ignore[no-any-return]

    def keys(self, most: int | None = None) -> Tensor:
        """(groups, keys, features), as they entered the product; where `most` is given, about so many of the keys."""
        product, columns = self.layout.product, self.layout.columns[self.layout.columns != NOWHERE]
        columns = columns if most is None else columns[:: -(-len(columns) // most)]
        operand = product.right.mT if self.layout.keys_are_right else product.left
        if operand.dim() == 2:
            return _wide(operand[_on(operand, columns)]).expand(len(self.groups), -1, -1)
        entry = self.arrival.at[:: len(self.positions), 0]
        return _wide(operand[_on(operand, entry[:, None], columns[None, :])])

    def predicted(self, softcap: float | None = None) -> Tensor:
        """What the operations on the way make of the product, (groups, rows, keys), without what they add."""
        scores = self.queries() @ self.keys().mT
        scores = scores * torch.from_numpy(self.multiplier).to(scores).unsqueeze(-1)
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        whole = scores.new_zeros(*scores.shape[:2], len(self.layout.columns))
        whole[..., torch.from_numpy(self.layout.columns != NOWHERE)] = scores
        return whole


def _on(tensor: Tensor, *index: Indices) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(np.ascontiguousarray(part)).to(tensor.device) for part in index)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(wide_dtype(tensor))
