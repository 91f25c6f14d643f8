"""A path -> the module there and those that hold it: where a model says anything of its attention."""

import re
from collections.abc import Iterator

from torch import nn

from attnscale.module_paths import modules_by_path

Parents = list[tuple[str, nn.Module]]  # a module and those that hold it, nearest first, with their paths


def parents_of(model: nn.Module, path: str) -> Parents:
    """The module at `path` and all that hold it, up to the model; what the path does not reach is left out."""
    return list(_parents(model, path))


def attentions_among(parents: Parents) -> Parents:
    """The module that computes the attention, and its parents for as long as they too call themselves attention."""
    for depth, (_, module) in enumerate(parents):
        kind = type(module).__name__.lower()
        if depth and not ("attention" in kind or "attn" in kind):
            return parents[:depth]
    return parents


def layer_index(parents: Parents) -> int | None:
    """Which layer of the stack a module belongs to: its own `layer_idx`, else the last number of its path."""
    for _, module in parents:
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            return index
    numbers = re.findall(r"(?<![^.])\d+(?![^.])", parents[0][0])
    return int(numbers[-1]) if numbers else None


def _parents(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    modules, parts = modules_by_path(model), path.split(".") if path else []
    for length in range(len(parts), -1, -1):
        name = ".".join(parts[:length])
        if name in modules:
            yield name, modules[name]
