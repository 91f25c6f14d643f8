"""Readers of fused attention kernels: one file per library, one reader per kernel."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from attnscale.numerics import constant_on
from attnscale.torch_internals import has_kernel, schema_of
from attnscale.tracing.coordinates import Points, grid
from attnscale.tracing.following import channels
from attnscale.tracing.lineage import Lineage, Node, moved
from attnscale.watching.axes import heads_of
from attnscale.watching.kernels import flash, sdpa
from attnscale.watching.kernels.kernel_call import KernelCall

__all__ = ["KernelCall", "OpTraits", "kernel_calls", "traits_of"]

DEVICES = ("cpu", "cuda")
NODES = ("query_node", "key_node", "value_node")  # lineages in a KernelCall
Reader = Callable[[Lineage, dict[str, Any]], Iterator[KernelCall]]

# By operation name; a final star matches any ending.
READERS: dict[str, Reader] = {
    "aten::_scaled_dot_product_*": sdpa.sdpa,
    "attnscale::attention_rows": sdpa.attention_rows,
    "aten::_native_multi_head_attention": sdpa.multi_head_attention,
    "aten::_transformer_encoder_layer_fwd": sdpa.encoder_layer,
    "flash_attn::_flash_attn_forward": flash.flash,
    "flash_attn::_flash_attn_varlen_forward": flash.flash,
    "torch_attn::_varlen_attn": flash.flash,
    "aten::_flash_attention_forward": flash.flash,
    "aten::_efficient_attention_forward": flash.efficient,
    "flex_attention": sdpa.flex,
}
# Argument names of operations without a schema.
ARGUMENTS = {"flex_attention": sdpa.ARGUMENTS}


def kernel_calls(lineage: Lineage, name: str, args: dict[str, Any]) -> Iterator[KernelCall]:
    """Return the attentions that a kernel call computes; `args` holds its arguments and results by name."""
    reader = _reader(name)
    return iter(()) if reader is None else map(with_heads_on_their_axis, reader(lineage, args))


def _reader(name: str) -> Reader | None:
    return next((reader for pattern, reader in READERS.items() if fnmatchcase(name, pattern)), None)


@dataclass(frozen=True)
class OpTraits:
    """Cached properties of an operation, needed each time it runs."""

    full_name: str = ""
    name: str = ""  # without namespace or in-place underscore; empty: not read
    arguments: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    is_composite: bool = False  # composed of other operations; not decomposed in inference mode
    fused_on: frozenset[str] = frozenset()  # devices with one kernel for it, which rounds differently
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


def with_heads_on_their_axis(call: KernelCall) -> KernelCall:
    """Return the call with heads on the second axis; unchanged if heads have that axis already or cannot be located."""
    node = call.query_node
    if node is None or len(node.shape) != 4 or not all(node.shape) or call.visibility.documents is not None:
        return call
    batch, kernel_heads = node.shape[:2]
    ends = grid(batch, 1, 1, 1)[[0, min(1, batch - 1), batch - 1]]
    if len(set(channels(node, ends))) == 1:
        return call
    found = channels(node, grid(batch, kernel_heads, 1, 1))
    places = None if () in found else heads_of(found)
    if places is None:
        return call

    def by_head(tensor: Tensor) -> Tensor:
        """Return a tensor as (batch, heads, …), with keys repeated for each query head."""
        each = tensor.repeat_interleave(kernel_heads // tensor.shape[1], 1).flatten(0, 1)
        return each[constant_on(tensor.device, places)]

    def node_by_head(node: Node) -> Node:
        share = kernel_heads // node.shape[1]

        def back(points: Points) -> Points:
            entry, head = np.divmod(places[points[:, 0], points[:, 1]], kernel_heads)
            return np.stack([entry, head // share, points[:, 2], points[:, 3]], axis=1)

        return moved(node, (*places.shape, *node.shape[2:]), back)

    reordered: dict[str, Any] = {}
    for name in ("query", "key", "value", "lse", *NODES):
        given = getattr(call, name)
        if given is not None:
            reordered[name] = node_by_head(given) if name in NODES else by_head(given)
    mask, visibility = call.visibility.mask, call.visibility
    if mask is not None and mask.shape[:-2].numel() > 1:
        visibility = replace(visibility, mask=by_head(mask.expand(batch, kernel_heads, *mask.shape[-2:])))
    return replace(call, **reordered, visibility=visibility, heads_in_batch=(call.query, call.key, by_head))
