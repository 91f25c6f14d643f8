"""Scores of single heads multiplied through the parameters that make their queries and keys, on their own device.

Which rows of which parameters take which share of whose factor is worked out once. After that, to multiply all heads of
a model is a handful of operations on one number a head, and one product a parameter; a factor of one changes no bit.
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

FAMILY, FIXED, EXPONENT = range(3)  # what ranks tell each other of their heads, before what the caller adds
MOST_UNTOUCHED = 8  # parameters
MOST_SAMPLED = 32  # rows of a parameter, and elements of a row


@dataclass(frozen=True, eq=False)
class _Rows:
    """The part of a parameter that this rank holds; each row is multiplied by the factor at its place among all."""

    owner: nn.Module
    name: str  # by which its owner has it
    parameter: Tensor
    kind: tuple[object, ...]  # of what is held
    shape: tuple[int, ...]  # of its factors
    offset: float

    @property
    def held(self) -> Tensor:
        """The values as they lie now: some loops give a parameter other data at every step."""
        local = local_part(self.parameter)
        return (self.parameter if local is None else local).detach()

    @property
    def is_current(self) -> bool:
        """True if it is its owner's and such as it was: not so once it was replaced, moved or converted.

        Of a parameter in shards an owner has another at times, put together.
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
        """Dtype of the factors, so that a product is rounded once."""
        return torch.promote_types(self.parameter.dtype, torch.float32)

    def multiply_(self, held: Tensor, factors: Tensor) -> None:
        """Multiply in place what is held, with which `offset` counts."""
        changed = (held.to(factors.dtype) + self.offset) * factors - self.offset
        held.copy_(torch.where(factors == 1.0, held, changed.to(held.dtype)))

    def lengths(self) -> Tensor:
        """Return the length of each row, float64."""
        held = self.held.double() + self.offset
        along = [axis for axis, size in enumerate(self.shape) if size != held.shape[axis]]
        return (torch.linalg.vector_norm(held, dim=along) if along else held.abs()).reshape(-1)

    def elements(self, at: Tensor) -> Tensor:
        """Return some elements of these rows, float64."""
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
    """Multiplies what makes the queries and keys of heads; made once, by all ranks of the axes."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, LayerHeads],
        axes: Sequence[Axis] = (),
        frozen: Frozen = "keep",
        known: Callable[[HeadRows], list[list[float]]] = lambda rows: [],
    ) -> None:
        """`known` tells numbers of each head that all ranks are to know."""
        self._model, self.rows = model, HeadRows(model, layers, frozen)
        self._shares, device = self.rows.shares(axes), device_of(model)
        exponents = np.zeros(len(self.heads) + 1)
        np.maximum.at(exponents, self._shares.head, self._shares.exponent)  # a row of nobody goes to the last
        own = [self._shares.families, self._shares.fixed, exponents[:-1], *known(self.rows)]
        self.slots = Slots.of(axes, np.array(own, dtype=np.float64).reshape(len(own), len(self.heads)))
        _, families = np.unique(self.slots.known[FAMILY], return_inverse=True)
        self.families = torch.from_numpy(families.ravel()).to(device)
        self.fixed = torch.from_numpy(self.slots.known[FIXED] > 0).to(device)
        self._held: list[_Rows] = []
        self._place(device)

    @property
    def heads(self) -> list[Head]:
        """This rank's heads, in the order in which factors are given."""
        return self.rows.heads

    def _place(self, device: torch.device) -> None:
        """Find slot and exponent of each local row; rows of no head take the last slot, whose factor is 1."""
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
        """True if all parameters lie where they lay."""
        return all(rows.is_current for rows in self._held)

    def by_family(self, wanted: Tensor, merge: Literal["least", "geometric mean"]) -> Tensor:
        """Give each family one of the factors wanted, or their mean, and 1 to heads that cannot be multiplied."""
        if merge == "least":
            merged = torch.ones_like(wanted).scatter_reduce_(0, self.families, wanted, "amin")
        else:
            logs = torch.zeros_like(wanted)
            merged = logs.scatter_reduce_(0, self.families, wanted.log(), "mean", include_self=False).exp()
        return torch.where(self.fixed, 1.0, merged[self.families])

    @torch.no_grad()
    def multiply_(self, factors: Tensor) -> None:
        """Multiply every parameter that this rank holds of what makes the heads."""
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
        """Return this rank's heads that these factors, one for each of its heads, multiplied."""
        shares = self._shares
        by_row = np.where(shares.head < 0, 1.0, factors[shares.head] ** shares.exponent) if len(factors) else np.ones(0)
        return list(self.rows.scaled(factors, by_row))

    @torch.no_grad()
    def log_sizes(self) -> Floats:
        """Return the logarithm of each slot's scores, as far as the lengths of the rows that make it tell."""
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
        """Return elements of rows that these factors change: a way to read them, their values, and their factors."""
        by_row = torch.cat([factors, factors.new_ones(1)])[self._slot_of_row] ** self._exponent_of_row
        found: list[tuple[Callable[[], Tensor], Tensor, Tensor]] = []
        for rows, own in zip(self._held, by_row.split([rows.size for rows in self._held]), strict=True):
            at = (own != 1.0).nonzero()[:MOST_SAMPLED, 0]
            if len(at) and not rows.offset:
                read = partial(rows.elements, at)
                found.append((read, read(), own[at, None]))
        return found

    def untouched(self, model: nn.Module) -> list[Tensor]:
        """Return a few trainable parameters that no head is scaled by."""
        own = {id(rows.parameter) for rows in self._held}
        others = (each for each in model.parameters() if each.requires_grad and id(each) not in own)
        found = (each if (local := local_part(each)) is None else local for each in others)
        return [each.detach() for each in islice(found, MOST_UNTOUCHED)]
