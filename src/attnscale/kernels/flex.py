"""Soft-capped attention on a GPU: FlexAttention, compiled."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from attnscale.kernels.call import Call

TILE = 128  # FlexAttention's block size
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def serves(call: Call) -> bool:
    """Whether FlexAttention computes this without the full matrix: on CUDA, without dropout, outside torch.func."""
    return (
        call.query.device.type == "cuda"
        and call.query.dtype in DTYPES
        and call.dropout_p == 0.0
        and not call.mask_learns
        and min(call.query.shape[:-1]) > 0
        and call.key.shape[-2] > 0
        and (torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None)
    )


def attend(call: Call) -> Tensor:
    """softmax(softcap · tanh(scale · QKᵀ / softcap) + mask) V in one compiled kernel."""
    output = _compiled()(
        call.query,
        call.key,
        call.value,
        score_mod=_score_mod(call.softcap, call.attn_mask),
        block_mask=_causal_blocks(call) if call.is_causal else None,
        scale=call.scale,
        enable_gqa=call.group > 1,
    )
    assert isinstance(output, Tensor)  # a tuple only where lse was asked for
    return output


def _compiled() -> Callable[..., object]:
    plain: Callable[..., object] = flex_attention
    return plain if torch.compiler.is_compiling() else _compiled_once()


@cache
def _compiled_once() -> Callable[..., object]:
    # fullgraph: past its recompile limit torch would otherwise fall back, silently, to the full matrix.
    compiled: Callable[..., object] = torch.compile(flex_attention, fullgraph=True)
    return compiled


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
    """The lower triangle as FlexAttention's block mask, without ever forming the triangle."""
    q_len, kv_len, device = call.query.shape[-2], call.key.shape[-2], call.query.device
    q_blocks, kv_blocks = -(-q_len // TILE), -(-kv_len // TILE)
    row_block = torch.arange(q_blocks, device=device, dtype=torch.int32)
    columns = torch.arange(kv_blocks, device=device, dtype=torch.int32)
    every_column = columns.expand(q_blocks, -1).contiguous()
    past = row_block.clamp(max=kv_blocks)  # how many key blocks lie wholly before this block of rows,
    diagonal = (row_block < kv_blocks).to(torch.int32)  # and whether one, of its own number, holds the diagonal
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
