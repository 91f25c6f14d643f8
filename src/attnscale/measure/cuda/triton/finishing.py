"""The host's side of the kernels that finish: how the work is laid out in memory, and launches that cost little."""
# mypy: disable-error-code="import-untyped"

from collections.abc import Hashable

import torch
from torch import Tensor

from attnscale.measure.cuda.triton.finish import FIELDS, TABLE, finish_kernel
from attnscale.measure.cuda.triton.finish_sample import finish_sample_kernel
from attnscale.measure.cuda.triton.launching import counters, launch

PROGRAMS = 1056  # that pool rows, eight a multiprocessor of an H200
POOLED_ROWS = 128  # at a time, four a thread of one warp: sums over them need no barriers
WITH_VISIBLE = 7  # sums of a row, of which the last is how many keys it sees
SAMPLED_ROWS, BOUNDS = 64, 4096  # at a time, of a sampled head's rows and of what bounds its maximum


def finish_scored(sums: Tensor, kv_len: int, is_causal: bool, kind: Hashable = None) -> Tensor:
    """The table of the heads whose rows have these sums, (6, batch, heads, q_len), or 7 with the visible keys."""
    planes, batch, heads, q_len = sums.shape
    parts, rows_each = _pool_parts(batch * q_len, heads)
    left = torch.empty(heads * parts * FIELDS.value, dtype=torch.float64, device=sums.device)
    arrived = counters(sums.device, heads)
    table = torch.empty((heads, TABLE.value), dtype=torch.float64, device=sums.device)
    launch(
        finish_kernel,
        (parts, heads),
        (sums, left, arrived, table, batch, heads, q_len, kv_len, rows_each),
        (is_causal, planes == WITH_VISIBLE, POOLED_ROWS),
        (1, 1),
        kind,
    )
    return table


def finish_sampled(
    sums: Tensor,
    bounds: Tensor,
    rows: Tensor,
    weights: Tensor,
    q_len: int,
    kv_len: int,
    span: int,
    scale: float,
    is_causal: bool,
    slack: float,
    kind: Hashable = None,
) -> Tensor:
    """The same of sampled rows, (6 or 7, spans, batch, heads, rows), bounded by the lse of all rows or by norms."""
    planes, spans, batch, heads, count = sums.shape
    given_lse = bounds.dim() == 3
    table = torch.empty((heads, TABLE.value), dtype=torch.float64, device=sums.device)
    launch(
        finish_sample_kernel,
        (heads,),
        (
            *(sums, rows, weights, bounds, table),
            *(*(bounds.stride()[:2] if given_lse else (heads, 1)), batch * heads, spans, spans * batch * heads),
            *(batch, heads, count, q_len, kv_len, spans, span, abs(scale) * (1 + slack), slack),
        ),
        (is_causal, planes == WITH_VISIBLE, given_lse, SAMPLED_ROWS, BOUNDS),
        (4, 1),
        kind,
    )
    return table


def _pool_parts(rows: int, heads: int) -> tuple[int, int]:
    """How many programs pool a head's rows, and how many rows each."""
    parts = max(1, min(PROGRAMS // heads, _ceil(rows, POOLED_ROWS)))
    each = _ceil(_ceil(rows, parts), POOLED_ROWS) * POOLED_ROWS
    return _ceil(rows, each), each


def _ceil(number: int, part: int) -> int:
    return -(-number // part)
