"""Ranks that hold the same parameters, or parts of them, and what they agree on before any is changed.

An axis is a group of ranks: along one that copies a model, or shards it as FSDP2 does, every rank computes the same
heads on data of its own; along one that shares out heads (tensor parallel) some parameters are cut, and all others,
a QK-norm's gain or a key that is left whole, are the same on every rank though no placement says so.
"""

import gc
import hashlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from attnscale.acting.writing import Change, is_sharded
from attnscale.torch_internals import fsdp_groups

Changes = dict[str, Change]
Maxima = dict[str, NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class Axis:
    """A group of ranks, and the parameters of which each computes with a part of its own."""

    group: "dist.ProcessGroup"
    cut: frozenset[str] = frozenset()

    def gathered(self, own: Any) -> list[Any]:
        """What every rank of it gives, in their order."""
        found = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, own, group=self.group)
        return found

    def all_same(self, own: bytes) -> bool:
        """Whether every rank gives the same."""
        return len(set(self.gathered(hashlib.blake2b(own, digest_size=16).digest()))) == 1


def axes_of(model: nn.Module, group: "dist.ProcessGroup | None") -> list[Axis]:
    """The axes of a model, and the group that was given; in one order on all ranks, whatever each of them saw."""
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


def data_parallel_group(model: nn.Module) -> "dist.ProcessGroup | None":
    """The group of the DDP that a model is, has inside, or is inside of: a module does not know what wraps it."""
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


def agreed_maxima(axes: Sequence[Axis], maxima: Maxima, device: torch.device) -> Maxima:
    """The largest numbers of every layer that any rank saw, over the axes along which all compute the same heads."""
    for axis in (each for each in axes if not each.cut):
        if axis.all_same(pickle.dumps([(name, values.shape) for name, values in maxima.items()])):
            maxima = _reduced(axis, maxima, device)
        else:  # some rank saw less than others
            maxima = _united(axis.gathered(maxima))
    return maxima


def _reduced(axis: Axis, maxima: Maxima, device: torch.device) -> Maxima:
    if not maxima:
        return maxima
    packed = torch.from_numpy(np.concatenate([values.ravel() for values in maxima.values()])).to(device)
    dist.all_reduce(packed, dist.ReduceOp.MAX, group=axis.group)
    parts = np.split(packed.cpu().numpy(), np.cumsum([values.size for values in maxima.values()])[:-1])
    return {name: part.reshape(values.shape) for part, (name, values) in zip(parts, maxima.items(), strict=True)}


def _united(of_ranks: list[Maxima]) -> Maxima:
    found: Maxima = {}
    for each in of_ranks:
        for name, values in each.items():
            known = found.get(name)
            fits = known is not None and known.shape == values.shape
            found[name] = np.maximum(known, values) if known is not None and fits else values
    return found


def agreed_changes(axes: Sequence[Axis], own: Changes, layers: int) -> Changes:
    """The changes that every rank makes: of what is the same on several ranks, all make those of the one that saw most.

    `layers` is how many this rank saw.
    """
    for axis in axes:
        common = {name: change for name, change in own.items() if name not in axis.cut}
        if axis.all_same(pickle.dumps(sorted((name, change.key) for name, change in common.items()))):
            continue
        told = axis.gathered((layers, common))
        ordered = [changes for _, changes in sorted(told, key=lambda each: -each[0])]
        united: Changes = {name: change for name, change in own.items() if name in axis.cut}
        for changes in ordered:
            for name, change in changes.items():
                united[name] = united[name].with_rows_of(change) if name in united else change
        own = united
    return own


def device_of(model: nn.Module) -> torch.device:
    """Where its parameters lie."""
    first: Tensor | None = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device
