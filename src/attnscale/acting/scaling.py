"""Multiplication of the scores of single heads, through the parameters that produce their queries and keys.

The head and exponent of each row are computed once. Multiplying all heads of a model then takes a few operations on one
number per head, and one product per parameter, on its device. A factor of one changes no bit.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from attnscale.acting.head_rows import Floats, HeadRows
from attnscale.acting.parameters import Frozen, held_rows
from attnscale.acting.replicas import LayerHeads, Replicas
from attnscale.torch_internals import local_part, multiply_each_

MOST_UNTOUCHED = 8  # number of parameters that untouched() returns
MOST_SAMPLED = 32  # rows of a parameter that changed() returns, and elements of a row that elements() returns


@dataclass(frozen=True, eq=False)
class ScaledParameter:
    """The local part of a parameter that produces heads."""

    owner: nn.Module
    name: str  # attribute name in its owner
    parameter: Tensor
    kind: tuple[object, ...]  # shape, dtype and device of the local part
    offset: float
    factors: Tensor  # of its rows, with size 1 along all other axes

    @property
    def held(self) -> Tensor:
        """Local values of the parameter, read anew: some training loops replace its data at every step."""
        local = local_part(self.parameter)
        return self.parameter if local is None else local

    @property
    def is_current(self) -> bool:
        """True unless the parameter was replaced, moved or converted.

        The owner of a sharded parameter may have an unsharded one at times, so only local parts are compared then.
        """
        held = self.held
        if held is self.parameter and self.owner._parameters.get(self.name) is not held:
            return False
        return _kind(held) == self.kind

    def multiply_with_offset_(self) -> None:
        """Multiply value + offset in place."""
        held = self.held
        changed = (held.to(self.factors.dtype) + self.offset) * self.factors - self.offset
        held.copy_(torch.where(self.factors == 1.0, held, changed.to(held.dtype)))

    def lengths(self) -> Tensor:
        """Return the norm of each row, float64."""
        lengths: Tensor = torch.linalg.vector_norm(self._by_row().double() + self.offset, dim=1)
        return lengths

    def elements(self, rows: Tensor) -> Tensor:
        """Return the first elements of these rows, float64."""
        return self._by_row()[rows, :MOST_SAMPLED].double() + self.offset

    def _by_row(self) -> Tensor:
        held, shape = self.held.detach(), self.factors.shape
        kept = [axis for axis, size in enumerate(shape) if size == held.shape[axis]]
        along = [axis for axis in range(held.dim()) if axis not in kept]
        return held.permute(*kept, *along).reshape(self.factors.numel(), -1)


def _kind(held: Tensor) -> tuple[object, ...]:
    return held.shape, held.dtype, held.device


class HeadScaler:
    """Multiplies the parameters that produce queries and keys; every rank must create one."""

    def __init__(self, model: nn.Module, layers: Mapping[str, LayerHeads], frozen: Frozen, replicas: Replicas) -> None:
        self._model, self.replicas, self.device = model, replicas, device_of(model)
        self.rows = HeadRows(model, layers, frozen, replicas.cuts)
        self._scaled = self._place(self.rows)
        self._plain = [each for each in self._scaled if not each.offset]
        self._plain_factors = [each.factors for each in self._plain]

    def _place(self, rows: HeadRows) -> list[ScaledParameter]:
        """Find the head and the exponent of each local row; rows without a head have the exponent 0."""
        found, heads, exponents = [], [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
        for block in rows.blocks:
            held = held_rows(block.parameter, block.shape, block.across)
            head, exponent = rows.head[block.first : block.last], rows.exponent[block.first : block.last]
            if held is None or not held[0].numel() or (head < 0).all():
                continue
            local, numbers = held
            is_here, at = numbers.ravel() >= 0, numbers.ravel().clip(0)
            heads.append(np.where(is_here, head[at].clip(0), 0))
            exponents.append(np.where(is_here, exponent[at], 0.0))
            found.append((block, local, numbers.shape))
        self._head_of_row = torch.from_numpy(np.concatenate(heads)).to(self.device)
        self._exponent_of_row = torch.from_numpy(np.concatenate(exponents)).to(self.device)
        # At least float32, so that a product is rounded once.
        dtype = reduce(torch.promote_types, [local.dtype for _, local, _ in found], torch.float32)
        self._factor_of_row = torch.ones_like(self._exponent_of_row, dtype=dtype)
        parts = self._factor_of_row.split([len(each) for each in heads[1:]])
        scaled = []
        for (block, local, shape), factors in zip(found, parts, strict=True):
            path, _, name = block.name.rpartition(".")
            owner, parts_of = self._model.get_submodule(path), factors.view(shape)
            scaled.append(ScaledParameter(owner, name, block.parameter, _kind(local), block.offset, parts_of))
        return scaled

    @property
    def is_current(self) -> bool:
        """True unless a parameter was replaced, moved or converted."""
        return all(scaled.is_current for scaled in self._scaled)

    @torch.no_grad()
    def multiply_(self, factors: Tensor) -> None:
        """Multiply the local part of every parameter that produces the heads; `factors` has one for each head."""
        of_row = factors.to(self.device)[self._head_of_row]
        torch.pow(of_row, self._exponent_of_row, out=self._factor_of_row)
        multiply_each_([scaled.held for scaled in self._plain], self._plain_factors)
        for scaled in self._scaled:
            if scaled.offset:
                scaled.multiply_with_offset_()

    @torch.no_grad()
    def log_sizes(self) -> Floats:
        """Return the logarithm of the size of each head's scores, estimated from the norms of its rows."""
        found = self._exponent_of_row.new_zeros(2, len(self.rows.heads))
        if self._scaled:
            lengths = torch.cat([scaled.lengths() for scaled in self._scaled])
            sizes = [(scaled.factors.numel(), scaled.held.numel()) for scaled in self._scaled]
            weights = torch.cat([lengths.new_full((rows,), elements // rows) for rows, elements in sizes])
            counts = (lengths > 0) & (self._exponent_of_row > 0)
            weights = torch.where(counts, weights, 0.0)
            logs = torch.where(counts, lengths.log() / self._exponent_of_row, 0.0) * weights
            found.index_add_(1, self._head_of_row, torch.stack([logs, weights]))
        total, weight = self.replicas.reduced_(found, "sum")
        sizes_of_heads: Floats = (total / weight.clamp(min=1.0)).cpu().numpy()
        return sizes_of_heads

    def changed(self, factors: Tensor) -> Iterator[tuple[ScaledParameter, Tensor, Tensor]]:
        """Yield the parameters that these factors change, with the first changed rows and the factor of each."""
        by_row = factors[self._head_of_row] ** self._exponent_of_row
        sizes = [scaled.factors.numel() for scaled in self._scaled]
        for scaled, own in zip(self._scaled, by_row.split(sizes), strict=True):
            rows = (own != 1.0).nonzero()[:MOST_SAMPLED, 0]
            if len(rows):
                yield scaled, rows, own[rows]

    def untouched(self) -> list[Tensor]:
        """Return a few trainable parameters that do not produce heads."""
        own = {id(scaled.parameter) for scaled in self._scaled}
        others = (each for each in self._model.parameters() if each.requires_grad and id(each) not in own)
        found = (each if (local := local_part(each)) is None else local for each in others)
        return [each.detach() for each in islice(found, MOST_UNTOUCHED)]


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the parameters."""
    first: Tensor | None = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device
