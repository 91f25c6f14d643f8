"""Soft-capped attention on a GPU: FlexAttention, compiled."""

from collections.abc import Callable, Hashable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from attnscale.attending.call import Call, padded
from attnscale.numerics import KERNEL_DTYPES
from attnscale.torch_internals import in_transform

TILE = 128  # FlexAttention's block size
LEAST_WIDTH = 16  # smallest head dimension that FlexAttention supports
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def serves(call: Call) -> bool:
    """Return True if FlexAttention computes this: on CUDA, without dropout, outside torch.func."""
    return (
        call.query.device.type == "cuda"
        and call.query.dtype in KERNEL_DTYPES
        and call.dropout_p == 0.0
        and not call.mask_learns
        and (call.visibility.is_plain or call.visibility.is_mask)
        and min(call.query.shape[:-1]) > 0
        and call.key.shape[-2] > 0
        and (torch.compiler.is_compiling() or not in_transform())
    )


def attend(call: Call) -> Tensor:
    """Return softmax(softcap · tanh(scale · QKᵀ / softcap) + mask) V from one compiled kernel."""
    head_dim, value_dim = (max(tensor.shape[-1], LEAST_WIDTH) for tensor in (call.query, call.value))
    query, key, value = padded(call.query, head_dim), padded(call.key, head_dim), padded(call.value, value_dim)
    run = _flex if torch.compiler.is_compiling() else _compiled(_specialisation(call))
    output = run(
        *(query, key, value, call.sinks),
        score_mod=_score_mod(call.softcap, call.visibility.mask),
        block_mask=_causal_blocks(call) if call.visibility.is_causal else None,
        scale=call.scale,
        enable_gqa=call.grouped,
    )
    return output[..., : call.value.shape[-1]]


def _flex(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, **options: Any) -> Tensor:
    if sinks is None:
        output: Tensor = flex_attention(query, key, value, **options)
        return output
    output, lse = flex_attention(query, key, value, return_lse=True, **options)
    return (output * torch.sigmoid(lse - sinks.unsqueeze(-1)).unsqueeze(-1)).to(output.dtype)


def _specialisation(call: Call) -> tuple[Hashable, ...]:
    """Return everything that a compiled kernel is specialised on, except the batch size and the lengths."""
    tensors = (call.query, call.key, call.value)
    mask = call.visibility.mask
    return (
        call.query.dtype,
        *(tensor.shape[1::2] for tensor in tensors),  # heads and head_dim
        None if mask is None else (mask.dtype, *(size > 1 for size in mask.shape)),
        (call.visibility.is_causal, call.scale, call.softcap),
        None if call.sinks is None else (call.sinks.dtype, call.sinks.requires_grad),
        (torch.is_grad_enabled(), *(tensor.requires_grad for tensor in tensors)),
    )


@cache
def _compiled(specialisation: tuple[Hashable, ...]) -> Callable[..., Tensor]:
    """Compile FlexAttention separately for each specialisation, so that only new lengths cause a recompilation.

    Dynamo limits the recompilations per code object, so each specialisation gets a copy of the code. Without fullgraph,
    torch would silently fall back to the full matrix beyond that limit.
    """
    own_code = FunctionType(_flex.__code__.replace(co_name=f"_flex_{abs(hash(specialisation))}"), _flex.__globals__)
    return torch.compile(own_code, fullgraph=True)


def _score_mod(softcap: float | None, attn_mask: Tensor | None) -> ScoreMod:
    def capped(score: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    if attn_mask is None:
        return capped
    per_batch, per_head, per_row = (size > 1 for size in attn_mask.shape[:3])

    def masked(score: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        at = attn_mask[b if per_batch else 0, h if per_head else 0, row if per_row else 0, column]
        score = capped(score, b, h, row, column)
        return torch.where(at, score, -torch.inf) if attn_mask.dtype == torch.bool else score + at

    return masked


def _causal_blocks(call: Call) -> BlockMask:
    """Return FlexAttention's causal block mask without forming the full matrix."""
    q_len, kv_len, device = call.query.shape[-2], call.key.shape[-2], call.query.device
    q_blocks, kv_blocks = -(-q_len // TILE), -(-kv_len // TILE)
    row_block = torch.arange(q_blocks, device=device, dtype=torch.int32)
    columns = torch.arange(kv_blocks, device=device, dtype=torch.int32)
    every_column = columns.expand(q_blocks, -1).contiguous()
    past = row_block.clamp(max=kv_blocks)  # number of key blocks entirely before this block of rows
    diagonal = (row_block < kv_blocks).to(torch.int32)  # 1 if a key block contains the diagonal of this block of rows
    on_diagonal = every_column.clone()
    on_diagonal[:, 0] = row_block.clamp(max=kv_blocks - 1)
    return BlockMask.from_kv_blocks(
        diagonal[None, None],
        on_diagonal[None, None],
        past[None, None],
        every_column[None, None],
        BLOCK_SIZE=TILE,
        mask_mod=lambda b, h, row, column: row >= column,
        seq_lengths=(q_len, kv_len),
    )
