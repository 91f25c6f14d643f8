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


def row_weights(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(softcap · tanh(scale · QKᵀ / softcap) + bias); a row that sees nothing gets zeros, as in SDPA."""
    scores = grouped_matmul(query * scale, key.mT)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias
    if sinks is not None:
        own = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, own], dim=-1)
    if bias is None and sinks is None:
        return torch.softmax(scores, dim=-1)
    blind = scores.isneginf().all(dim=-1, keepdim=True)
    # Filled before softmax too: its backward would turn the NaN of such a row into a NaN gradient.
    weights = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
    return weights if sinks is None else weights[..., :-1]


def grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Left (batch, heads, rows, n) @ right (batch, kv_heads, n, m), where consecutive heads share a kv head."""
    batch, heads, rows, _ = left.shape
    if heads == right.shape[1]:
        return left @ right
    grouped = left.reshape(batch, right.shape[1], heads // right.shape[1] * rows, left.shape[-1]) @ right
    return grouped.reshape(batch, heads, rows, right.shape[-1])
