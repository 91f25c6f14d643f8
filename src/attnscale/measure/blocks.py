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
LEAST_ROWS, MOST_ROWS = 16, 128  # of one product on a CPU
HIDDEN = 1e30  # subtracted from a hidden score: finite, since −∞ times zero is NaN


def measure_rows(call: Call, positions: Tensor | None = None) -> RowSums:
    """The sums of every row, or of the rows at these positions."""
    batch, heads = call.query.shape[:2]
    visible = visible_rows(call, positions)
    names = ("max", "total", "gap", "participation", "mean", "deviation")
    wide, device = wide_dtype(call.query), call.query.device
    sums = {name: torch.empty(visible.shape, dtype=wide, device=device) for name in names}
    together, block = _cut(call, visible.shape[-1])
    room = torch.empty(2, together * block * call.key.shape[-2], dtype=wide, device=device)
    for entry in range(batch):
        for first in range(0, heads, together):
            some = slice(first, min(first + together, heads))
            query, key = _operands(call, entry, some)
            for start in range(0, visible.shape[-1], block):
                rows = slice(start, min(start + block, visible.shape[-1]))
                scores, shown = _scores(call, query, key, rows, positions, entry, some, room[0])
                found = _reduced(scores, shown, visible[entry, some, rows], room[1])
                for name, value in zip(names, found, strict=True):
                    sums[name][entry, some, rows] = value
    return RowSums(visible=visible, **sums)


def _cut(call: Call, rows: int) -> tuple[int, int]:
    """How many heads and rows at a time: a block that stays in the cache, or that fills a GPU."""
    heads, keys = call.query.shape[1], max(1, call.key.shape[-2])
    if call.query.device.type != "cpu":
        return heads, max(LEAST_ROWS, DEVICE_SCORES // (heads * keys))
    block = min(max(rows, 1), MOST_ROWS, max(LEAST_ROWS, CACHE_SCORES // keys))
    return min(heads, max(1, CACHE_SCORES // (block * keys))), block


def visible_rows(call: Call, positions: Tensor | None = None) -> Tensor:
    """Visible keys of each row, or of the rows at these positions: (batch, heads, rows), expanded, not copied."""
    batch, heads, q_len, _ = call.query.shape
    counts = visible_keys(call.query, call.key, call.attn_mask, call.is_causal)
    if counts is None:
        counts = torch.full((1,), call.key.shape[-2], device=call.query.device)
    counts = counts.expand(*counts.shape[:-1], q_len)
    return (counts if positions is None else counts[..., positions]).expand(batch, heads, -1)


def _operands(call: Call, entry: int, heads: slice) -> tuple[Tensor, Tensor]:
    """Scaled queries (heads, q_len, head_dim) and keys (heads, kv_len, head_dim), in float32 at least."""
    wide = wide_dtype(call.query)
    query = call.query[entry, heads].to(wide) * call.scale
    if call.group == 1:
        return query, call.key[entry, heads].to(wide)
    shared = torch.arange(heads.start, heads.stop, device=call.key.device) // call.group
    return query, call.key[entry, shared].to(wide)


def _scores(
    call: Call,
    query: Tensor,
    key: Tensor,
    rows: slice,
    positions: Tensor | None,
    entry: int,
    heads: slice,
    room: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """The scores of these rows, and 1 or 0 for each of the last columns that is shown or hidden; None: all shown.

    Causal rows end at the last key any of them sees.
    """
    at = torch.arange(rows.start, rows.stop, device=query.device) if positions is None else positions[rows]
    if positions is None and call.is_causal:
        key = key[:, : min(rows.stop, key.shape[1])]
    query = query[:, rows] if positions is None else query[:, at]
    scores = room[: query.shape[0] * query.shape[1] * key.shape[1]].view(*query.shape[:2], key.shape[1])
    torch.bmm(query, key.mT, out=scores)
    if call.softcap is not None:
        scores.div_(call.softcap).tanh_().mul_(call.softcap)
    if call.is_causal:
        first = rows.start if positions is None else 0  # every row sees the keys before the first row
        return scores, (torch.arange(first, key.shape[1], device=scores.device) <= at[:, None]).to(scores.dtype)
    if call.attn_mask is None:
        return scores, None
    mask = call.attn_mask[entry if call.attn_mask.shape[0] > 1 else 0]
    mask = mask[heads] if mask.shape[0] > 1 else mask
    mask = mask[:, at] if mask.shape[1] > 1 else mask
    if mask.dtype == torch.bool:
        return scores, mask.to(scores.dtype)
    scores.add_(mask.to(scores.dtype).clamp(min=-HIDDEN))
    return scores, (mask != -math.inf).to(scores.dtype)


def _reduced(scores: Tensor, shown: Tensor | None, visible: Tensor, room: Tensor) -> list[Tensor]:
    """The sums of each row, in the order of RowSums; the scores are used up."""
    if not scores.shape[-1]:
        return [scores.new_full(visible.shape, value) for value in (-math.inf, 0.0, 0.0, 0.0, 0.0, 0.0)]
    # Hidden keys by adds and products, which run at full speed, over the columns where there may be some.
    last = slice(scores.shape[-1] - (0 if shown is None else shown.shape[-1]), None)
    if shown is not None:
        scores[..., last].add_((shown - 1.0) * HIDDEN)
    highest = scores.amax(-1)
    below = scores.sub_(highest.unsqueeze(-1))
    if shown is not None:
        below[..., last].mul_(shown)
    # moments about the maximum, which is never far: a large mean does not swallow the variance
    count = visible.clamp(min=1).to(below.dtype)
    mean = below.sum(-1) / count
    deviation = torch.linalg.vector_norm(below, dim=-1).square_().sub_(count * mean.square()).clamp_(min=0.0)
    weights = torch.exp(below, out=room[: below.numel()].view(below.shape))
    if shown is not None:
        weights[..., last].mul_(shown)
    total = weights.sum(-1)
    gap = below.mul_(weights).sum(-1).neg_() / total
    participation = torch.linalg.vector_norm(weights, dim=-1).div_(total).square_()
    seen = visible > 0
    return [torch.where(seen, highest, -math.inf), total, gap, participation, mean + highest, deviation]
