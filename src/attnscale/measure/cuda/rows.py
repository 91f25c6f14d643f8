"""The pass over every row: a tile of query rows against all their visible keys, with or without the output."""
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscale.measure.cuda.launch import (
    SUMS,
    Launch,
    Layout,
    capability,
    layout_key,
    positive_scale,
    tile_constants,
    tiles,
    token_layout_key,
    unit_stride,
)
from attnscale.measure.cuda.sequence_tiles import FIELDS, SIZES, most_tiles, tiles_of

LOG2_E = math.log2(math.e)  # exponentials are base 2 inside, natural outside
LN_2: tl.constexpr = tl.constexpr(math.log(2))
TILE_FIELDS: tl.constexpr = FIELDS
MANY_ROWS = 2**16  # assumed for packed sequences, because only the device knows their lengths
VANISHED: tl.constexpr = tl.constexpr(-200.0)  # 2 to this is zero; a hidden key's −∞ times zero is NaN


@triton.jit(do_not_specialize=SIZES)
def rows_kernel(
    query_at,
    key_at,
    value_at,
    output_at,
    sums_at,
    lse_at,
    tiles_at,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    value_batch,
    value_head,
    value_row,
    heads,
    group,
    count,
    kv_len,
    scale,
    scale_2,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    ATTENDS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute one tile of query rows against all visible keys; with SEQUENCES, those of the tile's own sequence."""
    planes_apart = tl.cast(count, tl.int64) * heads  # statistics are stored one after the other, as in RowSums
    if SEQUENCES:
        row_tiles = tl.load(tiles_at)
        if tl.program_id(0) >= row_tiles * heads:  # the grid may have more programs than tiles
            return
        both, tile_at = tl.program_id(0) // row_tiles, tiles_at + (1 + tl.program_id(0) % row_tiles) * TILE_FIELDS
        begin, length, start = tl.load(tile_at), tl.load(tile_at + 1), tl.load(tile_at + 2)
        to_at = both.to(tl.int64) * count + begin
        count, kv_len = length, length
    else:
        row_tiles = tl.cdiv(count, TILE_ROWS)
        start = (row_tiles - 1 - tl.program_id(0) % row_tiles) * TILE_ROWS  # causal rows with the most keys start first
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
    dims = tl.arange(0, WIDTH)
    inside = (dims < HEAD_DIM)[None, :]
    query = tl.load(query_at + row[:, None].to(tl.int64) * query_row + dims[None, :], mask=inside, other=0.0)

    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)  # unscaled, so that differences from it are exact
    total = tl.zeros([TILE_ROWS], tl.float32)
    slope = tl.zeros([TILE_ROWS], tl.float32)
    square = tl.zeros([TILE_ROWS], tl.float32)
    # moments about the first key's score, so that a large mean does not hide the variance
    first_key = tl.load(key_at + dims, mask=dims < HEAD_DIM, other=0.0)
    pivot = tl.sum(query.to(tl.float32) * first_key.to(tl.float32)[None, :], 1)
    away = tl.zeros([TILE_ROWS], tl.float32)
    away_square = tl.zeros([TILE_ROWS], tl.float32)
    output = tl.zeros([TILE_ROWS, WIDTH], tl.float32)

    seen_by_all, seen = kv_len, kv_len
    if CAUSAL:
        seen_by_all = tl.minimum(tl.min(row, 0).to(tl.int32) + 1, kv_len)
        seen = tl.minimum(tl.max(row, 0).to(tl.int32) + 1, kv_len)
    whole = seen_by_all // TILE_KEYS * TILE_KEYS
    # l = Σ 2^z, Σ 2^z z, Σ 4^z and Σ 2^z v, first over tiles of keys that all rows see completely, then over the others
    for MASKED in tl.static_range(2):
        # The few masked tiles are not pipelined: ptxas would serialise every product on the tensor cores (C7515).
        for here in tl.range(
            whole if MASKED else 0, seen if MASKED else whole, TILE_KEYS, num_stages=1 if MASKED else None
        ):
            column = here + tl.arange(0, TILE_KEYS)
            key = key_tile(key_at, here, key_row, kv_len, HEAD_DIM, WIDTH, TILE_KEYS, MASKED)
            products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
            if MASKED:
                visible = (column < kv_len)[None, :]
                if CAUSAL:
                    visible = visible & (column[None, :] <= row[:, None])
                products = tl.where(visible, products, float("-inf"))
            difference = products - pivot[:, None]
            if MASKED:
                difference = tl.where(visible, difference, 0.0)
            away += tl.sum(difference, 1)
            away_square += tl.sum(difference * difference, 1)
            higher = tl.maximum(highest, tl.max(products, 1))
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
                value = key_tile(value_at, here, value_row, kv_len, HEAD_DIM, WIDTH, TILE_KEYS, MASKED)
                output = tl.dot(p.to(value.dtype), value, output * shrink[:, None], input_precision=PRECISION)
            highest = higher

    to = to_at + row
    if ATTENDS:
        at = output_at + to[:, None] * HEAD_DIM + dims[None, :]
        if SEQUENCES:  # stored by token
            at = output_at + ((skipped + row)[:, None] * heads + head) * HEAD_DIM + dims[None, :]
        output = output / total[:, None]
        tl.store(at, output.to(output_at.dtype.element_ty), mask=kept[:, None] & inside)
        tl.store(lse_at + to, highest * scale + tl.log(total), mask=kept)
    sums_at += to
    plane = planes_apart
    tl.store(sums_at, highest * scale, mask=kept)
    tl.store(sums_at + plane, total, mask=kept)
    tl.store(sums_at + 2 * plane, tl.maximum(-tl.div_rn(slope, total) * LN_2, 0.0), mask=kept)
    tl.store(sums_at + 3 * plane, tl.div_rn(tl.div_rn(square, total), total), mask=kept)
    visible = tl.minimum(row + 1, kv_len) if CAUSAL else tl.zeros_like(row) + kv_len
    mean_away = away / visible.to(tl.float32)
    tl.store(sums_at + 4 * plane, (pivot + mean_away) * scale, mask=kept)
    deviation = tl.maximum(away_square - away * mean_away, 0.0)
    tl.store(sums_at + 5 * plane, deviation * (scale * scale), mask=kept)
    first = tl.minimum((pivot - highest) * scale, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(sums_at + 6 * plane, first, mask=kept)
    tl.store(sums_at + 7 * plane, visible.to(tl.float32), mask=kept)


@triton.jit
def key_tile(
    at,
    start,
    stride,
    length,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load keys or values from `start`, with zeros past the end."""
    offset, dims = tl.arange(0, TILE_KEYS)[:, None], tl.arange(0, WIDTH)[None, :]
    # One 64-bit offset, then 32 bits for each element.
    at = at + tl.cast(start, tl.int64) * stride + (offset * stride + dims)
    if MASKED:
        return tl.load(at, mask=(start + offset < length) & (dims < HEAD_DIM), other=0.0)
    if HEAD_DIM < WIDTH:
        return tl.load(at, mask=dims < HEAD_DIM, other=0.0)
    return tl.load(at)


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, scale: float, starts: Tensor | None = None, *, is_causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return softmax(scale · QKᵀ) V, the lse and the sums of every row.

    With the `starts` of packed sequences, (1, heads, total, head_dim), each sequence attends to itself, and the output
    is (total, heads, head_dim).
    """
    shape = query.shape if starts is None else (query.shape[2], query.shape[1], query.shape[3])
    output = torch.empty(shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    return output, lse, _run(query, key, (value, output, lse), scale, is_causal, starts)


def score_rows(query: Tensor, key: Tensor, scale: float, is_causal: bool, starts: Tensor | None = None) -> Tensor:
    """Return the sums of every row, without the output."""
    return _run(query, key, None, scale, is_causal, starts)


def _run(
    query: Tensor,
    key: Tensor,
    attended: tuple[Tensor, Tensor, Tensor] | None,
    scale: float,
    is_causal: bool,
    starts: Tensor | None,
) -> Tensor:
    query, scale = positive_scale(query, scale)
    query, key = unit_stride(query), unit_stride(key)
    value, output, lse = (key, query, query) if attended is None else attended
    value = unit_stride(value)
    batch, heads, count, _ = query.shape
    key_of = layout_key if starts is None else token_layout_key
    value_key = None if attended is None else key_of(value)
    launch = _launch(key_of(query), key_of(key), value_key, is_causal, starts is not None)
    sums = torch.empty((SUMS, batch, heads, count), dtype=torch.float32, device=query.device)
    programs, placed = -(-count // launch.tiles.rows) * batch * heads, query
    if starts is not None:
        sums[-1].zero_()  # tokens after the last sequence see no keys
        programs = most_tiles(starts, count, launch.tiles.rows) * heads
        placed = tiles_of(starts, count, launch.tiles.rows, is_causal)
    launch(
        (programs,),
        *(query, key, value, output, sums, lse, placed),
        *(*query.stride()[:3], *key.stride()[:3], *value.stride()[:3]),
        *(heads, heads // key.shape[1], count, key.shape[2], scale, scale * LOG2_E),
    )
    return sums


@lru_cache(maxsize=1024)
def _launch(query: Layout, key: Layout, value: Layout | None, is_causal: bool, in_sequences: bool) -> Launch:
    (*_, rows, head_dim), _, dtype, device, _ = query
    cut = tiles(MANY_ROWS if in_sequences else rows, head_dim, dtype, capability(device))
    constants = {
        **tile_constants(cut, head_dim, dtype, device),
        "CAUSAL": is_causal,
        "ATTENDS": value is not None,
        "SEQUENCES": in_sequences,
    }
    return Launch(rows_kernel, device, constants, cut)
