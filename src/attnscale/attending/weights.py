"""Attention weights of some query rows, formed in full."""

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.numerics import wide_dtype, without_autocast


def weights_of(call: Call) -> Tensor:
    """All weights of an attention, (batch, heads, q_len, kv_len)."""
    with without_autocast(call.query):
        query, key = (tensor.to(wide_dtype(tensor)) for tensor in (call.query, call.key))
        bias = call.visibility.added(slice(0, query.shape[-2]), slice(0, key.shape[-2]), query)
        return row_weights(query, key, bias, call.scale, call.softcap).to(call.query.dtype)


def row_weights(query: Tensor, key: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """softmax(softcap · tanh(scale · QKᵀ / softcap) + bias); a row that sees nothing gets zeros, as in SDPA."""
    scores = grouped_matmul(query * scale, key.mT)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is None:
        return torch.softmax(scores, dim=-1)
    scores = scores + bias
    blind = scores.isneginf().all(dim=-1, keepdim=True)
    # Filled before softmax too: its backward would turn the NaN of such a row into a NaN gradient.
    return torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)


def grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Left (batch, heads, rows, n) @ right (batch, kv_heads, n, m), where consecutive heads share a kv head."""
    batch, heads, rows, _ = left.shape
    if heads == right.shape[1]:
        return left @ right
    grouped = left.reshape(batch, right.shape[1], heads // right.shape[1] * rows, left.shape[-1]) @ right
    return grouped.reshape(batch, heads, rows, right.shape[-1])
