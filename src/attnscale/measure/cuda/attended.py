"""The kernels behind attention with exact statistics, launched the way that a kind of call goes."""

from functools import cache

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cuda import forward
from attnscale.measure.cuda.spans import key_span
from attnscale.measure.cuda.ways import Kernel, Way, way_of
from attnscale.visibility import Visibility

Attended = tuple[Tensor, Tensor, Tensor]  # output, lse, table of the heads
Rows = tuple[Tensor, Tensor, Tensor]  # output, lse, sums of the rows in the order of RowSums


def attended(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool, way: Way | None = None
) -> Attended:
    """softmax(scale · QKᵀ) V, the lse, and the table of the statistics of each head."""
    way = way or way_of(query, key, value, scale, is_causal)
    if way.kernel is Kernel.APART:
        output, lse = forward.attend(Call(query, key, value, Visibility.of(None, False), 0.0, scale, None))
        if lse is not None:
            return output, lse.contiguous(), _table_of_one(query, key, scale, way)
    from attnscale.measure.cuda import triton  # not before it is needed: a CPU may have none

    output, lse, sums = attended_rows(query, key, value, scale, is_causal, way)
    return output, lse, triton.finish_scored(sums, key.shape[2], is_causal, way.kind)


def attended_rows(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool, way: Way) -> Rows:
    """The output, the lse and the sums of every row."""
    from attnscale.measure.cuda import triton

    if way.kernel in (Kernel.FOLDED, Kernel.APART):
        return _folded(query, key, value, scale, is_causal, way)
    if way.kernel is Kernel.HOPPER:
        from attnscale.measure.cuda import hopper

        return hopper.attend_rows(query, key, value, scale, is_causal, moments=True)
    return triton.attend_rows(query, key, value, scale, is_causal, moments=True, kind=way.kind)


def _folded(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool, way: Way) -> Rows:
    """One query: the heads that share a key head are rows that see the same keys; causal, the first alone."""
    from attnscale.measure.cuda import triton

    batch, heads, _, head_dim = query.shape
    if is_causal:
        key, value = key[:, :, :1], value[:, :, :1]
    rows = query.reshape(batch, key.shape[1], heads // key.shape[1], head_dim)
    cut = triton.few_tiles(head_dim, query.dtype, triton.capability(query.device.index))
    output, lse, sums = triton.attend_rows(rows, key, value, scale, False, True, cut, way.kind)
    shape = batch, heads, 1
    return output.view(*shape, head_dim), lse.view(shape), sums.view(-1, *shape)


def _table_of_one(query: Tensor, key: Tensor, scale: float, way: Way) -> Tensor:
    """One query of few heads: the statistics over spans of keys that fill a GPU."""
    from attnscale.measure.cuda import triton

    first, one = _first(len(query), query.device)
    span = key_span(query, key)
    sums, norms = triton.sample_rows(query, key, first, scale, False, True, span, kind=way.kind)
    table = triton.finish_sampled(sums, norms, first, one, 1, key.shape[2], span, scale, False, 0.0, way.kind)
    table[:, 4].copy_(table[:, 3])  # every row was looked at: the largest score is known
    return table


@cache
def _first(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first position of every entry, which stands for itself."""
    return torch.zeros(batch, 1, dtype=torch.int32, device=device), torch.ones(1, dtype=torch.float64, device=device)
