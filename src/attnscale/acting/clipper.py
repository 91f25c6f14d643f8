"""QK-Clip of a model that is known, at every step: on the device, which is never waited for.

Which rows of which parameters take which share of whose factor is worked out once. After that a step is a handful of
operations on one number a head, and one product a parameter; a head that did not pass the threshold is multiplied by
one, which changes no bit of it. What was clipped is told when the numbers have reached the host.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from attnscale.acting.clip import ClippedHead, ClipReport, aim_of, log
from attnscale.acting.folding import Folding, Left
from attnscale.acting.replicas import Axis, device_of
from attnscale.acting.uses import Floats, Indices
from attnscale.acting.writing import rows_held
from attnscale.torch_internals import local_part, multiply_each_
from attnscale.watching.layer import Layer


@dataclass(frozen=True, eq=False)
class Slots:
    """All heads, those of ranks that share them out one after the other; `own` are those that this rank computes."""

    axes: Sequence[Axis]
    own: slice
    known: Floats  # (numbers, slots): what ranks told of their heads

    @classmethod
    def of(cls, axes: Sequence[Axis], known: Floats) -> "Slots":
        """Every rank of the axes tells what it knows of its own heads, (numbers, heads)."""
        place = tuple(dist.get_rank(axis.group) for axis in axes if axis.cut)
        told = {place: known}
        for axis in (axis for axis in axes if axis.cut):
            told = {where: numbers for each in axis.gathered(told) for where, numbers in each.items()}
        parts = [told[where] for where in sorted(told)]
        first = sum(part.shape[1] for where, part in sorted(told.items()) if where < place)
        return cls(axes, slice(first, first + known.shape[1]), np.concatenate(parts, axis=1))

    @property
    def count(self) -> int:
        """Of all heads."""
        return int(self.known.shape[1])

    @cached_property
    def _groups(self) -> "list[dist.ProcessGroup | None]":
        """The groups over which the largest number of a slot is looked for; one where the axes span all ranks."""
        sizes = [dist.get_world_size(axis.group) for axis in self.axes]
        if len(sizes) > 1 and prod(sizes) == dist.get_world_size():
            return [None]
        return [axis.group for axis in self.axes]

    def agreed(self, own: Tensor) -> Tensor:
        """The largest numbers that any rank has of each slot, from those of this rank's own heads."""
        if not self.axes:
            return own
        every = own.new_full((self.count,), -torch.inf)
        every[self.own] = own
        for group in self._groups:
            dist.all_reduce(every, dist.ReduceOp.MAX, group=group)
        return every


AIM, SOFTCAP, FAMILY, FIXED = range(4)  # what ranks tell of their heads


