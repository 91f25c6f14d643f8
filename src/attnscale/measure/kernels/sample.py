"""The pass over a few sampled rows in Triton: every key and every query is read once, and all else hides behind that.

A program takes a span of a head's keys, so that few rows still fill a GPU; the spans of a row are merged like shards
of keys (`RowSums.over_shards`). On its way each program finds the longest key of its span, and the longest query of
an equal part of the rows: the largest score there can be is their product.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

import triton
import triton.language as tl

from attnscale.measure.kernels.rows import LN_2, VANISHED, key_tile


@triton.jit(do_not_specialize=["heads", "group", "count", "q_len", "kv_len", "q_span", "kv_span"])
def sample_kernel(
    query_at: tl.tensor,
    key_at: tl.tensor,
    rows_at: tl.tensor,
    sums_at: tl.tensor,
    norms_at: tl.tensor,
    query_batch: tl.tensor,
    query_head: tl.tensor,
    query_row: tl.tensor,
    key_batch: tl.tensor,
    key_head: tl.tensor,
    key_row: tl.tensor,
    heads: tl.tensor,
    group: tl.tensor,
    count: tl.tensor,
    q_len: tl.tensor,
    kv_len: tl.tensor,
    q_span: tl.tensor,
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
    """A tile of sampled rows against one span of a head's keys."""
    span, both = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)  # what was read last is still in the L2
    batch, head = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    query_at += batch * query_batch + head * query_head
    key_at += batch * key_batch + head // group * key_head

    row = tl.program_id(2) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    kept = row < count
    position = tl.load(rows_at + tl.minimum(row, count - 1))
    dims = tl.arange(0, WIDTH)
    at = query_at + position[:, None].to(tl.int64) * query_row + dims[None, :]
    query = tl.load(at, mask=(dims < HEAD_DIM)[None, :], other=0.0)

    begin = span * kv_span
    end = tl.minimum(begin + kv_span, kv_len)
    seen = end
    if CAUSAL:
        seen = tl.minimum(tl.max(position, 0).to(tl.int32) + 1, end)
    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)  # of q·k, not yet scaled: differences from it are exact
    total = tl.zeros([TILE_ROWS], tl.float32)
    slope = tl.zeros([TILE_ROWS], tl.float32)
    square = tl.zeros([TILE_ROWS], tl.float32)
    first_key = tl.load(key_at + begin.to(tl.int64) * key_row + dims, mask=dims < HEAD_DIM, other=0.0)
    pivot = tl.sum(query.to(tl.float32) * first_key.to(tl.float32)[None, :], 1)  # near every score: moments about it
    away = tl.zeros([TILE_ROWS], tl.float32)
    away_square = tl.zeros([TILE_ROWS], tl.float32)
    longest_key = tl.zeros([TILE_KEYS], tl.float32)
    for start in range(begin, seen, TILE_KEYS):
        key = key_tile(key_at, start, key_row, end, HEAD_DIM, WIDTH, TILE_KEYS, True)
        longest_key = tl.maximum(longest_key, _squared_norms(key))
        column = start + tl.arange(0, TILE_KEYS)
        visible = (column < end)[None, :]
        if CAUSAL:
            visible = visible & (column[None, :] <= position[:, None])
        products = tl.where(visible, tl.dot(query, tl.trans(key), input_precision=PRECISION), float("-inf"))
        difference = tl.where(visible, products - pivot[:, None], 0.0)
        away += tl.sum(difference, 1)
        away_square += tl.sum(difference * difference, 1)
        higher = tl.maximum(highest, tl.max(products, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see nothing of this tile, nor of any before
        moved = tl.where(highest == float("-inf"), 0.0, (highest - base) * scale_2)
        shrink = tl.exp2(moved)
        z = tl.where(visible, (products - base[:, None]) * scale_2, VANISHED)
        p = tl.exp2(z)
        slope = (slope + total * moved) * shrink + tl.sum(p * z, 1)
        total = total * shrink + tl.sum(p, 1)
        square = square * shrink * shrink + tl.sum(p * p, 1)
        highest = higher
    for start in range(begin + tl.cdiv(tl.maximum(seen - begin, 0), TILE_KEYS) * TILE_KEYS, end, TILE_KEYS):
        unseen = key_tile(key_at, start, key_row, end, HEAD_DIM, WIDTH, TILE_KEYS, True)
        longest_key = tl.maximum(longest_key, _squared_norms(unseen))

    spans, all_heads = tl.num_programs(0), tl.num_programs(1)
    here = span * all_heads + both
    to = sums_at + here.to(tl.int64) * count + row
    plane = spans.to(tl.int64) * all_heads * count  # one statistic behind the other, as in RowSums
    some = tl.maximum(total, 1.0)  # rows that see nothing of this span have no mean
    tl.store(to, highest * scale, mask=kept)
    tl.store(to + plane, total, mask=kept)
    tl.store(to + 2 * plane, tl.maximum(-tl.div_rn(slope, some) * LN_2, 0.0), mask=kept)
    tl.store(to + 3 * plane, tl.div_rn(tl.div_rn(square, some), some), mask=kept)
    shown = end - begin
    if CAUSAL:
        shown = tl.maximum(tl.minimum(position.to(tl.int32) + 1, end) - begin, 1)
    mean_away = away / shown.to(tl.float32)
    tl.store(to + 4 * plane, (pivot + mean_away) * scale, mask=kept)
    deviation = tl.maximum(away_square - away * mean_away, 0.0)
    tl.store(to + 5 * plane, deviation * (scale * scale), mask=kept)

    if tl.program_id(2) == 0:
        longest_query = tl.zeros([TILE_KEYS], tl.float32)
        for start in range(span * q_span, tl.minimum(span * q_span + q_span, q_len), TILE_KEYS):
            queries = key_tile(query_at, start, query_row, q_len, HEAD_DIM, WIDTH, TILE_KEYS, True)
            longest_query = tl.maximum(longest_query, _squared_norms(queries))
        tl.store(norms_at + here, tl.max(longest_query, 0))
        tl.store(norms_at + spans * all_heads + here, tl.max(longest_key, 0))


@triton.jit
def _squared_norms(rows: tl.tensor) -> tl.tensor:
    rows = rows.to(tl.float32)
    return tl.sum(rows * rows, 1)
