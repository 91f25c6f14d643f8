"""What is asked of an operation every time it runs, asked once."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from attnscale.torch_internals import has_kernel, schema_of
from attnscale.tracing.operations import WHOLE, softmaxes
from attnscale.watching.kernels import ARGUMENTS, is_kernel

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class OpTraits:
    """What is asked of an operation every time it runs."""

    full_name: str = ""
    name: str = ""  # without namespace, and without the underscore of in-place forms; empty: not read
    arguments: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    is_composite: bool = False  # made of other operations; in inference mode such ones arrive whole
    fused_on: frozenset[str] = frozenset()  # devices where it is one kernel all the same, which rounds otherwise
    is_mutable: bool = False
    is_kernel: bool = False
    may_attend: bool = False  # is a kernel or made of one perhaps, or the softmax of an attention written out


@cache
def traits_of(function: Any) -> OpTraits:
    """The traits of an operation."""
    schema = schema_of(function)
    if schema is None:
        name = str(function)
        return OpTraits(name, arguments=ARGUMENTS.get(name, ()), is_kernel=is_kernel(name), may_attend=is_kernel(name))
    space, _, name = schema.name.partition("::")
    name = name if name.startswith("__") else name.removesuffix("_")
    is_composite, attends = has_kernel(function, "CompositeImplicitAutograd"), is_kernel(f"{space}::{name}")
    return OpTraits(
        f"{space}::{name}",
        name,
        tuple(argument.name for argument in schema.arguments),
        tuple(result.name for result in schema.returns),
        is_composite,
        frozenset(device for device in DEVICES if has_kernel(function, device.upper())),
        schema.is_mutable,
        attends,
        may_attend=(is_composite and name not in WHOLE) or attends or name in softmaxes.KERNELS,
    )
