"""Ranks with copies or shards of the same parameters, and the numbers that they exchange before they change any.

An axis is a group of ranks. With data parallelism or FSDP2, all ranks of an axis compute the same heads on different
data. With tensor parallelism, they compute different heads: some parameters are cut, and all others, such as the gain
of a QK-norm or an uncut key, are equal on every rank, although no placement says so.
"""

import gc
import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from attnscale.acting.parameters import is_sharded
from attnscale.torch_internals import fsdp_groups
from attnscale.tracing.parameters import Origin, Origins, UntraceableError

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Axis:
    """A group of ranks, and the names of the parameters that are cut over them."""

    group: "dist.ProcessGroup"
    cut: frozenset[str] = frozenset()

    def gathered(self, own: Any) -> list[Any]:
        """Gather an object from every rank, in rank order."""
        found = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, own, group=self.group)
        return found

    def all_same(self, own: bytes) -> bool:
        """Return True if every rank passes the same bytes."""
        return len(set(self.gathered(hashlib.blake2b(own, digest_size=16).digest()))) == 1


def axes_of(model: nn.Module, group: "dist.ProcessGroup | None") -> list[Axis]:
    """Return the axes of a model, including `group`, in the same order on all ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    copied = [each for each in (group, data_parallel_group(model)) if each is not None]
    copied += [each for module in model.modules() for each in fsdp_groups(module)]
    found: dict[tuple[int, ...], tuple[dist.ProcessGroup, set[str]]] = {}
    for name, along, is_cut in _placed(model):
        _, cut = found.setdefault(_ranks(along), (along, set()))
        if is_cut:
            cut.add(name)
    for each in copied:
        found[_ranks(each)] = (each, set())
    return [Axis(along, frozenset(cut)) for ranks, (along, cut) in found.items() if len(ranks) > 1]


def head_axes(axes: Sequence[Axis], layers: "Mapping[str, LayerHeads]") -> list[Axis]:
    """Return the axes with only those cut parameters that produce heads; an axis with none left copies the heads.

    This is so for ranks that distribute only experts or other layers.
    """
    sides = [side for layer in layers.values() for call in layer.origins for side in (call.query, call.key, call.value)]
    names = set().union(*map(_parameters_of, sides))
    for axis in axes:
        names = set().union(*axis.gathered(names))
    return [Axis(axis.group, axis.cut & names) for axis in axes]


def _parameters_of(side: Origin | None) -> set[str]:
    try:
        return set() if side is None else {source.parameter for source in side.sources()}
    except UntraceableError:  # its heads will be skipped for this reason
        return set()


def data_parallel_group(model: nn.Module) -> "dist.ProcessGroup | None":
    """Return the process group of a DDP module that is, contains or wraps the model."""
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    first = next(model.parameters(), None)
    if not wrappers and first is not None and dist.get_world_size() > 1:
        wrappers = [
            each
            for each in gc.get_objects()
            if issubclass(type(each), DistributedDataParallel) and any(first is held for held in each.parameters())
        ]
    return wrappers[0].process_group if wrappers else None


def _placed(model: nn.Module) -> Iterator[tuple[str, "dist.ProcessGroup", bool]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_sharded(parameter):
            mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
            for axis, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
                yield name, mesh.get_group(axis), not placement.is_replicate()


def _ranks(group: "dist.ProcessGroup") -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


@dataclass(frozen=True)
class LayerHeads:
    """The heads of a layer, and the origins of their queries, keys and values; can be pickled for other ranks."""

    heads: int
    softcap: float | None
    origins: tuple[Origins, ...]


def agreed_layers(axes: Sequence[Axis], own: Mapping[str, LayerHeads]) -> dict[str, LayerHeads]:
    """Return the union of the layers of all ranks, over the axes along which all compute the same heads."""
    layers = dict(own)
    for axis in (each for each in axes if not each.cut):
        if not axis.all_same(pickle.dumps([(name, layer.heads) for name, layer in layers.items()])):
            told = sorted(axis.gathered(layers), key=len, reverse=True)
            layers = {name: layer for each in reversed(told) for name, layer in each.items()}
            layers = {name: layers[name] for each in told for name in each}
    return layers


@dataclass(frozen=True, eq=False)
class Slots:
    """Slots for the heads of all ranks, concatenated over the ranks that compute different heads."""

    axes: Sequence[Axis]
    own: slice  # slots of this rank's heads
    known: Floats  # (numbers, slots), gathered from all ranks

    @classmethod
    def of(cls, axes: Sequence[Axis], known: Floats) -> "Slots":
        """Gather the numbers of every rank's own heads, (numbers, heads)."""
        place = tuple(dist.get_rank(axis.group) for axis in axes if axis.cut)
        told = {place: known}
        for axis in (axis for axis in axes if axis.cut):
            told = {where: numbers for each in axis.gathered(told) for where, numbers in each.items()}
        parts = [told[where] for where in sorted(told)]
        first = sum(part.shape[1] for where, part in sorted(told.items()) if where < place)
        return cls(axes, slice(first, first + known.shape[1]), np.concatenate(parts, axis=1))

    @property
    def count(self) -> int:
        """Number of heads on all ranks."""
        return int(self.known.shape[1])

    @cached_property
    def _groups(self) -> "list[dist.ProcessGroup | None]":
        """Groups over which numbers are reduced; the default group if the axes span all ranks."""
        sizes = [dist.get_world_size(axis.group) for axis in self.axes]
        if len(sizes) > 1 and prod(sizes) == dist.get_world_size():
            return [None]
        return [axis.group for axis in self.axes]

    def largest(self, own: Tensor) -> Tensor:
        """Return the maximum over ranks for each slot, from the numbers of this rank's own heads, (…, heads)."""
        if not self.axes:
            return own
        every = own.new_full((*own.shape[:-1], self.count), -torch.inf)
        every[..., self.own] = own
        return self.reduced_(every, "max")

    def reduced_(self, numbers: Tensor, how: Literal["sum", "max"]) -> Tensor:
        """Return the sum or the maximum over all ranks."""
        for group in self._groups:
            dist.all_reduce(numbers, dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX, group=group)
        return numbers


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the parameters."""
    first: Tensor | None = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device
