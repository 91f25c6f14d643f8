"""torch's own fast paths in evaluation mode, which project inside."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnscale.tracing.lineage import Ledger
from attnscale.tracing.parameters import Origins, projected_origin
from attnscale.visibility import Visibility
from attnscale.watching.kernels.kernel_call import KernelCall


def multi_head_attention(ledger: Ledger, given: dict[str, Any]) -> Iterator[KernelCall]:
    """torch's own fast path of nn.MultiheadAttention, which projects inside."""
    heads, weight, bias = given["num_head"], given["qkv_weight"], given["qkv_bias"]
    width = weight.shape[1]
    query = F.linear(given["query"], weight[:width], bias[:width])
    key = F.linear(given["key"], weight[width : 2 * width], bias[width : 2 * width])
    value = F.linear(given["value"], weight[2 * width :], bias[2 * width :])
    for kernel in _projected_inside(query, key, value, heads, given.get("mask"), given.get("mask_type")):
        own = given["query"] is given["key"]
        yield replace(kernel, attends_itself=own, origins=_packed_origins(ledger, weight, bias, heads))


def encoder_layer(ledger: Ledger, given: dict[str, Any]) -> Iterator[KernelCall]:
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
    query, key, value = packed.chunk(3, dim=-1)
    for kernel in _projected_inside(query, key, value, given["num_heads"], mask, mask_type):
        origins = _packed_origins(ledger, given["qkv_weight"], given["qkv_bias"], given["num_heads"])
        yield replace(kernel, inside="self_attn", attends_itself=True, origins=origins)


def _packed_origins(ledger: Ledger, weight: Tensor, bias: Tensor | None, heads: int) -> Origins:
    """Queries, keys and values are thirds of the rows of one weight."""
    width, added = weight.shape[0] // 3, None if bias is None else ledger.node(bias)
    parts = (projected_origin(ledger.node(weight), added, third * width, heads, width // heads) for third in range(3))
    return Origins(*parts)


def _projected_inside(
    query: Tensor, key: Tensor, value: Tensor, heads: int, mask: Tensor | None, mask_type: int | None
) -> Iterator[KernelCall]:
    width = query.shape[-1]
    query, key, value = (tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (query, key, value))
    if mask is not None:
        shown = ~mask.to(torch.bool)  # true, or −∞, hides
        mask = shown[:, None, None, :] if mask_type == 1 and shown.dim() == 2 else shown
    scale = query.shape[-1] ** -0.5
    yield KernelCall("fast path", query, key, scale, visibility=Visibility(mask=mask), width=width, value=value)
