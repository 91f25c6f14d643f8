"""By what the queries and keys of each head are made: a head whose parameters are as before moves with its input."""

import hashlib
from collections.abc import Mapping

import numpy as np
from torch import Tensor, nn

from attnscale.module_paths import without_wrappers
from attnscale.tracing.parameters import Origin, UntraceableError
from attnscale.watching.layer import Layer


def made_by(model: nn.Module, layers: Mapping[str, Layer]) -> dict[str, tuple[str, ...]]:
    """A digest for every head of every layer; empty where its parameters could not be followed."""
    parameters = {without_wrappers(name): tensor for name, tensor in model.named_parameters(remove_duplicate=False)}
    modules = {layer.module for layer in layers.values()}
    return {name: _heads(layer, parameters, modules) for name, layer in layers.items()}


def _heads(layer: Layer, parameters: Mapping[str, Tensor], modules: set[str]) -> tuple[str, ...]:
    sides = [side for call in layer.origins[:1] for side in (call.query, call.key)]
    try:
        if not all(map(_is_here, parameters.values())):
            return ("",) * layer.heads
        if len(sides) != 2 or layer.wiring.normalised:  # behind a norm the gain stands for the weight
            raise UntraceableError
        rows = [_rows(side, layer.heads, parameters) for side in sides if side is not None]
        if len(rows) != 2:
            raise UntraceableError
    except (UntraceableError, KeyError):
        rows = []
    followed = {name for side in rows for head in side for name in head}
    others = _others(layer, parameters, modules, followed)
    if others is None or (not rows and not others):
        return ("",) * layer.heads
    sided = [
        {f"{number} {name}": values for number, side in enumerate(rows) for name, values in side[head].items()}
        for head in range(layer.heads)
    ]
    return tuple(_digest(layer, others | own) for own in sided)


def _is_here(parameter: Tensor) -> bool:
    """Whether it has its numbers: those of a model larger than memory have them while they are used."""
    return not parameter.is_meta and (parameter.untyped_storage().nbytes() > 0 or parameter.numel() == 0)


def _rows(origin: Origin, heads: int, parameters: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Of each query head, the rows of parameters that make it."""
    found: list[dict[str, Tensor]] = [{} for _ in range(origin.heads)]
    for source in origin.sources():
        values = parameters[source.parameter].detach()
        kept = [axis for axis in range(values.dim()) if axis not in source.across]
        flat = values.permute(*kept, *source.across).reshape(int(np.prod([values.shape[axis] for axis in kept])), -1)
        for head in range(origin.heads):
            own = np.unique(source.rows[source.heads == head])
            found[head][source.parameter] = flat[own.tolist()]
    return [found[head * origin.heads // heads] for head in range(heads)]


def _others(
    layer: Layer, parameters: Mapping[str, Tensor], modules: set[str], followed: set[str]
) -> dict[str, Tensor] | None:
    """What else its module holds; None where that holds other attentions, or is not known."""
    prefix = f"{layer.module}." if layer.module else ""
    if any(other != layer.module and other.startswith(prefix) for other in modules):
        return {} if followed else None
    own = {name: tensor.detach() for name, tensor in parameters.items() if name.startswith(prefix)}
    return {name: tensor for name, tensor in own.items() if name not in followed}


def _digest(layer: Layer, values: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(repr((layer.softcap, layer.causal)).encode())
    for name in sorted(values):
        tensor = values[name]
        found.update(f"{name}{tuple(tensor.shape)}".encode("utf-8", "replace"))
        found.update(tensor.double().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
