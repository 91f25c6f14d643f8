"""Read fields of modules and configurations, and list the parents of an attention module."""

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from attnscale.module_paths import modules_by_path

Parents = list[tuple[str, nn.Module]]  # paths and modules: a module, its parent, …, the model
# Fields of a configuration or a module that enable a QK-norm.
QK_NORM_FLAGS = (
    "use_qk_norm", "qk_norm", "qk_layernorm", "qk_layer_norm", "use_qk_layernorm", "qk_layer_norms", "normalize_qk",
    "qk_normalization",
)  # fmt: skip


def field(holder: object, name: str) -> Any:
    """Return the field of this name of an object or a mapping; None if there is none."""
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def number(holder: object, name: str) -> float | None:
    """Return a field that is a finite number or a tensor with one element; None for anything else."""
    value = field(holder, name)
    if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point() and not value.is_meta:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def positive(holder: object, name: str) -> float | None:
    """Return a field that is a positive number; None for anything else."""
    value = number(holder, name)
    return value if value is not None and value > 0 else None


def field_names(holder: object) -> list[str]:
    """Return the names of all fields in order."""
    if isinstance(holder, Mapping):
        return sorted(map(str, holder))
    return sorted({*getattr(holder, "__dict__", {}), *getattr(holder, "__dataclass_fields__", {})})


def parents_of(model: nn.Module, path: str) -> Parents:
    """Return the module at `path` and its parents up to the model; stop where the path does not exist."""
    modules, parts = modules_by_path(model), path.split(".") if path else []
    names = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
    return [(name, modules[name]) for name in names if name in modules]


def attentions_among(parents: Parents) -> Parents:
    """Return the module that computes the attention, and its nearest parents that are attention classes too."""
    for depth, (_, module) in enumerate(parents):
        kind = type(module).__name__.lower()
        if depth and not ("attention" in kind or "attn" in kind):
            return parents[:depth]
    return parents


def layer_index(parents: Parents) -> int | None:
    """Return the layer number of a module: its `layer_idx`, else the last number in its path."""
    for _, module in parents:
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            return index
    numbers = re.findall(r"(?<![^.])\d+(?![^.])", parents[0][0])
    return int(numbers[-1]) if numbers else None
