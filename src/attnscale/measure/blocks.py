"""The pass over the scores in plain torch, a block of rows at a time: any device, mask, bias and soft-cap."""

import math

import torch
from torch import Tensor

from attnscale.kernels.call import Call
from attnscale.masks import visible_keys
from attnscale.measure.rows import RowSums
from attnscale.rules.rule import wide_dtype

CACHE_SCORES = 2**18  # scores at a time on a CPU: 1 MB of float32, the second-level cache of a core
DEVICE_SCORES = 2**26  # scores at a time elsewhere: 256 MB of float32
LEAST_ROWS = 16
VANISHED = {torch.float32: -200.0, torch.float64: -800.0}  # e to this is zero; a hidden key's −∞ times zero is NaN


def measure_rows(call: Call, positions: Tensor | None, moments: bool) -> RowSums:
    """The sums of every row, or of the rows at these positions; `moments` takes those of the scores too."""
    device = call.query.device
    batch, heads, q_len, _ = call.query.shape
    positions = torch.arange(q_len, device=device) if positions is None else positions.to(device)
    visible = _visible(call)[..., positions].expand(batch, heads, len(positions))

    names = ["max", "total", "gap", "participation", *(["mean", "deviation"] if moments else [])]
    sums = {name: torch.empty(visible.shape, dtype=wide_dtype(call.query), device=device) for name in names}
    together = 1 if device.type == "cpu" else heads  # heads at a time: one fits the cache, all fill a GPU
    room = CACHE_SCORES if device.type == "cpu" else DEVICE_SCORES
    block = max(LEAST_ROWS, room // max(1, together * call.key.shape[-2]))
    for entry in range(batch):
        for first in range(0, heads, together):
            some = slice(first, first + together)
            query, key = _operands(call, entry, some)
            for start in range(0, len(positions), block):
                rows = slice(start, start + block)
                scores, hides = _scores(call, query, key, positions[rows], entry, some)
                found = _reduced(scores, hides, visible[entry, some, rows], moments)
                for name, value in zip(names, found, strict=True):
                    sums[name][entry, some, rows] = value
    return RowSums(visible=visible, **sums)


def _visible(call: Call) -> Tensor:
    """Visible keys of each row, (batch or 1, heads or 1, q_len)."""
    q_len = call.query.shape[-2]
    counts = visible_keys(call.query, call.key, call.attn_mask, call.is_causal)
    if counts is None:
        counts = torch.full((1,), call.key.shape[-2], device=call.query.device)
    return counts.expand(*counts.shape[:-1], q_len)


def _operands(call: Call, entry: int, heads: slice) -> tuple[Tensor, Tensor]:
    """Scaled queries (heads, q_len, head_dim) and transposed keys (heads, head_dim, kv_len), in float32 at least."""
    wide = wide_dtype(call.query)
    query = call.query[entry, heads].to(wide) * call.scale
    key_heads = torch.arange(heads.start, heads.stop, device=call.key.device) // call.group
    return query, call.key[entry, key_heads].to(wide).mT.contiguous()


def _scores(call: Call, query: Tensor, key: Tensor, positions: Tensor, entry: int, heads: slice) -> tuple[Tensor, bool]:
    """The scores of these rows, −∞ where a key is hidden, and whether any may be."""
    scores = query[:, positions] @ key
    if call.softcap is not None:
        scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
    if call.is_causal:
        columns = torch.arange(key.shape[-1], device=key.device)
        return scores.masked_fill_(columns > positions[:, None], -math.inf), True
    if call.attn_mask is None:
        return scores, False
    mask = call.attn_mask[entry if call.attn_mask.shape[0] > 1 else 0]
    mask = mask[heads] if mask.shape[0] > 1 else mask
    mask = mask[:, positions] if mask.shape[1] > 1 else mask
    return (scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask)), True


def _reduced(scores: Tensor, hides: bool, visible: Tensor, moments: bool) -> list[Tensor]:
    """max, total, gap, participation, and mean and deviation where wanted; the scores are used up."""
    highest = scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)
    shift = torch.where(highest.isneginf(), 0.0, highest).unsqueeze(-1)
    below = scores.sub_(shift)
    of_scores = _moments(below, shift.squeeze(-1), hides, visible) if moments else []
    if hides:
        below.clamp_(min=VANISHED[below.dtype])
    weights = below.exp()
    total = weights.sum(-1)
    participation = torch.linalg.vector_norm(weights, dim=-1).square() / total.square()
    gap = below.mul_(weights).sum(-1).neg_() / total
    return [highest, total, gap, participation, *of_scores]


def _moments(below: Tensor, shift: Tensor, hides: bool, visible: Tensor) -> list[Tensor]:
    count = visible.clamp(min=1).to(below.dtype)
    shown = below.masked_fill(below.isneginf(), 0.0) if hides else below
    mean = shown.sum(-1) / count
    away = below - mean.unsqueeze(-1)
    if hides:
        away.masked_fill_(below.isneginf(), 0.0)
    return [mean + shift, away.square_().sum(-1)]
