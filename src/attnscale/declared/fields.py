"""One field of a module or of a configuration, whether that is an object or a mapping."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

# Where a QK-norm is turned on, in a configuration and in a module alike.
QK_NORM_FLAGS = (
    "use_qk_norm", "qk_norm", "qk_layernorm", "qk_layer_norm", "use_qk_layernorm", "qk_layer_norms", "normalize_qk",
    "qk_normalization",
)  # fmt: skip


def field(holder: object, name: str) -> Any:
    """The field of this name; None where there is none."""
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def number(holder: object, name: str) -> float | None:
    """A field that is one finite number, also as a tensor of one element."""
    value = field(holder, name)
    if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point() and not value.is_meta:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def qk_norm_flag(holder: object) -> str | None:
    """The flag that turns a QK-norm on. A norm that was built is watched, not read here."""
    return next((name for name in QK_NORM_FLAGS if field(holder, name) is True), None)


def field_names(holder: object) -> list[str]:
    """The names of all fields, in order."""
    if isinstance(holder, Mapping):
        return sorted(map(str, holder))
    return sorted({*getattr(holder, "__dict__", {}), *getattr(holder, "__dataclass_fields__", {})})
