"""Portraits: the statistics of every head of a model, sample by sample, to compare with those of another model."""

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attnscale.comparing.visible import VisibleKeys
from attnscale.diagnose import Audit
from attnscale.diagnose.finding import Finding
from attnscale.measure.statistics import STATISTICS
from attnscale.module_paths import without_wrappers
from attnscale.tracing.parameters import Origin, UntraceableError
from attnscale.watching.layer import Layer
from attnscale.watching.watch import watched
from attnscale.watching.watcher import Settings

Numbers = NDArray[np.float64]
Call = tuple[tuple[Any, ...], dict[str, Any]]

# Compared as ratios; shares, between 0 and 1, as differences.
RATIOS = ("spread", "scale_applied", "query_norm", "key_norm", "alignment", "query_gradient", "key_gradient")
SHARES = ("entropy_ratio", "jacobian_trace")
COMPARED = (*RATIOS[:5], *SHARES, *RATIOS[5:])
OF_STATS = ("spread", *SHARES)
OF_LAYERS = {"scale_applied": "scales", "query_norm": "query_norm", "key_norm": "key_norm", "alignment": "alignment"}
ONE_SEQUENCE = "The model was run on one sequence, so changes have no error. Use a batch of several sequences."


@dataclass(frozen=True)
class LayerPortrait:
    """One layer: arrays (samples, heads) by the name of their statistic, with NaN for a missing value."""

    samples: Mapping[str, Numbers]
    digests: tuple[str, ...] = ()  # for each head, of the parameters that make its queries and keys; empty: unknown
    visible: tuple[str, ...] = ()  # for each head, of the keys that each query sees; empty: unknown

    @property
    def heads(self) -> int:
        """Number of heads."""
        return next((int(numbers.shape[1]) for numbers in self.samples.values()), 0)

    @property
    def count(self) -> int:
        """Number of samples."""
        return next((int(numbers.shape[0]) for numbers in self.samples.values()), 0)


@dataclass(frozen=True)
class Portrait:
    """A model on several sequences, or the latest records of a run."""

    title: str
    fed: str  # a description of the samples
    layers: Mapping[str, LayerPortrait]
    findings: tuple[Finding, ...] = ()
    inputs: str = ""  # a digest of the inputs: samples of the same inputs are compared in pairs
    notes: tuple[str, ...] = ()


def portray(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    audit: Audit,
    *,
    title: str,
    fed: str,
    rows: int | None = None,
) -> Portrait:
    """Run every sequence of the batch alone, on `rows` rows per head (all if None); `audit` is of the whole batch."""
    calls = _split((tuple(args), dict(kwargs)))
    runs = [_watch(model, call, rows) for call in calls]
    if len(calls) > 1 and not _are_parts_of(audit.layers, runs):
        calls = [(tuple(args), dict(kwargs))]
        runs = [_watch(model, calls[0], rows)]
    digests = _digests_of(model, runs[0])
    visible = {name: _visible_digests(layer) for name, layer in audit.layers.items()}
    layers = {
        name: _layer([run[name] for run in runs if name in run], digests[name], visible.get(name, ()))
        for name in runs[0]
    }
    notes = (ONE_SEQUENCE,) if len(calls) == 1 else ()
    inputs = _digest({f"{number}": tensor for number, tensor in enumerate(_tensors(calls))})
    return Portrait(title, fed, layers, tuple(audit.findings), inputs, notes)


def _watch(model: nn.Module, call: Call, rows: int | None) -> Mapping[str, Layer]:
    with warnings.catch_warnings(), torch.no_grad(), watched(model, Settings(rows, may_be_empty=True)) as seen:
        warnings.simplefilter("ignore")  # the audit gave them before
        model(*call[0], **call[1])
    return seen.layers


def _visible_digests(layer: Layer) -> tuple[str, ...]:
    visible = VisibleKeys.of(layer)
    return () if visible is None else visible.digests(layer.heads)


def _layer(runs: Sequence[Layer], digests: tuple[str, ...], visible: tuple[str, ...]) -> LayerPortrait:
    numbers = {name: [STATISTICS[name].of(layer.stats) for layer in runs] for name in OF_STATS}
    numbers |= {name: [getattr(layer, attribute) for layer in runs] for name, attribute in OF_LAYERS.items()}
    return LayerPortrait(
        {name: np.stack([each.detach().double().cpu().numpy() for each in values]) for name, values in numbers.items()},
        digests,
        visible,
    )


