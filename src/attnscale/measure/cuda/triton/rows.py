"""The pass over every row in Triton: a tile of query rows against all the keys they see."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

import math

import triton
import triton.language as tl

from attnscale.measure.cuda.triton.sequences import FIELDS

LN_2: tl.constexpr = tl.constexpr(math.log(2))
TILE_FIELDS: tl.constexpr = FIELDS
VANISHED: tl.constexpr = tl.constexpr(-200.0)  # 2 to this is zero; a hidden key's −∞ times zero is NaN


@triton.jit(do_not_specialize=["heads", "group", "count", "kv_len"])  # one compilation for all lengths
def rows_kernel(
    query_at: tl.tensor,
    key_at: tl.tensor,
    value_at: tl.tensor,
    output_at: tl.tensor,
    sums_at: tl.tensor,
    lse_at: tl.tensor,
    rows_at: tl.tensor,
    tiles_at: tl.tensor,
    query_batch: tl.tensor,
    query_head: tl.tensor,
    query_row: tl.tensor,
    key_batch: tl.tensor,
    key_head: tl.tensor,
    key_row: tl.tensor,
    value_batch: tl.tensor,
    value_head: tl.tensor,
    value_row: tl.tensor,
    lse_batch: tl.tensor,
    lse_head: tl.tensor,
    lse_row: tl.tensor,
    heads: tl.tensor,
    group: tl.tensor,
    count: tl.tensor,
    kv_len: tl.tensor,
    scale: tl.tensor,
    scale_2: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    ATTENDS: tl.constexpr,
    GIVEN_LSE: tl.constexpr,
    GIVEN_ROWS: tl.constexpr,
    MOMENTS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One tile of query rows against all the keys they see; with SEQUENCES, those of the sequence that it is in."""
    planes_apart = tl.cast(count, tl.int64) * heads  # one statistic behind the other, as in RowSums
    if SEQUENCES:
        row_tiles = tl.load(tiles_at)
        if tl.program_id(0) >= row_tiles * heads:  # there is room for more tiles than there are
            return
        both, tile_at = tl.program_id(0) // row_tiles, tiles_at + (1 + tl.program_id(0) % row_tiles) * TILE_FIELDS
        begin, length, start = tl.load(tile_at), tl.load(tile_at + 1), tl.load(tile_at + 2)
        to_at = both.to(tl.int64) * count + begin
        count, kv_len = length, length
    else:
        row_tiles = tl.cdiv(count, TILE_ROWS)
        start = (row_tiles - 1 - tl.program_id(0) % row_tiles) * TILE_ROWS  # causal rows that see most start first
        both, begin = tl.program_id(0) // row_tiles, 0
        planes_apart *= tl.num_programs(0) // row_tiles // heads
        to_at = both.to(tl.int64) * count
    batch, head = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    skipped = tl.cast(begin, tl.int64)
    query_at += batch * query_batch + head * query_head + skipped * query_row
    key_at += batch * key_batch + head // group * key_head + skipped * key_row
    value_at += batch * value_batch + head // group * value_head + skipped * value_row

    row = start + tl.arange(0, TILE_ROWS)
    kept = row < count
    row = tl.minimum(row, count - 1)  # past the end, repeat the last row: nothing to mask until the results are stored
    position = tl.load(rows_at + row) if GIVEN_ROWS else row
    dims = tl.arange(0, WIDTH)
    inside = (dims < HEAD_DIM)[None, :]
    query = tl.load(query_at + position[:, None].to(tl.int64) * query_row + dims[None, :], mask=inside, other=0.0)

    shift = tl.zeros([TILE_ROWS], tl.float32)
    if GIVEN_LSE:
        lse_at += batch * lse_batch + head * lse_head
        shift = tl.load(lse_at + position.to(tl.int64) * lse_row) * (1 / LN_2)
    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)  # of q·k, not yet scaled: differences from it are exact
    total = tl.zeros([TILE_ROWS], tl.float32)
    slope = tl.zeros([TILE_ROWS], tl.float32)
    square = tl.zeros([TILE_ROWS], tl.float32)
    # moments are taken about the first key's score: a large mean does not swallow the variance
    pivot = tl.zeros([TILE_ROWS], tl.float32)
    if MOMENTS:
        first_key = tl.load(key_at + dims, mask=dims < HEAD_DIM, other=0.0)
        pivot = tl.sum(query.to(tl.float32) * first_key.to(tl.float32)[None, :], 1)
    away = tl.zeros([TILE_ROWS], tl.float32)
    away_square = tl.zeros([TILE_ROWS], tl.float32)
    output = tl.zeros([TILE_ROWS, WIDTH], tl.float32)

    seen_by_all, seen = kv_len, kv_len
    if CAUSAL:
        seen_by_all = tl.minimum(tl.min(position, 0).to(tl.int32) + 1, kv_len)
        seen = tl.minimum(tl.max(position, 0).to(tl.int32) + 1, kv_len)
    whole = seen_by_all // TILE_KEYS * TILE_KEYS
    for MASKED in tl.static_range(2):  # the tiles of keys that every row sees whole, then the others, with a mask
        output, highest, total, slope, square, away, away_square = _visit(
            output,
            highest,
            total,
            slope,
            square,
            away,
            away_square,
            pivot,
            query,
            position,
            shift,
            key_at,
            value_at,
            key_row,
            value_row,
            whole if MASKED else 0,
            seen if MASKED else whole,
            kv_len,
            scale_2,
            HEAD_DIM,
            WIDTH,
            TILE_KEYS,
            MASKED,
            CAUSAL,
            ATTENDS,
            MOMENTS,
            GIVEN_LSE,
            PRECISION,
        )

    to = to_at + row
    if ATTENDS:
        output = output / total[:, None]
        here = output_at + to[:, None] * HEAD_DIM + dims[None, :]
        if SEQUENCES:  # by token, as they lie
            here = output_at + ((skipped + row)[:, None] * heads + head) * HEAD_DIM + dims[None, :]
        tl.store(here, output.to(output_at.dtype.element_ty), mask=kept[:, None] & inside)
    mean = tl.div_rn(slope, total)
    participation = tl.div_rn(tl.div_rn(square, total), total)
    if GIVEN_LSE:
        top = highest * scale_2 - shift
        total = total / tl.exp2(top)
        mean = mean - top
    sums_at += to
    plane = planes_apart
    tl.store(sums_at, highest * scale, mask=kept)
    tl.store(sums_at + plane, total, mask=kept)
    tl.store(sums_at + 2 * plane, tl.maximum(-mean * LN_2, 0.0), mask=kept)
    tl.store(sums_at + 3 * plane, participation, mask=kept)
    if ATTENDS:
        lse_at += batch * lse_batch + head * lse_head
        tl.store(lse_at + (skipped + row) * lse_row, highest * scale + tl.log(total), mask=kept)
    if MOMENTS:
        visible = tl.minimum(position + 1, kv_len) if CAUSAL else tl.zeros_like(position) + kv_len
        mean_away = away / visible.to(tl.float32)
        tl.store(sums_at + 4 * plane, (pivot + mean_away) * scale, mask=kept)
        deviation = tl.maximum(away_square - away * mean_away, 0.0)
        tl.store(sums_at + 5 * plane, deviation * (scale * scale), mask=kept)
        if SEQUENCES:
            tl.store(sums_at + 6 * plane, visible.to(tl.float32), mask=kept)


