"""What the moments of all scores are made of, in one pass over query and key: no score outside the diagonal is formed.

Σ (q·k)² over a rectangle of rows and keys is ⟨QᵀQ, KᵀK⟩. A program takes one segment of one head's queries, or keys,
and leaves Σ x and Σ x xᵀ of x = q − p. The pivot p is zero, except in coordinates that lie far from it: a head whose
keys share a large offset would lose its variance in the rounding of the offset's square. Causal, the triangles on the
diagonal, as wide as a segment, are passed over score by score, about the mean of each program's first tile.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

import triton
import triton.language as tl

from attnscale.measure.cuda.triton.rows import key_tile

PIVOT_ROWS: tl.constexpr = tl.constexpr(32)  # that tell where a coordinate lies, spread over all rows
STACK: tl.constexpr = tl.constexpr(16)  # rows that stay apart until a segment is done
FAR: tl.constexpr = tl.constexpr(9.0)  # squared standard deviations: nearer, a sum of squares keeps its digits


@triton.jit(do_not_specialize=["batch", "heads", "kv_heads", "q_len", "kv_len", "segments", "row_tiles"])
def grams_kernel(
    query_at: tl.tensor,
    key_at: tl.tensor,
    work_at: tl.tensor,
    triangles_at: tl.tensor,
    query_batch: tl.tensor,
    query_head: tl.tensor,
    query_row: tl.tensor,
    key_batch: tl.tensor,
    key_head: tl.tensor,
    key_row: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    q_len: tl.tensor,
    kv_len: tl.tensor,
    segments: tl.tensor,
    row_tiles: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """A segment of a head's Gram matrix, PART of its rows; behind those, the triangles of a causal pass."""
    parts: tl.constexpr = WIDTH // PART
    index = tl.program_id(0)
    of_query = batch * heads * segments * parts
    of_key = batch * kv_heads * segments * parts
    if index < of_query:
        one, begin, part = index // (segments * parts), index // parts % segments * SEGMENT, index % parts
        at = query_at + (one // heads).to(tl.int64) * query_batch + (one % heads).to(tl.int64) * query_head
        to = work_at + one.to(tl.int64) * (segments * (WIDTH + 1) * WIDTH + WIDTH)
        _gram(at, to, query_row, begin, part, q_len, segments, HEAD_DIM, WIDTH, PART, SEGMENT, TILE, PRECISION)
    elif index < of_query + of_key:
        index -= of_query
        one, begin, part = index // (segments * parts), index // parts % segments * SEGMENT, index % parts
        at = key_at + (one // kv_heads).to(tl.int64) * key_batch + (one % kv_heads).to(tl.int64) * key_head
        to = work_at + (batch * heads + one).to(tl.int64) * (segments * (WIDTH + 1) * WIDTH + WIDTH)
        _gram(at, to, key_row, begin, part, kv_len, segments, HEAD_DIM, WIDTH, PART, SEGMENT, TILE, PRECISION)
    else:
        index -= of_query + of_key
        one, tile = index // row_tiles, index % row_tiles
        entry, head = (one // heads).to(tl.int64), (one % heads).to(tl.int64)
        query_at += entry * query_batch + head * query_head
        key_at += entry * key_batch + head // (heads // kv_heads) * key_head
        left = triangles_at + index.to(tl.int64) * 3
        _triangle(
            query_at,
            key_at,
            left,
            query_row,
            key_row,
            tile * TILE,
            q_len,
            kv_len,
            HEAD_DIM,
            WIDTH,
            SEGMENT,
            TILE,
            PRECISION,
        )


@triton.jit
def _gram(
    at: tl.tensor,
    to: tl.tensor,
    stride: tl.tensor,
    begin: tl.tensor,
    part: tl.tensor,
    length: tl.tensor,
    segments: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Rows from begin on: behind the pivot (WIDTH,) lie the sums (segments, WIDTH) and the matrices."""
    dims = tl.arange(0, WIDTH)
    own = part * PART + tl.arange(0, PART)
    pivot = _pivot(at, stride, dims, length, HEAD_DIM)
    far = tl.sum(tl.where(pivot != 0.0, 1, 0), 0) > 0
    gram = tl.zeros([PART, WIDTH], tl.float32)
    total = tl.zeros([STACK, WIDTH], tl.float32)
    end = tl.minimum(begin + SEGMENT, length)
    if far:
        own_pivot = pivot
        if PART < WIDTH:
            own_pivot = _pivot(at, stride, own, length, HEAD_DIM)
        for start in range(begin, end, TILE):
            inside = (start + tl.arange(0, TILE) < end)[:, None]
            tile = key_tile(at, start, stride, end, HEAD_DIM, WIDTH, TILE, True)
            moved = tl.where(inside, tile.to(tl.float32) - pivot[None, :], 0.0)
            left = moved
            if PART < WIDTH:
                left = _columns(at, start, stride, end, own, HEAD_DIM, TILE).to(tl.float32) - own_pivot[None, :]
                left = tl.where(inside, left, 0.0)
            total += _stacked(moved, TILE, WIDTH)
            # a difference has more digits than its terms: those that the operands' type holds, and the rest
            most, left_most = moved.to(tile.dtype), left.to(tile.dtype)
            rest = (moved - most.to(tl.float32)).to(tile.dtype)
            left_rest = (left - left_most.to(tl.float32)).to(tile.dtype)
            gram = tl.dot(tl.trans(left_most), most, gram, input_precision=PRECISION)
            gram = tl.dot(tl.trans(left_most), rest, gram, input_precision=PRECISION)
            gram = tl.dot(tl.trans(left_rest), most, gram, input_precision=PRECISION)
    else:
        for start in range(begin, end, TILE):
            tile = key_tile(at, start, stride, end, HEAD_DIM, WIDTH, TILE, True)
            left = tile
            if PART < WIDTH:
                left = _columns(at, start, stride, end, own, HEAD_DIM, TILE)
            gram = tl.dot(tl.trans(left), tile, gram, input_precision=PRECISION)
            total += _stacked(tile.to(tl.float32), TILE, WIDTH)
    segment = begin // SEGMENT
    tl.store(to + dims, pivot)
    tl.store(to + WIDTH + segment * WIDTH + dims, tl.sum(total, 0))
    to += WIDTH + segments * WIDTH + segment.to(tl.int64) * (WIDTH * WIDTH)
    tl.store(to + own[:, None] * WIDTH + dims[None, :], gram)


@triton.jit
def _stacked(tile: tl.tensor, TILE: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Rows added up as far as each thread holds several: no exchange between threads until the segment is done."""
    return tl.sum(tl.reshape(tile, [TILE // STACK, STACK, WIDTH]), 0)


@triton.jit
def _pivot(at: tl.tensor, stride: tl.tensor, dims: tl.tensor, length: tl.tensor, HEAD_DIM: tl.constexpr) -> tl.tensor:
    """The mean of some rows in coordinates where it is far from zero, as the operands' type holds it; else zero."""
    chosen = (tl.arange(0, PIVOT_ROWS).to(tl.int64) * length // PIVOT_ROWS)[:, None]
    some = tl.load(at + chosen * stride + dims[None, :], mask=(dims < HEAD_DIM)[None, :], other=0.0)
    wide = some.to(tl.float32)
    mean = tl.sum(wide, 0) / PIVOT_ROWS
    away = wide - mean[None, :]
    variance = tl.sum(away * away, 0) / PIVOT_ROWS
    return tl.where(mean * mean > FAR * variance, mean, 0.0).to(some.dtype).to(tl.float32)


@triton.jit
def _columns(
    at: tl.tensor,
    start: tl.tensor,
    stride: tl.tensor,
    end: tl.tensor,
    dims: tl.tensor,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Some coordinates of the rows from start on, zeros past the end."""
    offset = tl.arange(0, TILE)[:, None]
    at = at + tl.cast(start, tl.int64) * stride + (offset * stride + dims[None, :])
    return tl.load(at, mask=(start + offset < end) & (dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _triangle(
    query_at: tl.tensor,
    key_at: tl.tensor,
    to: tl.tensor,
    query_row: tl.tensor,
    key_row: tl.tensor,
    start: tl.tensor,
    q_len: tl.tensor,
    kv_len: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Σ u, Σ u² and the centre c of u = q·k − c, over the visible keys of a tile of rows in their own segment."""
    row = start + tl.arange(0, TILE)
    query = key_tile(query_at, start, query_row, q_len, HEAD_DIM, WIDTH, TILE, True)
    # the tile on the diagonal tells the centre
    key = key_tile(key_at, start, key_row, kv_len, HEAD_DIM, WIDTH, TILE, True)
    products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    column = start + tl.arange(0, TILE)
    visible = (column[None, :] <= row[:, None]) & (column < kv_len)[None, :] & (row < q_len)[:, None]
    seen = tl.sum(tl.sum(visible.to(tl.float32), 1), 0)
    centre = tl.sum(tl.sum(tl.where(visible, products, 0.0), 1), 0) / tl.maximum(seen, 1.0)
    away = tl.where(visible, products - centre, 0.0)
    first = away
    second = away * away
    begin = start // SEGMENT * SEGMENT
    for before in range(begin, tl.minimum(start, kv_len // TILE * TILE), TILE):
        key = key_tile(key_at, before, key_row, kv_len, HEAD_DIM, WIDTH, TILE, False)
        away = tl.dot(query, tl.trans(key), input_precision=PRECISION) - centre
        first += away
        second += away * away
    before = tl.maximum(kv_len // TILE * TILE, begin)
    if (before < kv_len) & (before < start):  # the last keys, which do not fill a tile
        key = key_tile(key_at, before, key_row, kv_len, HEAD_DIM, WIDTH, TILE, True)
        away = tl.dot(query, tl.trans(key), input_precision=PRECISION) - centre
        away = tl.where((before + tl.arange(0, TILE) < kv_len)[None, :], away, 0.0)
        first += away
        second += away * away
    kept = row < q_len  # rows past the end are zeros, and lie at −centre
    tl.store(to, tl.sum(tl.where(kept, tl.sum(first, 1), 0.0).to(tl.float64), 0))
    tl.store(to + 1, tl.sum(tl.where(kept, tl.sum(second, 1), 0.0).to(tl.float64), 0))
    tl.store(to + 2, centre.to(tl.float64))
