"""The operator: scaled dot-product attention with any scale rule and an optional soft-cap."""

from typing import Any

import torch
from torch import Tensor

from attnscale.attending import sdpa
from attnscale.attending.call import Call, folded_call
from attnscale.attending.nested import any_nested, in_graph, is_ragged_before_heads, jagged, nested_call
from attnscale.attending.ragged import NO_WINDOW, Window, as_tokens, packed_call, window_of
from attnscale.attending.row_blocks import weights_of
from attnscale.attending.running import run, run_sequences
from attnscale.inputs import check_inputs, check_sinks
from attnscale.numerics import uncompiled
from attnscale.rules.apply import Scale, apply_scale
from attnscale.shapes import attention_shape, scores_shape
from attnscale.torch_internals import is_in_scripts
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
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale · QKᵀ + mask) V: `F.scaled_dot_product_attention` with any scale, soft-cap and sinks.

    `scale` is None (1/√d_k), a number, a tensor that broadcasts to (…, heads, q_len, 1), a rule of
    `attnscale.rules` or its name; `softcap` bounds the scores to softcap · tanh(score / softcap) before the mask.
    `sinks`, (heads,), is one logit per head that joins the softmax denominator of each row and has no value, as in
    gpt-oss; zeros give softmax-off-by-one. It receives gradients.
    It runs on torch's fused kernels, and never forms the full matrix of scores.

    >>> q = k = v = torch.eye(4)[None, None]
    >>> attention(q, k, v, scale="unscaled", is_causal=True)[0, 0, 1].round(decimals=3)
    tensor([0.2690, 0.7310, 0.0000, 0.0000])
    """
    if any_nested(query, key, value):
        options = attn_mask, is_causal, scale, enable_gqa, softcap, dropout_p, sinks
        return in_graph(_attend_nested, scale, query, key, value)(query, key, value, *options)
    check_inputs(query, key, value, attn_mask, is_causal, enable_gqa, softcap, dropout_p)
    shape = attention_shape(query, key, value, enable_gqa)
    check_sinks(sinks, query)
    seen = Visibility.of(attn_mask, is_causal)
    call = scaled_call(query, key, value, seen, scale, enable_gqa, softcap, dropout_p, sinks)
    output = sdpa.attend_by_kernels(call) if sdpa.differentiates_twice(query, key, value, call) else run(call)
    return output.reshape(shape)


is_in_scripts(attention, "aten::scaled_dot_product_attention")


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
    """Return the weights softmax(scale · QKᵀ + mask) as the full matrix, (…, heads, q_len, kv_len).

    Nested tensors give a nested tensor with one matrix per sequence.
    """
    if any_nested(query, key):
        options = attn_mask, is_causal, scale, enable_gqa, softcap
        return uncompiled(_nested_weights)(query, key, *options)
    check_inputs(query, key, None, attn_mask, is_causal, enable_gqa, softcap)
    shape = scores_shape(query, key, enable_gqa)
    call = scaled_call(query, key, key, Visibility.of(attn_mask, is_causal), scale, enable_gqa, softcap)
    return weights_of(call).reshape(shape)


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Scale = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window_size: Window = NO_WINDOW,
    document_ids: Tensor | None = None,
) -> Tensor:
    """Return attention() over packed sequences, which each attend to themselves: tokens (total, heads, head_dim).

    `cu_seqlens_q`, (sequences + 1,), holds the start of each sequence and the end of the last; alternatively,
    `document_ids` holds the document number of each token. Pass `cu_seqlens_k` if keys have other lengths. As in
    flash-attn and torch.nn.attention.varlen, causality and the window, (left, right) with −1 for unlimited, are
    aligned to the last key of a sequence.

    >>> tokens = torch.randn(7, 2, 4)
    >>> attention_varlen(tokens, tokens, tokens, torch.tensor([0, 3, 3, 7]), is_causal=True).shape
    torch.Size([7, 2, 4])
    """
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, document_ids
    seen = window_of(window_size, is_causal)
    options = sequences, seen, scale, enable_gqa, softcap, dropout_p, sinks
    return in_graph(_attend_packed, scale)(query, key, value, *options)


def _attend_nested(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Mask, is_causal: bool, *options: Any
) -> Tensor:
    if is_ragged_before_heads(query, key, value):
        own, theirs, values = (jagged(tensor).values() for tensor in (query, key, value))
        scale, enable_gqa, softcap, dropout_p, sinks = options
        flags = attn_mask, dropout_p, is_causal, scale, enable_gqa
        output = attention(own, theirs, values, *flags, softcap=softcap, sinks=sinks)
        return torch.nested.nested_tensor_from_jagged(output, jagged(query).offsets(), jagged(query).lengths())
    ragged, nest = nested_call(query, key, value, attn_mask, is_causal, *options)
    return nest(run_sequences(ragged))


def _nested_weights(query: Tensor, key: Tensor, *options: Any) -> Tensor:
    ragged, _ = nested_call(query, key, key, *options)
    matrices = [weights_of(call).squeeze(0) for call in ragged.calls()]
    return torch.nested.as_nested_tensor([each.squeeze(0) if query.dim() == 3 else each for each in matrices])


def _attend_packed(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
    return as_tokens(run_sequences(packed_call(query, key, value, *options)))


def scaled_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    scale: Scale,
    enable_gqa: bool,
    softcap: float | None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
) -> Call:
    """Return the call in the form that kernels take: a float as its scale, and one leading dimension."""
    q_len, kv_len = query.shape[-2], key.shape[-2]
    seen = visibility.within(q_len, kv_len)
    scaled = apply_scale(scale, query, key, lambda: seen.with_infinite_mask().counts(q_len, kv_len, query.device))
    return folded_call(scaled, value, seen, enable_gqa, softcap, dropout_p, sinks)
