"""Attention from explicit weights, one block of query rows at a time, for calls without a fused kernel."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnscale.attending.call import Call
from attnscale.numerics import wide_dtype, without_autocast
from attnscale.torch_internals import in_transform, sizes_vary

BLOCK_ROWS = 256  # rows per block: enough for efficient products
BLOCK_SCORES = 2**22  # largest number of scores per block: 16 MB of float32
LEAST_ROWS = 16  # smallest number of rows per block, even if it exceeds BLOCK_SCORES


def attend(call: Call) -> Tensor:
    """Return softmax(softcap · tanh(scale · QKᵀ / softcap) + mask) V; the backward pass recomputes each block."""
    wide = wide_dtype(call.query)
    query = call.query.to(wide)
    call = replace(call, key=call.key.to(wide), value=call.value.to(wide))
    scores_per_row = max(1, math.prod(query.shape[:-2]) * call.key.shape[-2])
    # Checkpoints do not work under torch.func.
    recomputes = torch.is_grad_enabled() and (torch.compiler.is_compiling() or not in_transform())
    output = []
    for rows, keys in blocks(call, min(BLOCK_ROWS, max(LEAST_ROWS, BLOCK_SCORES // scores_per_row))):
        attend_rows = partial(_attend_rows, call, rows, keys)
        own = query[:, :, rows]
        output.append(checkpoint(attend_rows, own, use_reentrant=False) if recomputes else attend_rows(own))
    return torch.cat(output, dim=-2).to(call.query.dtype)


def blocks(call: Call, block_rows: int) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of rows with the keys that any of them may see; one block in a graph with symbolic lengths."""
    q_len, kv_len = call.query.shape[-2], call.key.shape[-2]
    if sizes_vary(q_len, kv_len):  # a loop would make the length constant
        yield slice(0, q_len), slice(0, kv_len)
        return
    for first in range(0, max(q_len, 1), block_rows):
        rows = slice(first, min(first + block_rows, q_len))
        yield rows, call.visibility.span(rows.start, rows.stop - 1, kv_len)


def _attend_rows(call: Call, rows: slice, keys: slice, query: Tensor) -> Tensor:
    bias = call.visibility.added(rows, keys, query)
    weights = row_weights(query, call.key[:, :, keys], bias, call.scale, call.softcap, call.sinks)
    if call.dropout_p > 0.0:
        weights = F.dropout(weights, call.dropout_p)
    return grouped_matmul(weights, call.value[:, :, keys])


def weights_of(call: Call) -> Tensor:
    """Return all weights of an attention, (batch, heads, q_len, kv_len)."""
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
    """Return softmax(softcap · tanh(scale · QKᵀ / softcap) + bias); zeros for a row without keys, as in SDPA."""
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
    # Fill before softmax too; otherwise its backward turns the NaN of such a row into a NaN gradient.
    weights = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
    return weights if sinks is None else weights[..., :-1]


def grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return left (batch, heads, rows, n) @ right (batch, kv_heads, n, m); consecutive heads share a kv head."""
    batch, heads, rows, _ = left.shape
    if heads == right.shape[1]:
        return left @ right
    grouped = left.reshape(batch, right.shape[1], heads // right.shape[1] * rows, left.shape[-1]) @ right
    return grouped.reshape(batch, heads, rows, right.shape[-1])