def _are_parts_of(whole: Mapping[str, Layer], runs: Sequence[Mapping[str, Layer]]) -> bool:
    """Return True if the runs are of single sequences: as many queries and keys as in the batch, and none is lost."""
    for name, layer in whole.items():
        parts = [run[name] for run in runs if name in run]
        if {(part.heads, part.query_len, part.key_len) for part in parts} != {
            (layer.heads, layer.query_len, layer.key_len)
        }:
            return False
        if len(parts) < len(runs) or sum(part.queries for part in parts) != layer.queries:
            return False
    return True


def _split(call: Call) -> list[Call]:
    """Split a call into calls of single sequences if the first axes of all tensors are of the same size."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in _tensors(call)}
    if len(sizes) != 1 or (size := sizes.pop()) < 2:
        return [call]
    return [_part(call, slice(index, index + 1)) for index in range(size)]


def _part(value: Any, which: slice) -> Any:
    if isinstance(value, Tensor):
        return value[which]
    if type(value) is dict:
        return {name: _part(entry, which) for name, entry in value.items()}
    return type(value)(_part(entry, which) for entry in value) if type(value) in (list, tuple) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(entry)


def _digests_of(model: nn.Module, layers: Mapping[str, Layer]) -> dict[str, tuple[str, ...]]:
    """Return a digest of the parameters of every head, by layer; empty for parameters that cannot be followed."""
    parameters = {without_wrappers(name): tensor for name, tensor in model.named_parameters(remove_duplicate=False)}
    if any(parameter.is_meta for parameter in parameters.values()):  # a model that runs from disk
        return {name: ("",) * layer.heads for name, layer in layers.items()}
    modules = {layer.module for layer in layers.values()}
    return {name: _head_digests(layer, parameters, modules) for name, layer in layers.items()}


def _head_digests(layer: Layer, parameters: Mapping[str, Tensor], modules: set[str]) -> tuple[str, ...]:
    origins = [origin for call in layer.origins[:1] for origin in (call.query, call.key) if origin is not None]
    sides: list[list[dict[str, Tensor]]] = []
    if len(origins) == 2 and not layer.wiring.normalised:  # after a norm, its gain stands for the weight
        try:
            sides = [_rows_of_heads(origin, layer.heads, parameters) for origin in origins]
        except (UntraceableError, KeyError):
            sides = []
    followed = {name for side in sides for head in side for name in head}
    prefix = f"{layer.module}." if layer.module else ""
    if any(other != layer.module and other.startswith(prefix) for other in modules):
        shared: dict[str, Tensor] = {}  # the module holds other attention layers: what is theirs is unknown
    else:
        shared = {name: each for name, each in parameters.items() if name.startswith(prefix) and name not in followed}
    if not followed and not shared:
        return ("",) * layer.heads
    own = [
        {f"{number} {name}": values for number, side in enumerate(sides) for name, values in side[head].items()}
        for head in range(layer.heads)
    ]
    return tuple(_digest(shared | each, repr((layer.softcap, layer.causal))) for each in own)


def _rows_of_heads(origin: Origin, heads: int, parameters: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the rows of parameters that make each query head."""
    found: list[dict[str, Tensor]] = [{} for _ in range(origin.heads)]
    for source in origin.sources():
        values = parameters[source.parameter].detach()
        kept = [axis for axis in range(values.dim()) if axis not in source.across]
        flat = values.permute(*kept, *source.across).reshape(int(np.prod([values.shape[axis] for axis in kept])), -1)
        for head in range(origin.heads):
            own = np.unique(source.rows[source.heads == head])
            found[head][source.parameter] = flat[own.tolist()]
    return [found[head * origin.heads // heads] for head in range(heads)]


def _digest(values: Mapping[str, Tensor], start: str = "") -> str:
    found = hashlib.sha256(start.encode())
    for name in sorted(values):
        tensor = values[name].detach()
        found.update(f"{name}{tuple(tensor.shape)}".encode("utf-8", "replace"))
        found.update(tensor.double().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
