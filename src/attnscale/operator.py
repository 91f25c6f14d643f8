"""The operator: scaled dot-product attention with any scale rule and an optional soft-cap."""

from dataclasses import replace

import torch
from torch import Tensor

from attnscale.attending import flex, row_blocks, sdpa
from attnscale.attending.call import Call, fold
from attnscale.attending.weights import row_weights
from attnscale.inputs import check_inputs
from attnscale.numerics import wide_dtype, without_autocast
from attnscale.rules.apply import Scale, apply_scale
from attnscale.shapes import attention_shape, scores_shape
from attnscale.visibility import Mask, Visibility


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Scale = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
) -> Tensor:
    """softmax(scale · QKᵀ + mask) V: `F.scaled_dot_product_attention` with any scale and an optional soft-cap.

    `scale` is None (1/√d_k), a number, a tensor that broadcasts to (…, heads, q_len, 1), a rule of
    `attnscale.rules` or its name; `softcap` bounds the scores to softcap · tanh(score / softcap) before the mask.
    It runs on torch's fused kernels, and never forms the full matrix of scores.

    >>> q = k = v = torch.eye(4)[None, None]
    >>> attention(q, k, v, scale="unscaled", is_causal=True)[0, 0, 1].round(decimals=3)
    tensor([0.2690, 0.7310, 0.0000, 0.0000])
    """
    check_inputs(query, key, value, attn_mask, is_causal, enable_gqa, softcap, dropout_p)
    shape = attention_shape(query, key, value, enable_gqa)
    call = scaled_call(query, key, value, Visibility.of(attn_mask, is_causal), scale, enable_gqa, softcap, dropout_p)
    return run(call).reshape(shape)


def attention_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Mask = None,
    is_causal: bool = False,
    scale: Scale = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
) -> Tensor:
    """softmax(scale · QKᵀ + mask) itself, (…, heads, q_len, kv_len): the full matrix, for looking at."""
    check_inputs(query, key, None, attn_mask, is_causal, enable_gqa, softcap)
    shape = scores_shape(query, key, enable_gqa)
    call = scaled_call(query, key, key, Visibility.of(attn_mask, is_causal), scale, enable_gqa, softcap)
    with without_autocast(query):
        query, key = call.query.to(wide_dtype(query)), call.key.to(wide_dtype(key))
        bias = call.visibility.added(slice(0, query.shape[-2]), slice(0, key.shape[-2]), query)
        return row_weights(query, key, bias, call.scale, softcap).to(call.query.dtype).reshape(shape)


def scaled_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    scale: Scale,
    enable_gqa: bool,
    softcap: float | None,
    dropout_p: float = 0.0,
) -> Call:
    """An attention as the kernels take it: its scale a float, whatever rule gave it, its leading dimensions one."""

    visibility = visibility.within(query.shape[-2], key.shape[-2])

    def counts() -> Tensor | None:
        return visibility.with_infinite_mask().counts(query.shape[-2], key.shape[-2], query.device)

    scaled_query, scaled_key, factor = apply_scale(scale, query, key, counts)
    return Call(*fold(scaled_query, scaled_key, value, visibility, enable_gqa), dropout_p, factor, softcap)


def run(call: Call) -> Tensor:
    """Choose the kernel: torch's fused ones wherever they serve, then FlexAttention, then blocks of rows."""
    in_one_block = call.query.shape[-2] <= row_blocks.BLOCK_ROWS
    if call.softcap is None and (in_one_block or not sdpa.materialises(call)):
        return sdpa.attend(call)
    call = _as_autocast(call)
    with without_autocast(call.query):
        return flex.attend(call) if flex.serves(call) else row_blocks.attend(call)


def _as_autocast(call: Call) -> Call:
    """What autocast does to SDPA's arguments, for the kernels it does not know."""
    device = call.query.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return call
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    seen = call.visibility
    seen = seen if seen.mask is None else replace(seen, mask=cast(seen.mask))
    return replace(call, query=cast(call.query), key=cast(call.key), value=cast(call.value), visibility=seen)
