"""What the arguments of each fused attention kernel mean."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnscale.tracing.coordinates import sliced, transposed
from attnscale.tracing.lineage import Ledger, Node
from attnscale.tracing.operations import moved
from attnscale.tracing.parameters import Origins, projected_origin
from attnscale.watching.kernels.kernel import Kernel


def recognised(name: str) -> bool:
    """Whether an operation is an attention kernel."""
    return name in READERS or name.startswith("aten::_scaled_dot_product_")


def kernel_calls(ledger: Ledger, name: str, given: dict[str, Any]) -> Iterator[Kernel]:
    """The attentions that a call of a kernel computes; `given` are its arguments by name."""
    reader = READERS.get(name, _sdpa)
    return reader(ledger, given)


def _sdpa(ledger: Ledger, given: dict[str, Any]) -> Iterator[Kernel]:
    query, key = given["query"], given["key"]
    mask = given.get("attn_mask") if given.get("attn_mask") is not None else given.get("attn_bias")
    scale = given.get("scale")
    if query.dim() == 4:
        yield Kernel(
            "sdpa", query, key, query.shape[-1] ** -0.5 if scale is None else float(scale), ledger.node(query),
            ledger.node(key), mask, bool(given.get("is_causal")), value_node=ledger.node(given["value"]),
        )  # fmt: skip


def _flash(ledger: Ledger, given: dict[str, Any]) -> Iterator[Kernel]:
    """flash-attn: (batch, positions, heads, features), causal aligned to the last key."""
    yield _flash_kernel(given, *(ledger.node(given[name]) for name in ("q", "k", "v")))


def _flash_varlen(ledger: Ledger, given: dict[str, Any]) -> Iterator[Kernel]:
    """flash-attn over sequences laid end to end."""
    starts = {name: given[f"cu_seqlens_{name}"].tolist() for name in ("q", "k")}
    starts["v"] = starts["k"]
    for number in range(len(starts["q"]) - 1):
        parts = {name: slice(*starts[name][number : number + 2]) for name in starts}
        one = {**given, **{name: given[name][None, part] for name, part in parts.items()}}
        if one["q"].numel() and one["k"].numel():
            yield _flash_kernel(one, *(_part(ledger.node(given[name]), part) for name, part in parts.items()))


def _flash_kernel(given: dict[str, Any], query: Node, key: Node, value: Node) -> Kernel:
    turned = {name: given[name].transpose(1, 2) for name in ("q", "k")}
    return Kernel(
        "flash",
        turned["q"],
        turned["k"],
        float(given["softmax_scale"]),
        _turned(query),
        _turned(key),
        _window(turned["q"], turned["k"], bool(given.get("causal")), given),
        softcap=given.get("softcap") or None,
        value_node=_turned(value),
    )


def _part(node: Node, part: slice) -> Node:
    """One sequence of those laid end to end, as a batch of its own."""
    back = sliced(0, part.start)
    return moved(node, (1, part.stop - part.start, *node.shape[1:]), lambda points: back(points[:, 1:]))


def _turned(node: Node) -> Node:
    batch, length, heads, width = node.shape
    return moved(node, (batch, heads, length, width), transposed(4, 1, 2))


def _window(query: Tensor, key: Tensor, causal: bool, given: dict[str, Any]) -> Tensor | None:
    left, right = given.get("window_size_left", -1), 0 if causal else given.get("window_size_right", -1)
    if left is None or (left < 0 and right < 0):
        return None
    rows = torch.arange(query.shape[-2], device=query.device)[:, None] + key.shape[-2] - query.shape[-2]
    columns = torch.arange(key.shape[-2], device=query.device)
    shown = torch.ones(len(rows), len(columns), dtype=torch.bool, device=query.device)
    shown = shown if left < 0 else shown & (columns >= rows - left)
    return shown if right < 0 else shown & (columns <= rows + right)


def _native(ledger: Ledger, given: dict[str, Any]) -> Iterator[Kernel]:
    """torch's own fast path of nn.MultiheadAttention, which projects inside."""
    heads, weight, bias = given["num_head"], given["qkv_weight"], given["qkv_bias"]
    width = weight.shape[1]
    query = F.linear(given["query"], weight[:width], bias[:width])
    key = F.linear(given["key"], weight[width : 2 * width], bias[width : 2 * width])
    for kernel in _projected_inside(query, key, heads, given.get("mask"), given.get("mask_type")):
        yield replace(kernel, origins=_packed_origins(ledger, weight, bias, heads))


