"""The pass over a few sampled rows in Triton, which reads every key once: all else should hide behind that.

A program takes a span of a head's keys, so that few rows still fill a GPU; the spans of a row are merged like shards
of keys (`RowSums.over_shards`). Within a program every column of a tile keeps sums of its own, about its own maximum,
and they are merged once at the end: rows of few keys a thread would spend their time on sums across threads.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscale.measure.cuda.launch import (
    Launch,
    capability,
    positive_scale,
    sample_tiles,
    tile_constants,
    unit_stride,
)
from attnscale.measure.cuda.layout import SUMS, Layout, layout_key
from attnscale.measure.cuda.rows import LN_2, LOG2_E, key_tile


@triton.jit(
    do_not_specialize=["heads", "group", "count", "kv_len", "kv_span"],
    do_not_specialize_on_alignment=["rows_at"],  # one of many draws in one tensor
)
def sample_kernel(
    query_at: tl.tensor,
    key_at: tl.tensor,
    rows_at: tl.tensor,
    sums_at: tl.tensor,
    query_batch: tl.tensor,
    query_head: tl.tensor,
    query_row: tl.tensor,
    key_batch: tl.tensor,
    key_head: tl.tensor,
    key_row: tl.tensor,
    heads: tl.tensor,
    group: tl.tensor,
    count: tl.tensor,
    kv_len: tl.tensor,
    kv_span: tl.tensor,
    scale: tl.tensor,
    scale_2: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Write the sums of a tile of sampled rows over one span of a head's keys."""
    span, both = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)  # what was read last is still in the L2
    batch, head = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    query_at += batch * query_batch + head * query_head
    key_at += batch * key_batch + head // group * key_head
    rows_at += batch * count
    row = tl.program_id(2) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    position = tl.load(rows_at + tl.minimum(row, count - 1))
    dims = tl.arange(0, WIDTH)
    at = query_at + position[:, None].to(tl.int64) * query_row + dims[None, :]
    query = tl.load(at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    begin = span * kv_span
    end = tl.minimum(begin + kv_span, kv_len)
    seen = end
    if CAUSAL:
        seen = tl.minimum(tl.max(position, 0).to(tl.int32) + 1, end)

    highest = tl.full([TILE_ROWS, TILE_KEYS], float("-inf"), tl.float32)  # of q·k, not yet scaled
    total = tl.zeros([TILE_ROWS, TILE_KEYS], tl.float32)
    slope = tl.zeros([TILE_ROWS, TILE_KEYS], tl.float32)
    square = tl.zeros([TILE_ROWS, TILE_KEYS], tl.float32)
    first_key = tl.load(key_at + begin.to(tl.int64) * key_row + dims, mask=dims < HEAD_DIM, other=0.0)
    pivot = tl.sum(query.to(tl.float32) * first_key.to(tl.float32)[None, :], 1)  # near every score: moments about it
    away = tl.zeros([TILE_ROWS, TILE_KEYS], tl.float32)
    away_square = tl.zeros([TILE_ROWS, TILE_KEYS], tl.float32)
    for start in range(begin, seen, TILE_KEYS):
        key = key_tile(key_at, start, key_row, end, HEAD_DIM, WIDTH, TILE_KEYS, True)
        column = start + tl.arange(0, TILE_KEYS)
        visible = (column < end)[None, :]
        if CAUSAL:
            visible = visible & (column[None, :] <= position[:, None])
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        difference = tl.where(visible, products - pivot[:, None], 0.0)
        away += difference
        away_square += difference * difference
        higher = tl.maximum(highest, tl.where(visible, products, float("-inf")), propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a column may have shown nothing yet
        moved = tl.where(highest == float("-inf"), 0.0, (highest - base) * scale_2)
        shrink = tl.exp2(moved)
        z = tl.where(visible, (products - base) * scale_2, 0.0)
        p = tl.where(visible, tl.exp2(z), 0.0)
        slope = (slope + total * moved) * shrink + p * z
        total = total * shrink + p
        square = square * shrink * shrink + p * p
        highest = higher

    peak = tl.max(highest, 1)
    moved = tl.where(highest == float("-inf"), 0.0, (highest - tl.where(highest == float("-inf"), 0.0, peak[:, None])))
    moved *= scale_2
    shrink = tl.exp2(moved)
    row_total = tl.sum(total * shrink, 1)
    row_slope = tl.sum((slope + total * moved) * shrink, 1)
    row_square = tl.sum(square * shrink * shrink, 1)
    row_away = tl.sum(away, 1)
    some = tl.where(row_total == 0.0, 1.0, row_total)  # rows that see nothing of this span have no mean
    shown = end - begin
    if CAUSAL:
        shown = tl.maximum(tl.minimum(position.to(tl.int32) + 1, end) - begin, 1)
    mean_away = row_away / shown.to(tl.float32)
    deviation = tl.maximum(tl.sum(away_square, 1) - row_away * mean_away, 0.0)

    kept = row < count
    spans, all_heads = tl.num_programs(0), tl.num_programs(1)
    to = sums_at + (span * all_heads + both).to(tl.int64) * count + row
    plane = spans.to(tl.int64) * all_heads * count  # one statistic behind the other, as in RowSums
    tl.store(to, peak * scale, mask=kept)
    tl.store(to + plane, row_total, mask=kept)
    tl.store(to + 2 * plane, tl.maximum(-tl.div_rn(row_slope, some) * LN_2, 0.0), mask=kept)
    tl.store(to + 3 * plane, tl.div_rn(tl.div_rn(row_square, some), some), mask=kept)
    tl.store(to + 4 * plane, (pivot + mean_away) * scale, mask=kept)
    tl.store(to + 5 * plane, deviation * (scale * scale), mask=kept)
    first = tl.minimum((pivot - peak) * scale, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(to + 6 * plane, first, mask=kept)


def sample_rows(query: Tensor, key: Tensor, rows: Tensor, scale: float, is_causal: bool, span: int) -> Tensor:
    """Return the sums of the rows at these positions, (batch, rows), over each span of keys.

    They are (SUMS, spans, batch, heads, rows).
    """
    query, scale = positive_scale(query, scale)
    query, key = unit_stride(query), unit_stride(key)
    (batch, heads, _, _), (_, kv_heads, kv_len, _), count = query.shape, key.shape, rows.shape[1]
    spans = -(-kv_len // span)
    sums = torch.empty((SUMS, spans, batch, heads, count), dtype=torch.float32, device=query.device)
    launch = _launch(layout_key(query), layout_key(key), count, is_causal)
    launch(
        (spans, batch * heads, -(-count // launch.tiles.rows)),
        *(query, key, rows.contiguous(), sums, *query.stride()[:3], *key.stride()[:3]),
        *(heads, heads // kv_heads, count, kv_len, span, scale, scale * LOG2_E),
    )
    return sums


@lru_cache(maxsize=1024)
def _launch(query: Layout, key: Layout, count: int, is_causal: bool) -> Launch:
    (*_, head_dim), _, dtype, device, _ = query
    cut = sample_tiles(count, head_dim, dtype, capability(device))
    constants = {
        **tile_constants(cut, head_dim, dtype, device),
        "CAUSAL": is_causal,
    }
    return Launch(sample_kernel, device, constants, cut)
