"""Which keys a row sees: counts for the rules that need them, blocks of bias for the paths that add them."""

import math

import torch
from torch import Tensor

COUNTING_ROWS = 256  # counting converts the mask to integers; a block at a time keeps that small


def visible_keys(query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor | None:
    """The number of visible keys of each row, broadcastable to (…, heads, q_len); None where every row sees all."""
    q_len, kv_len = query.shape[-2], key.shape[-2]
    if is_causal:  # aligned to the upper left, as in SDPA
        return torch.arange(1, q_len + 1, device=query.device).clamp(max=kv_len)
    if attn_mask is None:
        return None
    counts = [_visible(rows).sum(-1) for rows in attn_mask.split(COUNTING_ROWS, dim=-2)]
    return torch.cat(counts, dim=-1) * (kv_len if attn_mask.shape[-1] == 1 else 1)


def row_bias(attn_mask: Tensor | None, is_causal: bool, rows: slice, kv_len: int, like: Tensor) -> Tensor | None:
    """What is added to the scores of these rows: the float mask, or 0 and −∞ for visible and hidden keys."""
    if is_causal:
        row = torch.arange(rows.start, rows.stop, device=like.device).unsqueeze(-1)
        return _bias(torch.arange(kv_len, device=like.device) <= row, like.dtype)
    if attn_mask is None:
        return None
    block = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., rows, :]
    return _bias(block, like.dtype) if block.dtype == torch.bool else block.to(like.dtype)


def _visible(attn_mask: Tensor) -> Tensor:
    return attn_mask if attn_mask.dtype == torch.bool else attn_mask != -math.inf


def _bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype, device=visible.device).masked_fill(~visible, -math.inf)
