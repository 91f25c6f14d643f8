"""Readers of fused attention kernels: one file per library, one reader per kernel."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnscale.torch_internals import has_kernel, schema_of
from attnscale.tracing.coordinates import Indices, Points, grid
from attnscale.tracing.following import channels
from attnscale.tracing.lineage import Lineage, Node, moved
from attnscale.visibility import Visibility
from attnscale.watching.kernels import flash, sdpa
from attnscale.watching.kernels.kernel_call import KernelCall

__all__ = ["KernelCall", "OpTraits", "kernel_calls", "traits_of"]

DEVICES = ("cpu", "cuda")
Reader = Callable[[Lineage, dict[str, Any]], Iterator[KernelCall]]

# By operation name; a final star matches any ending.
READERS: dict[str, Reader] = {
    "aten::_scaled_dot_product_*": sdpa.sdpa,
    "attnscale::attention_rows": sdpa.attention_rows,
    "aten::_native_multi_head_attention": sdpa.multi_head_attention,
    "aten::_transformer_encoder_layer_fwd": sdpa.encoder_layer,
    "flash_attn::_flash_attn_forward": flash.flash,
    "flash_attn::_flash_attn_varlen_forward": flash.flash_varlen,
    "torch_attn::_varlen_attn": flash.varlen,
    "aten::_flash_attention_forward": flash.varlen,
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
    by_prefix = (
        reader for pattern, reader in READERS.items() if pattern.endswith("*") and name.startswith(pattern[:-1])
    )
    return READERS.get(name) or next(by_prefix, None)


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
    """Return the call with heads on the second axis; unchanged if they are there or cannot be located."""
    node = call.query_node
    if node is None or len(node.shape) != 4 or not all(node.shape) or call.visibility.documents is not None:
        return call
    batch, heads = node.shape[:2]
    ends = grid(batch, 1, 1, 1)[[0, min(1, batch - 1), batch - 1]]
    if len(set(channels(node, ends))) == 1:
        return call
    entries_of: dict[tuple[object, ...], list[int]] = {}
    for number, channel in enumerate(channels(node, grid(batch, heads, 1, 1))):
        entries_of.setdefault(channel, []).append(number)
    if () in entries_of or len({len(entries) for entries in entries_of.values()}) > 1:
        return call
    order = _Order(heads, np.array(list(entries_of.values())).T)
    return replace(
        call,
        query=order.tensor(call.query),
        key=order.tensor(call.key),
        query_node=order.node(node),
        key_node=None if call.key_node is None else order.node(call.key_node),
        visibility=order.visibility(call.visibility, batch),
        value_node=None if call.value_node is None else order.node(call.value_node),
        value=None if call.value is None else order.tensor(call.value),
        lse=None if call.lse is None else order.tensor(call.lse),
        heads_in_batch=(call.query, call.key, order.tensor),
    )


@dataclass(frozen=True)
class _Order:
    """Position of each head of each batch entry in the kernel's merged (batch · heads) axis."""

    kernel_heads: int
    entries: Indices  # (batch, heads)

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor as (batch, heads, …), with keys repeated for each query head."""
        each = tensor.repeat_interleave(self.kernel_heads // tensor.shape[1], 1).flatten(0, 1)
        return each[torch.from_numpy(self.entries).to(tensor.device)]

    def node(self, node: Node) -> Node:
        """Return a node reordered to (batch, heads, …)."""
        share = self.kernel_heads // node.shape[1]

        def back(points: Points) -> Points:
            batch, head = np.divmod(self.entries[points[:, 0], points[:, 1]], self.kernel_heads)
            return np.stack([batch, head // share, points[:, 2], points[:, 3]], axis=1)

        return moved(node, (*self.entries.shape, *node.shape[2:]), back)

    def visibility(self, visibility: Visibility, batch: int) -> Visibility:
        """Return the visibility reordered to (batch, heads, …)."""
        mask = visibility.mask
        if mask is None or mask.shape[:-2].numel() == 1:
            return visibility
        return replace(visibility, mask=self.tensor(mask.expand(batch, self.kernel_heads, *mask.shape[-2:])))