@dataclass(frozen=True, eq=False)
class _Rows:
    """What this rank holds of a parameter; each row is multiplied by the factor at its place among all."""

    owner: nn.Module
    name: str  # by which its owner has it
    parameter: Tensor
    kind: tuple[object, ...]  # of what is held
    shape: tuple[int, ...]  # of its factors
    offset: float

    @property
    def held(self) -> Tensor:
        """As it lies now: some loops give a parameter other data at every step."""
        local = local_part(self.parameter)
        return (self.parameter if local is None else local).detach()

    @property
    def is_current(self) -> bool:
        """Whether it is its owner's and such as it was: not so once it was replaced, moved or converted.

        Of a parameter in shards an owner has another at times, put together.
        """
        is_whole = local_part(self.parameter) is None
        if is_whole and getattr(self.owner, self.name, None) is not self.parameter:
            return False
        return _kind(self.held) == self.kind

    @cached_property
    def size(self) -> int:
        """How many factors it takes."""
        return math.prod(self.shape)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of its factors, so that a product is rounded once."""
        return torch.promote_types(self.parameter.dtype, torch.float32)

    def multiply_(self, held: Tensor, factors: Tensor) -> None:
        """Multiply in place what is held, with which `offset` counts."""
        changed = (held.to(factors.dtype) + self.offset) * factors - self.offset
        held.copy_(torch.where(factors == 1.0, held, changed.to(held.dtype)))


def _kind(held: Tensor) -> tuple[object, ...]:
    return held.shape, held.dtype, held.device


@dataclass(frozen=True, eq=False)
class _Takers:
    """Of each row of a parameter, as ranks compute with it: the slot whose factor it takes, or −1, and the exponent."""

    shape: tuple[int, ...]
    across: tuple[int, ...]
    offset: float
    slots: Indices
    exponents: Floats

    def with_rows_of(self, other: "_Takers") -> "_Takers":
        """And those that another rank has takers for, where both say the same of the parameter."""
        if (self.shape, self.across, self.offset) != (other.shape, other.across, other.offset):
            return self
        more = self.slots < 0
        slots, exponents = (
            np.where(more, theirs, own)
            for own, theirs in ((self.slots, other.slots), (self.exponents, other.exponents))
        )
        return replace(self, slots=slots, exponents=exponents)


class Clipper:
    """Multiplies what makes the queries and keys of heads over the threshold; made once, by all ranks of the axes."""

    def __init__(self, model: nn.Module, layers: Mapping[str, Layer], threshold: float, axes: Sequence[Axis]) -> None:
        self.threshold, self._model = threshold, model
        self._folding, device = Folding(model, layers), device_of(model)
        shares = self._shares = self._folding.shares(axes)
        names = [name for name, _ in self._folding.heads]
        aims = {name: aim_of(threshold, self._folding.dtype(name)) for name in layers}
        caps = {name: np.inf if layer.softcap is None else layer.softcap for name, layer in layers.items()}
        known = [[aims[name] for name in names], [caps[name] for name in names], shares.families, shares.fixed]
        self.slots = Slots.of(axes, np.array(known, dtype=np.float64).reshape(4, len(names)))
        _, families = np.unique(self.slots.known[FAMILY], return_inverse=True)
        self._aims, self._caps, self._fixed = (
            torch.from_numpy(self.slots.known[number]).to(device) for number in (AIM, SOFTCAP, FIXED)
        )
        self._is_capped = bool(np.isfinite(self.slots.known[SOFTCAP]).any())
        self._families = torch.from_numpy(families.ravel()).to(device)
        self._rows: list[_Rows] = []
        self._place(axes, device)

    def _takers(self, axes: Sequence[Axis]) -> dict[str, _Takers]:
        """By the name of the parameter; of one that is whole on ranks with heads of their own, those of all of them."""
        shares, found = self._shares, dict[str, _Takers]()
        slots = np.where(shares.head < 0, -1, shares.head + self.slots.own.start)
        for block, last in self._folding.blocks():
            rows = slice(block.first, last)
            found[block.name] = _Takers(block.shape, block.across, block.offset, slots[rows], shares.exponent[rows])
        for axis in (axis for axis in axes if axis.cut):
            whole = {name: takers for name, takers in found.items() if name not in axis.cut}
            for told in axis.gathered(whole):
                for name, takers in told.items():
                    found[name] = found[name].with_rows_of(takers) if name in found else takers
        return found

    def _place(self, axes: Sequence[Axis], device: torch.device) -> None:
        """Which slot and which exponent each row that is held takes; those of none take the last slot, of factor 1."""
        every, exponents = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
        for name, takers in self._takers(axes).items():
            held = rows_held(self._folding.parameter(name), takers.shape, takers.across)
            if held is None or not held[0].numel() or (takers.slots < 0).all():
                continue
            local, numbers = held
            is_here, at = numbers.ravel() >= 0, numbers.ravel().clip(0)
            slots = np.where(is_here, takers.slots[at], -1)
            every.append(np.where(slots < 0, self.slots.count, slots))
            exponents.append(takers.exponents[at])
            path, _, last = name.rpartition(".")
            parameter, owner = self._folding.parameter(name), self._model.get_submodule(path)
            self._rows.append(_Rows(owner, last, parameter, _kind(local), numbers.shape, takers.offset))
        self._slot_of_row = torch.from_numpy(np.concatenate(every)).to(device)
        self._exponent_of_row = torch.from_numpy(np.concatenate(exponents)).to(device)

    @property
    def is_current(self) -> bool:
        """Whether all parameters lie where they lay."""
        return all(rows.is_current for rows in self._rows)

    def factors(self, maxima: Tensor) -> Tensor:
        """What the scores of each slot are multiplied by, float64."""
        largest = maxima.double()
        wanted = self._aims / largest
        if self._is_capped:
            capped = torch.atanh(self._aims / self._caps) / torch.atanh(largest / self._caps)
            wanted = torch.where(self._caps == torch.inf, wanted, capped)
        can = (largest > self.threshold) & (largest < self._caps)  # ∞ is not
        wanted = torch.where(can, wanted, 1.0)
        of_families = torch.ones_like(wanted).scatter_reduce_(0, self._families, wanted, "amin")
        return torch.where(self._fixed > 0, 1.0, of_families[self._families])

    @torch.no_grad()
    def multiply_(self, factors: Tensor) -> None:
        """Multiply every parameter that this rank holds of what makes the heads."""
        with_one = torch.cat([factors, factors.new_ones(1)])
        by_row = with_one[self._slot_of_row] ** self._exponent_of_row
        sizes = [rows.size for rows in self._rows]
        parts = {dtype: by_row.to(dtype).split(sizes) for dtype in {rows.dtype for rows in self._rows}}
        plain: list[tuple[Tensor, Tensor]] = []
        for number, rows in enumerate(self._rows):
            held, own = rows.held, parts[rows.dtype][number].view(rows.shape)
            if rows.offset:
                rows.multiply_(held, own)
            else:
                plain.append((held, own))
        multiply_each_([held for held, _ in plain], [own for _, own in plain])

    def report(self, maxima: Floats, factors: Floats) -> ClipReport | None:
        """What was done of this rank's heads; None where none was over the threshold."""
        largest, own = maxima[self.slots.own], factors[self.slots.own]
        if (largest <= self.threshold).all() and (own == 1.0).all():
            return None
        heads, clipped = self._folding.heads, []
        for folded in self._folding.told(own, self._shares.by_row(own)):
            maximum = float(largest[heads.index((folded.layer, folded.head))])
            clipped.append(
                ClippedHead(folded.layer, folded.head, maximum, maximum, "exact", folded.factor, folded.touched)
            )
        over = np.flatnonzero(~(largest <= self.threshold) & (own == 1.0))
        left = [Left(*heads[number], self._why_left(int(number), float(largest[number]))) for number in over]
        report = ClipReport(self.threshold, tuple(clipped), tuple(left))
        log(report)
        return report

    def _why_left(self, number: int, largest: float) -> str:
        if self._shares.fixed[number]:
            return self._folding.why_fixed(number)
        cap = float(self.slots.known[SOFTCAP, self.slots.own][number])
        if largest >= cap and np.isfinite(largest):
            return f"its largest score is the soft-cap, {cap:.4g}, and what came before is not known"
        return f"its largest score is {largest}"
