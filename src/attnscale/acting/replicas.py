"""Ranks with copies or shards of the same parameters, and the numbers that they exchange before they change any.

With data parallelism or FSDP2, ranks compute the same heads on different data. With tensor parallelism, they compute
different heads: some parameters are cut, and all others, such as the gain of a QK-norm or an uncut key, are equal on
every rank, although no placement says so. Those are not scaled, so these ranks clip their own heads independently.
"""

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from attnscale.acting.parameters import is_sharded
from attnscale.torch_internals import fsdp_groups
from attnscale.tracing.parameters import Origins, UntraceableError
from attnscale.watching.layer import Layer


@dataclass(frozen=True)
class LayerHeads:
    """The heads of a layer, and the origins of their queries, keys and values; can be pickled for other ranks."""

    heads: int
    softcap: float | None
    origins: tuple[Origins, ...]


def heads_of(layers: Mapping[str, Layer]) -> dict[str, LayerHeads]:
    """Return the heads of each layer."""
    found = {}
    for name, layer in layers.items():
        calls = [(call.query, call.key, call.value) for call in layer.origins]
        origins = tuple(Origins(*(side and side.resolved() for side in sides)) for sides in calls)
        found[name] = LayerHeads(layer.heads, layer.softcap, origins)
    return found


@dataclass(frozen=True, eq=False)
class Replicas:
    """Groups of ranks that compute the same heads as this rank.

    `cuts` has one entry for each group of ranks that compute different heads: the names of the parameters that produce
    heads and are cut over the group.
    """

    groups: "tuple[dist.ProcessGroup, ...]" = ()
    cuts: tuple[frozenset[str], ...] = ()

    @property
    def is_first(self) -> bool:
        """True on one rank of each group, which warns and logs for all."""
        return all(dist.get_rank(group) == 0 for group in self.groups)

    @property
    def has_other_ranks(self) -> bool:
        """True if the model runs on several ranks."""
        return bool(self.groups or self.cuts)

    def gathered(self, own: Any) -> list[Any]:
        """Gather an object from every rank, in an order that is the same on all of them."""
        return _gathered(self.groups, own)

    def reduced_(self, numbers: Tensor, how: Literal["sum", "max"]) -> Tensor:
        """Return the sum or the maximum over all ranks."""
        spans_all = len(self.groups) > 1 and prod(map(dist.get_world_size, self.groups)) == dist.get_world_size()
        for group in [None] if spans_all else self.groups:
            dist.all_reduce(numbers, dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX, group=group)
        return numbers

    def agreed_layers(self, own: Mapping[str, LayerHeads]) -> dict[str, LayerHeads]:
        """Return the union of the layers of all ranks, in the same order on all of them."""
        names = self.gathered([(name, layer.heads) for name, layer in own.items()])
        if all(each == names[0] for each in names):
            return dict(own)
        layers: dict[str, LayerHeads] = {}
        for of_rank in self.gathered(dict(own)):
            layers |= {name: layer for name, layer in of_rank.items() if name not in layers}
        return layers


def _gathered(groups: "tuple[dist.ProcessGroup, ...]", own: Any) -> list[Any]:
    found = [own]
    for group in groups:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, found, group=group)
        found = [each for part in parts for each in part]
    return found


def replicas_of(model: nn.Module, group: "dist.ProcessGroup | None", layers: Mapping[str, Layer]) -> Replicas:
    """Return the ranks of a model, including those of `group`; every rank must call it."""
    if not (dist.is_available() and dist.is_initialized()):
        return Replicas()
    copied = [each for each in (group, data_parallel_group(model)) if each is not None]
    copied += [each for module in model.modules() for each in fsdp_groups(module)]
    found: dict[tuple[int, ...], tuple[dist.ProcessGroup, set[str]]] = {}
    for name, along, is_cut in _placed(model):
        _, cut = found.setdefault(_ranks(along), (along, set()))
        if is_cut:
            cut.add(name)
    for each in copied:
        found[_ranks(each)] = (each, set())
    several = {ranks: each for ranks, each in found.items() if len(ranks) > 1}
    # Ranks that distribute only experts or other layers have copies of the heads.
    names = set().union(*_gathered(tuple(each for each, _ in several.values()), _parameters_of(layers)))
    cuts = tuple(frozenset(cut & names) for _, cut in several.values() if cut & names)
    return Replicas(tuple(each for each, cut in several.values() if not cut & names), cuts)


def _parameters_of(layers: Mapping[str, Layer]) -> set[str]:
    """Return the names of the parameters that produce heads."""
    names: set[str] = set()
    calls = [call for layer in layers.values() for call in layer.origins]
    for side in [side for call in calls for side in (call.query, call.key, call.value)]:
        try:
            names |= set() if side is None else {source.parameter for source in side.sources()}
        except UntraceableError:  # its heads will be skipped for this reason
            continue
    return names


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
