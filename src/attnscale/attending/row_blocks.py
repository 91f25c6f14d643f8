"""Attention a block of query rows at a time: for what no fused kernel takes, in memory linear in the length."""

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnscale.attending.call import Call
from attnscale.attending.weights import grouped_matmul, row_weights
from attnscale.numerics import wide_dtype
from attnscale.torch_internals import in_transform
from attnscale.visibility import Visibility

BLOCK_ROWS = 256  # enough rows for efficient products,
BLOCK_SCORES = 2**22  # but no more scores at a time than this (16 MB of float32)
LEAST_ROWS = 16  # unless that left fewer rows than this


def attend(call: Call) -> Tensor:
    """softmax(softcap · tanh(scale · QKᵀ / softcap) + mask) V, block by block, recomputed in the backward pass."""
    wide = wide_dtype(call.query)
    query, key, value = (tensor.to(wide) for tensor in (call.query, call.key, call.value))
    output = [query.new_empty(*query.shape[:2], 0, value.shape[-1])]
    for rows, keys in blocks(call):
        attend_rows = partial(_attend_rows, call=call, rows=rows, keys=keys)
        tensors = (query[:, :, rows], key[:, :, keys], value[:, :, keys], call.visibility.mask, call.sinks)
        output.append(_recomputed(attend_rows, *tensors) if _recomputes() else attend_rows(*tensors))
    return torch.cat(output, dim=-2).to(call.query.dtype)


def blocks(call: Call) -> Iterator[tuple[slice, slice]]:
    """Rows that are computed at once, with the keys that any of them may see."""
    q_len, kv_len = call.query.shape[-2], call.key.shape[-2]
    block_rows = min(BLOCK_ROWS, max(LEAST_ROWS, BLOCK_SCORES // max(1, math.prod(call.query.shape[:-2]) * kv_len)))
    for first in range(0, q_len, block_rows):
        rows = slice(first, min(first + block_rows, q_len))
        yield rows, call.visibility.span(rows.start, rows.stop - 1, kv_len)


def _attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    *,
    call: Call,
    rows: slice,
    keys: slice,
) -> Tensor:
    seen = call.visibility
    bias = Visibility(seen.last, seen.first, attn_mask, seen.documents).added(rows, keys, query)
    weights = row_weights(query, key, bias, call.scale, call.softcap, sinks)
    if call.dropout_p > 0.0:
        weights = F.dropout(weights, call.dropout_p)
    return grouped_matmul(weights, value)


_recomputed = partial(checkpoint, use_reentrant=False)


def _recomputes() -> bool:
    """Recompute a block in the backward pass, except under torch.func, whose transforms refuse checkpoints."""
    if not torch.is_grad_enabled():
        return False
    return torch.compiler.is_compiling() or not in_transform()
