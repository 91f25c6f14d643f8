"""Torch's fused kernels, given what they need so that they do not fall back to the full matrix."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from attnscale.attending.call import Call, padded
from attnscale.numerics import HALF_DTYPES
from attnscale.torch_internals import sizes_vary
from attnscale.visibility import Visibility

MASK_ROWS = 512
CUDA_ALIGNMENT = 8  # the CUDA kernels take head dimensions that are multiples of this,
CUDA_GROUPED_WIDTH = 256  # and groups of queries in half precision, up to this head dimension


def materialises(call: Call) -> bool:
    """Return True if torch has no fused kernel for this and would form the full matrix of scores."""
    if call.query.device.type == "cpu":
        return call.dropout_p > 0.0 or call.mask_learns
    return call.query.device.type == "cuda" and call.query.dtype == torch.float64


def takes_whole(call: Call) -> bool:
    """Return True if all rows run at once: no mask has to be made, and none of booleans is long, which torch copies."""
    seen, mask = call.visibility, call.visibility.mask
    if seen.is_plain or mask is None or mask.dtype != torch.bool:
        return seen.is_plain or seen.is_mask
    return seen.is_mask and (mask.shape[-2] <= MASK_ROWS or sizes_vary(mask.shape[-2]))


def attend(call: Call) -> Tensor:
    """Return F.scaled_dot_product_attention, given what keeps its fused kernels fused and their memory linear."""
    if takes_whole(call):
        return _attend(call)
    # torch turns a boolean mask into floats as a whole; a block of rows at a time keeps that copy small.
    q_len = call.query.shape[-2]
    if sizes_vary(q_len):  # a loop would fix the length
        return _attend(_rows(call, slice(0, q_len)))
    starts = range(0, max(q_len, 1), MASK_ROWS)
    return torch.cat([_attend(_rows(call, slice(start, min(start + MASK_ROWS, q_len)))) for start in starts], dim=-2)


def _rows(call: Call, rows: slice) -> Call:
    """Return these rows, with the keys that they may see and a mask of those that they do."""
    seen = call.visibility
    keys = seen.span(rows.start, rows.stop - 1, call.key.shape[-2])
    query, key, value = call.query[..., rows, :], call.key[..., keys, :], call.value[..., keys, :]
    mask = seen.shown(rows, keys, query.device) if seen.bias is None else seen.added(rows, keys, query)
    return replace(call, query=query, key=key, value=value, visibility=Visibility(mask=mask))


def _attend(call: Call) -> Tensor:
    query, key, value = call.query, call.key, call.value
    grouped = call.grouped
    if grouped and not _takes_groups(query):
        key, value = (tensor.repeat_interleave(call.group, dim=1) for tensor in (key, value))
        grouped = False
    head_dim, value_dim = _widths(query, value)
    output = F.scaled_dot_product_attention(
        padded(query, head_dim),
        padded(key, head_dim),
        padded(value, value_dim),
        _mask(call),
        call.dropout_p,
        call.visibility.is_causal,
        scale=call.scale,
        enable_gqa=grouped,
    )
    return output[..., : value.shape[-1]]


def _mask(call: Call) -> Tensor | None:
    """Return the mask in the query's precision if that is double: the CPU's kernel reads a single one wrong."""
    bias = call.visibility.bias
    return call.visibility.mask if bias is None or call.query.dtype != torch.float64 else bias.double()


def _takes_groups(query: Tensor) -> bool:
    narrow = query.shape[-1] <= CUDA_GROUPED_WIDTH
    return query.device.type != "cuda" or (query.dtype in HALF_DTYPES and narrow)


def _widths(query: Tensor, value: Tensor) -> tuple[int, int]:
    """Return the head dimensions that the device's fused kernels take."""
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if query.device.type == "cpu":  # one width for all
        return max(head_dim, value_dim), max(head_dim, value_dim)
    if query.device.type == "cuda":
        return _aligned(head_dim), _aligned(value_dim)
    return head_dim, value_dim


def _aligned(width: int) -> int:
    return -(-width // CUDA_ALIGNMENT) * CUDA_ALIGNMENT