def _encoder_layer(ledger: Ledger, given: dict[str, Any]) -> Iterator[Kernel]:
    """torch's own fast path of nn.TransformerEncoderLayer."""
    source, width = given["src"], given["embed_dim"]
    mask, mask_type = given.get("mask"), given.get("mask_type")
    if source.is_nested:
        lengths = torch.tensor([len(part) for part in source.unbind()], device=source.device)
        source = source.to_padded_tensor(0.0)
        beyond = torch.arange(source.shape[1], device=source.device) >= lengths[:, None]
        mask, mask_type = (beyond[:, None, :] | beyond[:, :, None]).unsqueeze(1), None
    if given["norm_first"]:
        source = F.layer_norm(source, (width,), given["norm_weight_1"], given["norm_bias_1"], given["eps"])
    packed = F.linear(source, given["qkv_weight"], given["qkv_bias"])
    query, key, _ = packed.chunk(3, dim=-1)
    for kernel in _projected_inside(query, key, given["num_heads"], mask, mask_type):
        origins = _packed_origins(ledger, given["qkv_weight"], given["qkv_bias"], given["num_heads"])
        yield replace(kernel, inside="self_attn", origins=origins)


def _packed_origins(ledger: Ledger, weight: Tensor, bias: Tensor | None, heads: int) -> Origins:
    """Queries, keys and values are thirds of the rows of one weight."""
    width, added = weight.shape[0] // 3, None if bias is None else ledger.node(bias)
    parts = (projected_origin(ledger.node(weight), added, third * width, heads, width // heads) for third in range(3))
    return Origins(*parts)


def _projected_inside(
    query: Tensor, key: Tensor, heads: int, mask: Tensor | None, mask_type: int | None
) -> Iterator[Kernel]:
    width = query.shape[-1]
    query, key = (tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (query, key))
    if mask is not None:
        shown = ~mask.to(torch.bool)  # true, or −∞, hides
        mask = shown[:, None, None, :] if mask_type == 1 and shown.dim() == 2 else shown
    yield Kernel("fast path", query, key, query.shape[-1] ** -0.5, mask=mask, width=width)


READERS: dict[str, Callable[[Ledger, dict[str, Any]], Iterator[Kernel]]] = {
    "aten::_native_multi_head_attention": _native,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "attnscale::attention_rows": _sdpa,
    "flash_attn::_flash_attn_forward": _flash,
    "flash_attn::_flash_attn_varlen_forward": _flash_varlen,
}


def flex_call(ledger: Ledger, args: tuple[Any, ...]) -> Kernel:
    """FlexAttention: query, key, value, score_mod, block_mask, scale, options, buffers of both functions."""
    query, key, value, score_mod, block_mask, scale, _, score_buffers, mask_buffers = args
    mask_mod = block_mask[-1]

    def modify(scores: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        batch, heads, _, keys = scores.shape
        at = [torch.arange(size, device=scores.device) for size in (batch, heads, 0, keys)]
        at[2] = positions.to(scores.device)
        score = _over_all(lambda s, b, h, i, j: score_mod(s, b, h, i, j, *score_buffers), scored=True)
        shown = _over_all(lambda b, h, i, j: mask_mod(b, h, i, j, *mask_buffers), scored=False)
        visible = shown(*at).expand(batch, heads, -1, -1)
        changed = score(scores, *at)
        return changed, visible & (changed != -math.inf)

    return Kernel(
        "flex", query, key, float(scale), ledger.node(query), ledger.node(key), score_mod=modify,
        value_node=ledger.node(value),
    )  # fmt: skip


def _over_all(function: Callable[..., Tensor], scored: bool) -> Callable[..., Tensor]:
    """A function of one score and four indices -> the same for all of them."""
    lead = (0,) if scored else ()
    for axis in range(3, -1, -1):
        indices = tuple(0 if at == axis else None for at in range(4))
        function = torch.vmap(function, in_dims=(*lead, *indices), out_dims=0)
    return function
