"""The pass over sampled rows of scores that lie in memory, as attention that is written out computes them.

One program reads one row twice: first its largest score and its mean, then the sums that need them.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscale.measure.cuda.launch import Launch, Layout, Tiles, layout_key
from attnscale.measure.cuda.replay import Replay
from attnscale.measure.cuda.rows import VANISHED
from attnscale.visibility import NEVER_A_SCORE

MOST_KEYS = 4096  # read at once
HIDDEN: tl.constexpr = tl.constexpr(NEVER_A_SCORE)


@triton.jit(do_not_specialize=["heads", "count", "kv_len"], do_not_specialize_on_alignment=["rows_at"])
def matrix_kernel(
    scores_at: tl.tensor,
    rows_at: tl.tensor,
    left_out_at: tl.tensor,
    sums_at: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    row_stride: tl.tensor,
    key_stride: tl.tensor,
    left_out_batch: tl.tensor,
    left_out_row: tl.tensor,
    heads: tl.tensor,
    count: tl.tensor,
    kv_len: tl.tensor,
    LEAVES_OUT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write the sums of one row, as RowSums has them, and its number of visible keys; none if the row is left out."""
    row, both = tl.program_id(0), tl.program_id(1)
    batch, head = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    position = tl.load(rows_at + batch * count + row).to(tl.int64)
    at = scores_at + batch * batch_stride + head * head_stride + position * row_stride
    end = kv_len
    if LEAVES_OUT:
        end = tl.where(tl.load(left_out_at + batch * left_out_batch + position * left_out_row) != 0, 0, kv_len)
    column = tl.arange(0, TILE)

    highest = tl.full([TILE], float("-inf"), tl.float32)
    number = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE], tl.float32)
    earliest = tl.full([TILE], 2**31 - 1, tl.int32)
    for begin in range(0, end, TILE):
        key = begin + column
        scores = tl.load(at + key.to(tl.int64) * key_stride, mask=key < end, other=float("-inf")).to(tl.float32)
        visible = ~(scores <= HIDDEN)  # a NaN is visible
        highest = tl.maximum(highest, tl.where(visible, scores, float("-inf")), propagate_nan=tl.PropagateNan.ALL)
        number += visible.to(tl.float32)
        total += tl.where(visible, scores, 0.0)
        earliest = tl.minimum(earliest, tl.where(visible, key, 2**31 - 1))
    seen = tl.sum(number, 0)
    has_nan = tl.sum(tl.where(highest != highest, 1, 0), 0) > 0
    largest = tl.where(has_nan, float("nan"), tl.max(highest, 0))
    mean = tl.sum(total, 0) / tl.maximum(seen, 1.0)
    base = tl.where(seen == 0.0, 0.0, largest)
    first = tl.min(earliest, 0)
    first_score = tl.load(at + first.to(tl.int64) * key_stride, mask=seen > 0.0, other=0.0).to(tl.float32)

    weights = tl.zeros([TILE], tl.float32)
    slope = tl.zeros([TILE], tl.float32)
    square = tl.zeros([TILE], tl.float32)
    deviation = tl.zeros([TILE], tl.float32)
    for begin in range(0, end, TILE):
        key = begin + column
        scores = tl.load(at + key.to(tl.int64) * key_stride, mask=key < end, other=float("-inf")).to(tl.float32)
        visible = ~(scores <= HIDDEN)
        below = tl.where(visible, tl.maximum(scores - base, VANISHED, propagate_nan=tl.PropagateNan.ALL), VANISHED)
        weight = tl.exp(below)
        weights += weight
        slope += weight * below
        square += weight * weight
        away = tl.where(visible, scores - mean, 0.0)
        deviation += away * away
    some = tl.maximum(tl.sum(weights, 0), 1e-30, propagate_nan=tl.PropagateNan.ALL)

    plane = tl.num_programs(1).to(tl.int64) * count  # statistics are stored one after the other, as in RowSums
    to = sums_at + both.to(tl.int64) * count + row
    tl.store(to, largest)
    tl.store(to + plane, tl.sum(weights, 0))
    tl.store(to + 2 * plane, tl.maximum(-tl.sum(slope, 0) / some, 0.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(to + 3 * plane, tl.sum(square, 0) / some / some)
    tl.store(to + 4 * plane, mean)
    tl.store(to + 5 * plane, tl.sum(deviation, 0))
    tl.store(to + 6 * plane, tl.minimum(first_score - base, 0.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(to + 7 * plane, seen)


def _launch_matrix(given: tuple[Tensor, Tensor | None], own: tuple[Tensor, Tensor]) -> None:
    (scores, left_out), (rows, sums) = given, own
    (batch, heads, _, kv_len), count = scores.shape, rows.shape[1]
    left_out = None if left_out is None else left_out.expand(batch, -1).view(torch.uint8)
    launch = _launch(layout_key(scores), None if left_out is None else layout_key(left_out))
    launch(
        (count, batch * heads),
        *(scores, rows, scores if left_out is None else left_out, sums, *scores.stride()),
        *((0, 0) if left_out is None else left_out.stride()),
        *(heads, count, kv_len),
    )


_sum_rows = Replay(_launch_matrix)


def sum_rows(scores: Tensor, left_out: Tensor | None, rows: Tensor, sums: Tensor) -> None:
    """Write the sums over the keys of the rows at these positions, (batch, rows), to (SUMS, 1, batch, heads, rows).

    Rows that are `left_out`, (batch or 1, q_len), have no visible keys.
    """
    _sum_rows((scores, left_out), (rows, sums))


@lru_cache(maxsize=1024)
def _launch(scores: Layout, left_out: Layout | None) -> Launch:
    (*_, kv_len), _, _, device, _ = scores
    tile = min(MOST_KEYS, max(128, 1 << (kv_len - 1).bit_length()))
    return Launch(matrix_kernel, device, {"LEAVES_OUT": left_out is not None, "TILE": tile}, Tiles(1, tile, 4, 1))
