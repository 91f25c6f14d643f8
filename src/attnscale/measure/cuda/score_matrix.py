"""Passes over a full matrix of scores, which hand-written attention forms.

One pass measures sampled rows: a program reads each row twice, first for its largest score and its mean, then for the
sums that need these. The other pass compares a few rows with q·k, to find the scale that was really applied.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscale.measure.cuda.launch import LEAST_WIDTH, Launch, Layout, Tiles, layout_key, padded_width
from attnscale.measure.cuda.rows import VANISHED
from attnscale.measure.cuda.sequence_tiles import SIZES
from attnscale.visibility import NEVER_A_SCORE

MOST_KEYS = 4096  # block size of a program that measures a row
TILE_ELEMENTS = 4096  # block size, in elements of keys, of a program that finds a scale
HIDDEN: tl.constexpr = tl.constexpr(NEVER_A_SCORE)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["rows_at"])
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
    """Write the sums of RowSums for one row, and its number of visible keys: zero if the row is left out."""
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


def sum_rows(scores: Tensor, left_out: Tensor | None, rows: Tensor, sums: Tensor) -> None:
    """Write the sums over the keys of the rows at these positions, (batch, rows), to (SUMS, 1, batch, heads, rows).

    Rows that are `left_out`, (batch or 1, q_len), have no visible keys.
    """
    (batch, heads, _, kv_len), count = scores.shape, rows.shape[1]
    left_out = None if left_out is None else left_out.expand(batch, -1).view(torch.uint8)
    launch = _matrix_launch(layout_key(scores), None if left_out is None else layout_key(left_out))
    launch(
        (count, batch * heads),
        *(scores, rows, scores if left_out is None else left_out, sums, *scores.stride()),
        *((0, 0) if left_out is None else left_out.stride()),
        *(heads, count, kv_len),
    )


@lru_cache(maxsize=1024)
def _matrix_launch(scores: Layout, left_out: Layout | None) -> Launch:
    (*_, kv_len), _, _, device, _ = scores
    tile = min(MOST_KEYS, max(128, 1 << (kv_len - 1).bit_length()))
    return Launch(matrix_kernel, device, {"LEAVES_OUT": left_out is not None, "TILE": tile}, Tiles(1, tile, 4, 1))


@triton.jit(
    do_not_specialize=[*SIZES, "disagreement", "softcap"],
    do_not_specialize_on_alignment=["scales_at"],  # a part of a larger tensor
)
def slope_kernel(
    scores_at: tl.tensor,
    query_at: tl.tensor,
    key_at: tl.tensor,
    positions_at: tl.tensor,
    multiplier_at: tl.tensor,
    stated_at: tl.tensor,
    scales_at: tl.tensor,
    score_head: tl.tensor,
    score_row: tl.tensor,
    score_key: tl.tensor,
    query_head: tl.tensor,
    query_row: tl.tensor,
    query_feature: tl.tensor,
    key_head: tl.tensor,
    key_row: tl.tensor,
    key_feature: tl.tensor,
    kv_len: tl.tensor,
    softcap: tl.tensor,
    disagreement: tl.tensor,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
) -> None:
    """Write the stated scale of a head, times the slope of its scores on multiplier · q·k if the slope is not one."""
    head = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, WIDTH)
    together, own = tl.zeros([1], tl.float64), tl.zeros([1], tl.float64)
    for number in range(ROWS):
        position = tl.load(positions_at + number)
        own_at = query_at + head * query_head + position * query_row + feature * query_feature
        query = tl.load(own_at, mask=feature < HEAD_DIM, other=0.0).to(tl.float32)
        count, sum_x, sum_y = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
        sum_xx, sum_xy = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
        for begin in range(0, kv_len, TILE):
            row = (begin + tl.arange(0, TILE)).to(tl.int64)
            tile_at = key_at + head * key_head + row[:, None] * key_row + feature[None, :] * key_feature
            inside = (row < kv_len)[:, None] & (feature < HEAD_DIM)[None, :]
            key = tl.load(tile_at, mask=inside, other=0.0).to(tl.float32)
            here_at = scores_at + head * score_head + position * score_row + row * score_key
            scores = tl.load(here_at, mask=row < kv_len, other=float("-inf")).to(tl.float64)
            visible = scores > HIDDEN
            if CAPPED:
                share = scores / softcap
                visible = visible & (tl.abs(share) < 1.0)
                share = tl.where(visible, share, 0.0)
                scores = 0.5 * softcap * tl.log((1.0 + share) / (1.0 - share))
            x = tl.where(visible, tl.sum(key * query[None, :], 1).to(tl.float64), 0.0)
            y = tl.where(visible, scores, 0.0)
            count += visible.to(tl.float64)
            sum_x += x
            sum_y += y
            sum_xx += x * x
            sum_xy += x * y
        seen = tl.maximum(tl.sum(count, 0), 1.0)
        total = tl.sum(sum_x, 0)
        together += tl.sum(sum_xy, 0) - total * tl.sum(sum_y, 0) / seen
        own += tl.sum(sum_xx, 0) - total * total / seen
    here = tl.arange(0, 1)
    slope = together / tl.where(own > 0.0, own, 1.0) / tl.load(multiplier_at + head + here).to(tl.float64)
    slope = tl.where((own > 0.0) & (tl.abs(slope) < float("inf")), slope, 1.0)
    stated = tl.load(stated_at + head + here).to(tl.float64)
    tl.store(scales_at + head + here, tl.where(tl.abs(slope - 1.0) > disagreement, stated * slope, stated))


def find_scales(
    scores: Tensor,
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    multiplier: Tensor,
    stated: Tensor,
    softcap: float | None,
    disagreement: float,
    scales: Tensor,
) -> None:
    """Write the scale of each head, float64 (heads,), from the rows of the first batch entry at these positions.

    If the slope of the scores on `multiplier` · q·k differs from one by more than `disagreement`, the scale is the
    slope times `stated`, (heads,); otherwise it is `stated`.
    """
    launch = _slope_launch(*map(layout_key, (scores, query, key)), len(positions), softcap is not None)
    launch(
        (scores.shape[1],),
        *(scores, query, key, positions, multiplier, stated, scales),
        *(stride for tensor in (scores, query, key) for stride in tensor.stride()[1:]),
        *(scores.shape[3], float(softcap or 1.0), float(disagreement)),
    )


@lru_cache(maxsize=1024)
def _slope_launch(scores: Layout, query: Layout, key: Layout, rows: int, is_capped: bool) -> Launch:
    (*_, head_dim), _, _, device, _ = query
    width = padded_width(head_dim, LEAST_WIDTH)
    cut = Tiles(rows, max(16, TILE_ELEMENTS // width), 4, 1)
    constants = {"ROWS": rows, "HEAD_DIM": head_dim, "WIDTH": width, "TILE": cut.keys, "CAPPED": is_capped}
    return Launch(slope_kernel, device, constants, cut)