@triton.jit
def _visit(
    output: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    slope: tl.tensor,
    square: tl.tensor,
    away: tl.tensor,
    away_square: tl.tensor,
    pivot: tl.tensor,
    query: tl.tensor,
    position: tl.tensor,
    shift: tl.tensor,
    key_at: tl.tensor,
    value_at: tl.tensor,
    key_row: tl.tensor,
    value_row: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    kv_len: tl.tensor,
    scale_2: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    ATTENDS: tl.constexpr,
    MOMENTS: tl.constexpr,
    GIVEN_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Add the keys from begin to end to l = Σ 2^z, Σ 2^z z, Σ 4^z and Σ 2^z v, z from the maximum or the lse."""
    # Were the few masked tiles pipelined too, ptxas would serialise every product on the tensor cores (C7515).
    for start in tl.range(begin, end, TILE_KEYS, num_stages=1 if MASKED else None):
        column = start + tl.arange(0, TILE_KEYS)
        key = key_tile(key_at, start, key_row, kv_len, HEAD_DIM, WIDTH, TILE_KEYS, MASKED)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if MASKED:
            visible = (column < kv_len)[None, :]
            if CAUSAL:
                visible = visible & (column[None, :] <= position[:, None])
            products = tl.where(visible, products, float("-inf"))
        if MOMENTS:
            difference = products - pivot[:, None]
            if MASKED:
                difference = tl.where(visible, difference, 0.0)
            away += tl.sum(difference, 1)
            away_square += tl.sum(difference * difference, 1)
        higher = tl.maximum(highest, tl.max(products, 1))
        if GIVEN_LSE:
            z = products * scale_2 - shift[:, None]
        else:
            moved = tl.where(highest == float("-inf"), 0.0, (highest - higher) * scale_2)  # −∞ − −∞ at the first tile
            shrink = tl.exp2(moved)
            slope = (slope + total * moved) * shrink
            total *= shrink
            square *= shrink * shrink
            # Scaled after the subtraction: one rounding less than a fused multiply-add, and exactly 0 at the maximum.
            z = (products - higher[:, None]) * scale_2
        if MASKED:
            z = tl.maximum(z, VANISHED, propagate_nan=tl.PropagateNan.ALL)
        p = tl.exp2(z)
        slope += tl.sum(p * z, 1)
        total += tl.sum(p, 1)
        square += tl.sum(p * p, 1)
        if ATTENDS:
            value = key_tile(value_at, start, value_row, kv_len, HEAD_DIM, WIDTH, TILE_KEYS, MASKED)
            output = tl.dot(p.to(value.dtype), value, output * shrink[:, None], input_precision=PRECISION)
        highest = higher
    return output, highest, total, slope, square, away, away_square


@triton.jit
def key_tile(
    at: tl.tensor,
    start: tl.tensor,
    stride: tl.tensor,
    length: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Keys or values from start on, zeros past the end."""
    offset, dims = tl.arange(0, TILE_KEYS)[:, None], tl.arange(0, WIDTH)[None, :]
    at = at + tl.cast(start, tl.int64) * stride + (offset * stride + dims)  # 64 bits once, 32 bits an element
    if MASKED:
        return tl.load(at, mask=(start + offset < length) & (dims < HEAD_DIM), other=0.0)
    if HEAD_DIM < WIDTH:
        return tl.load(at, mask=dims < HEAD_DIM, other=0.0)
    return tl.load(at)
