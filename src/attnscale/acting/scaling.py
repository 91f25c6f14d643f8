"""Multiplication of the scores of single heads, through the parameters that produce their queries and keys.

The head and exponent of each row are computed once. Multiplying all heads of a model then takes a few operations on one
number per head, and one product per parameter, on its device. A factor of one changes no bit.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from attnscale.acting.head_rows import Head, HeadRows, ScaledHead
from attnscale.acting.parameters import Frozen, held_rows
from attnscale.acting.replicas import Axis, Floats, LayerHeads, Slots, device_of
from attnscale.torch_internals import local_part, multiply_each_

FAMILY, FIXED, EXPONENT = range(3)  # rows of the numbers that ranks exchange, before those of the caller
MOST_UNTOUCHED = 8  # number of parameters that untouched() returns
MOST_SAMPLED = 32  # rows per parameter, and elements per row, that sample() returns


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of the local part of a parameter."""

    owner: nn.Module
    name: str  # attribute name in its owner
    parameter: Tensor
    kind: tuple[object, ...]  # shape, dtype and device of the local part
    shape: tuple[int, ...]  # shape of its factors
    offset: float

    @property
    def held(self) -> Tensor:
        """Current local values; some training loops replace the data of a parameter at every step."""
        local = local_part(self.parameter)
        return (self.parameter if local is None else local).detach()

    @property
    def is_current(self) -> bool:
        """True unless the parameter was replaced, moved or converted.

        The owner of a sharded parameter may have an unsharded one at times, so only local parts are compared then.
        """
        local = local_part(self.parameter)
        if local is None and self.owner._parameters.get(self.name) is not self.parameter:
            return False
        return _kind(self.parameter if local is None else local) == self.kind

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the factors: at least float32, so that a product is rounded once."""
        return torch.promote_types(self.parameter.dtype, torch.float32)

    def multiply_(self, held: Tensor, factors: Tensor) -> None:
        """Multiply value + offset of the local part in place."""
        changed = (held.to(factors.dtype) + self.offset) * factors - self.offset
        held.copy_(torch.where(factors == 1.0, held, changed.to(held.dtype)))

    def lengths(self) -> Tensor:
        """Return the norm of each row, float64."""
        held = self.held.double() + self.offset
        along = [axis for axis, size in enumerate(self.shape) if size != held.shape[axis]]
        return (torch.linalg.vector_norm(held, dim=along) if along else held.abs()).reshape(-1)

    def elements(self, at: Tensor) -> Tensor:
        """Return the first elements of these rows, float64."""
        held = self.held
        kept = [axis for axis, size in enumerate(self.shape) if size == held.shape[axis]]
        along = [axis for axis in range(held.dim()) if axis not in kept]
        return held.permute(*kept, *along).reshape(self.size, -1)[at, :MOST_SAMPLED].double()

    @cached_property
    def weight(self) -> int:
        return math.prod(self.kind[0]) // max(self.size, 1)  # type: ignore[call-overload, no-any-return]


def _kind(held: Tensor) -> tuple[object, ...]:
    return held.shape, held.dtype, held.device


class HeadScaler:
    """Multiplies the parameters that produce queries and keys; every rank of the axes must create one."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, LayerHeads],
        axes: Sequence[Axis] = (),
        frozen: Frozen = "keep",
        known: Callable[[HeadRows], list[list[float]]] = lambda rows: [],
    ) -> None:
        """Exchange the slots of heads with all ranks; `known` returns further numbers of each head to exchange."""
        self._model, self.rows = model, HeadRows(model, layers, frozen)
        self._shares, device = self.rows.shares(axes), device_of(model)
        exponents = np.zeros(len(self.heads) + 1)
        np.maximum.at(exponents, self._shares.head, self._shares.exponent)  # rows without a head use the last entry
        own = [self._shares.families, self._shares.fixed, exponents[:-1], *known(self.rows)]
        self.slots = Slots.of(axes, np.array(own, dtype=np.float64).reshape(len(own), len(self.heads)))
        _, families = np.unique(self.slots.known[FAMILY], return_inverse=True)
        self.families = torch.from_numpy(families.ravel()).to(device)
        self.fixed = torch.from_numpy(self.slots.known[FIXED] > 0).to(device)
        self._held: list[_Rows] = []
        self._place(device)

    @property
    def heads(self) -> list[Head]:
        """Heads of this rank, in the order of their factors."""
        return self.rows.heads

    def _place(self, device: torch.device) -> None:
        """Find slot and exponent of each local row; rows without a head use the last slot, which has the factor 1."""
        shares, every, exponents = self._shares, [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
        slots = np.where(shares.head < 0, -1, shares.head + self.slots.own.start)
        for block, last in self.rows.blocks():
            rows, parameter = slice(block.first, last), self.rows.parameter(block.name)
            held = held_rows(parameter, block.shape, block.across)
            if held is None or not held[0].numel() or (slots[rows] < 0).all():
                continue
            local, numbers = held
            is_here, at = numbers.ravel() >= 0, numbers.ravel().clip(0)
            own = np.where(is_here, slots[rows][at], -1)
            every.append(np.where(own < 0, self.slots.count, own))
            exponents.append(shares.exponent[rows][at])
            path, _, name = block.name.rpartition(".")
            owner = self._model.get_submodule(path)
            self._held.append(_Rows(owner, name, parameter, _kind(local), numbers.shape, block.offset))
        self._slot_of_row = torch.from_numpy(np.concatenate(every)).to(device)
        self._exponent_of_row = torch.from_numpy(np.concatenate(exponents)).to(device)

    @property
    def is_current(self) -> bool:
        """True unless a parameter was replaced, moved or converted."""
        return all(rows.is_current for rows in self._held)

    def by_family(self, wanted: Tensor, merge: Literal["least", "geometric mean"]) -> Tensor:
        """Return one factor for each family, the least or the mean of those wanted; 1 for heads that are fixed."""
        if merge == "least":
            merged = torch.ones_like(wanted).scatter_reduce_(0, self.families, wanted, "amin")
        else:
            logs = torch.zeros_like(wanted)
            merged = logs.scatter_reduce_(0, self.families, wanted.log(), "mean", include_self=False).exp()
        return torch.where(self.fixed, 1.0, merged[self.families])

    @torch.no_grad()
    def multiply_(self, factors: Tensor) -> None:
        """Multiply the local part of every parameter that produces the heads."""
        by_row = torch.cat([factors, factors.new_ones(1)])[self._slot_of_row] ** self._exponent_of_row
        sizes = [rows.size for rows in self._held]
        parts = {dtype: by_row.to(dtype).split(sizes) for dtype in {rows.dtype for rows in self._held}}
        plain: list[tuple[Tensor, Tensor]] = []
        for number, rows in enumerate(self._held):
            held, own = rows.held, parts[rows.dtype][number].view(rows.shape)
            if rows.offset:
                rows.multiply_(held, own)
            else:
                plain.append((held, own))
        multiply_each_([held for held, _ in plain], [own for _, own in plain])

    def scaled(self, factors: Floats) -> list[ScaledHead]:
        """Return the heads of this rank that were multiplied by these factors, one per head."""
        shares = self._shares
        by_row = np.where(shares.head < 0, 1.0, factors[shares.head] ** shares.exponent) if len(factors) else np.ones(0)
        return list(self.rows.scaled(factors, by_row))

    @torch.no_grad()
    def log_sizes(self) -> Floats:
        """Return the logarithm of the size of each slot's scores, estimated from the norms of its rows."""
        found = self._exponent_of_row.new_zeros(2, self.slots.count + 1)
        if self._held:
            lengths = torch.cat([rows.lengths() for rows in self._held]).to(found.device)
            weights = torch.cat([lengths.new_full((rows.size,), rows.weight) for rows in self._held])
            counts = (lengths > 0) & (self._exponent_of_row > 0)
            weights = torch.where(counts, weights, 0.0)
            logs = torch.where(counts, lengths.log() / self._exponent_of_row, 0.0) * weights
            found.index_add_(1, self._slot_of_row, torch.stack([logs, weights]))
        total, weight = self.slots.summed(found[:, :-1].contiguous())
        sizes: Floats = (total / weight.clamp(min=1.0)).cpu().numpy()
        return sizes

    @torch.no_grad()
    def sample(self, factors: Tensor) -> list[tuple[Callable[[], Tensor], Tensor, Tensor]]:
        """Return elements of rows that these factors change: a function to read them, their values, their factors."""
        by_row = torch.cat([factors, factors.new_ones(1)])[self._slot_of_row] ** self._exponent_of_row
        found: list[tuple[Callable[[], Tensor], Tensor, Tensor]] = []
        for rows, own in zip(self._held, by_row.split([rows.size for rows in self._held]), strict=True):
            at = (own != 1.0).nonzero()[:MOST_SAMPLED, 0]
            if len(at) and not rows.offset:
                read = partial(rows.elements, at)
                found.append((read, read(), own[at, None]))
        return found

    def untouched(self, model: nn.Module) -> list[Tensor]:
        """Return a few trainable parameters that do not produce heads."""
        own = {id(rows.parameter) for rows in self._held}
        others = (each for each in model.parameters() if each.requires_grad and id(each) not in own)
        found = (each if (local := local_part(each)) is None else local for each in others)
        return [each.detach() for each in islice(found, MOST_UNTOUCHED)]
