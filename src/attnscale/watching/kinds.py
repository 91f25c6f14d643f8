"""What is asked of an operation every time it runs, asked once."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from attnscale.watching.fused import recognised


@dataclass(frozen=True)
class Kind:
    """What is asked of an operation every time it runs."""

    full_name: str = ""
    name: str = ""  # without namespace, and without the underscore of in-place forms; empty: not read
    arguments: tuple[str, ...] = ()
    is_composite: bool = False  # made of other operations; in inference mode such ones arrive whole
    is_mutable: bool = False
    is_kernel: bool = False
    is_flex: bool = False


@cache
def kind_of(func: Any) -> Kind:
    """The kind of an operation."""
    if not isinstance(func, torch._ops.OpOverload):
        return Kind(is_flex=str(func) == "flex_attention")
    schema = func._schema
    space, _, name = schema.name.partition("::")
    name = name if name.startswith("__") else name.removesuffix("_")
    return Kind(
        f"{space}::{name}",
        name,
        tuple(argument.name for argument in schema.arguments),
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
        schema.is_mutable,
        recognised(f"{space}::{name}"),
    )
