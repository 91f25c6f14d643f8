"""Slots: one number for every head of a model, wherever it is computed: ranks agree by one collective a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from attnscale.acting.replicas import Axis
from attnscale.acting.uses import Floats


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
