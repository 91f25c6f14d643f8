"""The pass over rows that see some of the keys, or whose scores are capped: masks, biases, windows, documents.

What a mask costs is reading it; so it is read once, and only of the rows that are looked at.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

import math

import triton
import triton.language as tl

from attnscale.measure.cuda.triton.rows import VANISHED, key_tile

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
NO_MASK: tl.constexpr = tl.constexpr(0)
BOOLEAN: tl.constexpr = tl.constexpr(1)
ADDED: tl.constexpr = tl.constexpr(2)


@triton.jit(do_not_specialize=["heads", "group", "count", "kv_len", "kv_span", "first", "last"])
def shown_kernel(
    query_at: tl.tensor,
    key_at: tl.tensor,
    rows_at: tl.tensor,
    mask_at: tl.tensor,
    row_documents_at: tl.tensor,
    key_documents_at: tl.tensor,
    sums_at: tl.tensor,
    query_batch: tl.tensor,
    query_head: tl.tensor,
    query_row: tl.tensor,
    key_batch: tl.tensor,
    key_head: tl.tensor,
    key_row: tl.tensor,
    mask_batch: tl.tensor,
    mask_head: tl.tensor,
    mask_row: tl.tensor,
    mask_key: tl.tensor,
    row_documents_batch: tl.tensor,
    row_documents_row: tl.tensor,
    key_documents_batch: tl.tensor,
    key_documents_key: tl.tensor,
    heads: tl.tensor,
    group: tl.tensor,
    count: tl.tensor,
    kv_len: tl.tensor,
    kv_span: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    GIVEN_ROWS: tl.constexpr,
    MASK: tl.constexpr,
    MASK_BY_ROW: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """A tile of rows against one span of a head's keys: SCORED of each row, and how many keys it sees there."""
    row_tiles = tl.cdiv(count, TILE_ROWS)
    spans, all_heads = tl.num_programs(1), tl.num_programs(0) // row_tiles
    span, both, begins = tl.program_id(1), tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles * TILE_ROWS
    batch, head = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    query_at += batch * query_batch + head * query_head
    key_at += batch * key_batch + head // group * key_head
    row = begins + tl.arange(0, TILE_ROWS)
    kept = row < count
    row = tl.minimum(row, count - 1)
    position = tl.load(rows_at + batch * count + row).to(tl.int32) if GIVEN_ROWS else row
    dims = tl.arange(0, WIDTH)
    at = query_at + position[:, None].to(tl.int64) * query_row + dims[None, :]
    query = tl.load(at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    offset = tl.arange(0, TILE_KEYS)
    if MASK != NO_MASK:
        mask_at += batch * mask_batch + head * mask_head
    if MASK_BY_ROW and not GIVEN_ROWS:  # 64 bits once, 32 bits an element
        mask_at += begins.to(tl.int64) * mask_row
        mask_rows = (row - begins) * mask_row
    if MASK_BY_ROW and GIVEN_ROWS:
        mask_rows = position.to(tl.int64) * mask_row
    if DOCUMENTS:
        own = tl.load(row_documents_at + batch * row_documents_batch + position * row_documents_row)
        key_documents_at += batch * key_documents_batch

    begin, end = span * kv_span, tl.minimum(span * kv_span + kv_span, kv_len)
    start, stop = begin, end
    if LAST:  # whole tiles that no row sees are left out
        stop = tl.minimum(stop, tl.max(position, 0) + last + 1)
    if FIRST:
        ahead = tl.maximum(tl.min(position, 0) + first - begin, 0)
        start = begin + ahead // TILE_KEYS * TILE_KEYS
    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    slope = tl.zeros([TILE_ROWS], tl.float32)
    square = tl.zeros([TILE_ROWS], tl.float32)
    number = tl.zeros([TILE_ROWS], tl.float32)
    first_key = tl.load(key_at + begin.to(tl.int64) * key_row + dims, mask=dims < HEAD_DIM, other=0.0)
    mean = tl.sum(query.to(tl.float32) * first_key.to(tl.float32)[None, :], 1) * scale  # to begin near the scores
    deviation = tl.zeros([TILE_ROWS], tl.float32)
    for here in range(start, stop, TILE_KEYS):
        column = here + offset
        key = key_tile(key_at, here, key_row, end, HEAD_DIM, WIDTH, TILE_KEYS, True)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        if CAPPED:
            scores = softcap * tanh(scores / softcap)
        visible = (column < end)[None, :] & kept[:, None]
        if LAST:
            visible = visible & (column[None, :] <= position[:, None] + last)
        if FIRST:
            visible = visible & (column[None, :] >= position[:, None] + first)
        if DOCUMENTS:
            theirs = tl.load(key_documents_at + column * key_documents_key, mask=column < end, other=0)
            visible = visible & (own[:, None] == theirs[None, :])
        if MASK != NO_MASK:
            tile_at = mask_at + tl.cast(here, tl.int64) * mask_key
            if MASK_BY_ROW:
                inside = tl.load(tile_at + (mask_rows[:, None] + offset[None, :] * mask_key), mask=visible, other=0)
            else:
                inside = tl.load(tile_at + offset * mask_key, mask=column < end, other=0)[None, :]
            scores, visible = masked(scores, visible, inside, MASK)
        scores = tl.where(visible, scores, float("-inf"))

        # moments about the mean so far, then about that of both (Chan et al. 1979)
        away = tl.where(visible, scores - mean[:, None], 0.0)
        total_away = tl.sum(away, 1)
        number += tl.sum(visible.to(tl.float32), 1)
        moves = total_away / tl.maximum(number, 1.0)
        deviation += tl.sum(away * away, 1) - total_away * moves
        mean += moves

        higher = tl.maximum(highest, tl.max(scores, 1), propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row may have seen nothing yet
        moved = tl.where(highest == float("-inf"), 0.0, (highest - base) * LOG2_E)
        shrink = tl.exp2(moved)
        z = tl.maximum((scores - base[:, None]) * LOG2_E, VANISHED, propagate_nan=tl.PropagateNan.ALL)
        p = tl.exp2(z)
        slope = (slope + total * moved) * shrink + tl.sum(p * z, 1)
        total = total * shrink + tl.sum(p, 1)
        square = square * shrink * shrink + tl.sum(p * p, 1)
        highest = higher

    some = tl.where(total == 0.0, 1.0, total)
    to = sums_at + (span * all_heads + both).to(tl.int64) * count + row
    plane = spans.to(tl.int64) * all_heads * count  # one statistic behind the other, as in RowSums
    tl.store(to, highest, mask=kept)
    tl.store(to + plane, total, mask=kept)
    tl.store(to + 2 * plane, tl.maximum(-tl.div_rn(slope, some) / LOG2_E, 0.0), mask=kept)
    tl.store(to + 3 * plane, tl.div_rn(tl.div_rn(square, some), some), mask=kept)
    tl.store(to + 4 * plane, mean, mask=kept)
    tl.store(to + 5 * plane, tl.maximum(deviation, 0.0), mask=kept)
    tl.store(to + 6 * plane, number, mask=kept)


@triton.jit
def masked(scores: tl.tensor, visible: tl.tensor, inside: tl.tensor, MASK: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Scores with what a mask adds to them, and which of them it shows."""
    if MASK == BOOLEAN:
        return scores, visible & (inside != 0)
    return scores + inside.to(tl.float32), visible & (inside != float("-inf"))


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """1 − 2/(1 + e^{2x}); near zero, where that is mostly rounding, the series."""
    squared = x * x
    near = x * (1.0 - squared * (1.0 / 3.0 - squared * (2.0 / 15.0 - squared * (17.0 / 315.0))))
    return tl.where(squared < 0.01, near, 1.0 - 2.0 / (1.0 + tl.exp2(2.0 * LOG2_E * x)))
