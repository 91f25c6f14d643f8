"""Which operations are fused attention kernels, and what their arguments mean; a library a file, a line a kernel."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from attnscale.torch_internals import has_kernel, schema_of
from attnscale.tracing.lineage import Ledger
from attnscale.watching.kernels import flash, flex, sdpa
from attnscale.watching.kernels.heads_in_batch import with_heads_on_their_axis
from attnscale.watching.kernels.kernel_call import KernelCall

__all__ = ["KernelCall", "OpTraits", "kernel_calls", "traits_of"]

DEVICES = ("cpu", "cuda")
Reader = Callable[[Ledger, dict[str, Any]], Iterator[KernelCall]]

# By the name of an operation; what begins with one that ends in a star is meant too.
READERS: dict[str, Reader] = {
    "aten::_scaled_dot_product_*": sdpa.sdpa,
    "aten::scaled_dot_product_attention": sdpa.sdpa,  # of nested tensors, which arrives whole
    "attnscale::attention_rows": sdpa.sdpa,
    "attnscale::one_pass": sdpa.one_pass,
    "aten::_native_multi_head_attention": sdpa.multi_head_attention,
    "aten::_transformer_encoder_layer_fwd": sdpa.encoder_layer,
    "flash_attn::_flash_attn_forward": flash.flash,
    "flash_attn::_flash_attn_varlen_forward": flash.flash_varlen,
    "torch_attn::_varlen_attn": flash.varlen,
    "aten::_flash_attention_forward": flash.varlen,
    "aten::_efficient_attention_forward": flash.efficient,
    "flex_attention": flex.flex,
}
# Of operations that have no schema to tell the names of their arguments.
ARGUMENTS = {"flex_attention": flex.ARGUMENTS}


def kernel_calls(ledger: Ledger, name: str, given: dict[str, Any]) -> Iterator[KernelCall]:
    """Return the attentions that a call of a kernel computes; `given` are its arguments and results by name."""
    reader = _reader(name)
    return iter(()) if reader is None else map(with_heads_on_their_axis, reader(ledger, given))


def _reader(name: str) -> Reader | None:
    begun = (reader for known, reader in READERS.items() if known.endswith("*") and name.startswith(known[:-1]))
    return READERS.get(name) or next(begun, None)


@dataclass(frozen=True)
class OpTraits:
    """Properties of an operation that are needed every time it runs."""

    full_name: str = ""
    name: str = ""  # without namespace, and without the underscore of in-place forms; empty: not read
    arguments: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    is_composite: bool = False  # made of other operations; in inference mode such ones arrive whole
    fused_on: frozenset[str] = frozenset()  # devices where it is one kernel all the same, which rounds otherwise
    is_mutable: bool = False
    is_kernel: bool = False


@cache
def traits_of(function: Any) -> OpTraits:
    """Return the traits of an operation."""
    schema = schema_of(function)
    if schema is None:
        name = str(function)
        return OpTraits(name, arguments=ARGUMENTS.get(name, ()), is_kernel=_reader(name) is not None)
    space, _, name = schema.name.partition("::")
    name = name if name.startswith("__") else name.removesuffix("_")
    return OpTraits(
        f"{space}::{name}",
        name,
        tuple(argument.name for argument in schema.arguments),
        tuple(result.name for result in schema.returns),
        has_kernel(function, "CompositeImplicitAutograd"),
        frozenset(device for device in DEVICES if has_kernel(function, device.upper())),
        schema.is_mutable,
        _reader(f"{space}::{name}") is not None,
    )
