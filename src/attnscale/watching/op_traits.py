"""What is asked of an operation every time it runs, asked once."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from attnscale.watching.kernels.reading import recognised

DEVICES = ("cpu", "cuda")
SOFTMAXES = ("_softmax", "_safe_softmax", "softmax")


@dataclass(frozen=True)
class Kind:
    """What is asked of an operation every time it runs."""

    full_name: str = ""
    name: str = ""  # without namespace, and without the underscore of in-place forms; empty: not read
    arguments: tuple[str, ...] = ()
    is_composite: bool = False  # made of other operations; in inference mode such ones arrive whole
    fused_on: frozenset[str] = frozenset()  # devices where it is one kernel all the same, which rounds otherwise
    is_mutable: bool = False
    is_kernel: bool = False
    is_flex: bool = False
    may_attend: bool = False  # is a kernel or made of one perhaps, or the softmax of an attention written out


@cache
def kind_of(func: Any) -> Kind:
    """The kind of an operation."""
    if not isinstance(func, torch._ops.OpOverload):
        is_flex = str(func) == "flex_attention"
        return Kind(is_flex=is_flex, may_attend=is_flex)
    schema = func._schema
    space, _, name = schema.name.partition("::")
    name = name if name.startswith("__") else name.removesuffix("_")
    is_composite = _has_kernel(func, "CompositeImplicitAutograd")
    is_kernel = recognised(f"{space}::{name}")
    return Kind(
        f"{space}::{name}",
        name,
        tuple(argument.name for argument in schema.arguments),
        is_composite,
        frozenset(device for device in DEVICES if _has_kernel(func, device.upper())),
        schema.is_mutable,
        is_kernel,
        may_attend=is_composite or is_kernel or name in SOFTMAXES,
    )


def _has_kernel(func: Any, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))
