"""The largest score of each head, where a row can have one above a limit; all other rows are read and passed over."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

import triton
import triton.language as tl

from attnscale.measure.cuda.triton.rows import key_tile
from attnscale.measure.cuda.triton.shown import ADDED, NO_MASK, masked, tanh


@triton.jit(do_not_specialize=["heads", "kv_len", "chunk"])
def longest_kernel(
    key_at: tl.tensor,
    longest_at: tl.tensor,
    key_batch: tl.tensor,
    key_head: tl.tensor,
    key_row: tl.tensor,
    heads: tl.tensor,
    kv_len: tl.tensor,
    chunk: tl.tensor,
    CHUNKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_KEYS: tl.constexpr,
) -> None:
    """The largest squared length among the keys of one chunk of a head; NaN where one has it."""
    both, number = tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS
    key_at += (both // heads).to(tl.int64) * key_batch + (both % heads).to(tl.int64) * key_head
    highest, total = tl.zeros([TILE_KEYS], tl.float32), tl.zeros([TILE_KEYS], tl.float32)
    stop = tl.minimum(number * chunk + chunk, kv_len)
    for here in range(number * chunk, stop, TILE_KEYS):
        key = key_tile(key_at, here, key_row, stop, HEAD_DIM, WIDTH, TILE_KEYS, True).to(tl.float32)
        squares = tl.sum(key * key, 1)
        highest, total = tl.maximum(highest, squares), total + squares
    tl.store(longest_at + tl.program_id(0), tl.max(highest, 0) + 0.0 * tl.sum(total, 0))


@triton.jit(do_not_specialize=["heads", "group", "count", "kv_len", "first", "last"])
def largest_kernel(
    query_at: tl.tensor,
    key_at: tl.tensor,
    mask_at: tl.tensor,
    row_documents_at: tl.tensor,
    key_documents_at: tl.tensor,
    longest_at: tl.tensor,
    added_at: tl.tensor,
    limit_at: tl.tensor,
    largest_at: tl.tensor,
    calls_at: tl.tensor,
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
    first: tl.tensor,
    last: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    SLACK: tl.constexpr,
    CHUNKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MASK: tl.constexpr,
    MASK_BY_ROW: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """A tile of rows against the keys of its head."""
    row_tiles = tl.cdiv(count, TILE_ROWS)
    both, begins = tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles * TILE_ROWS
    batch, head = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    row, dims, offset = begins + tl.arange(0, TILE_ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE_KEYS)
    kept = row < count
    at = query_at + batch * query_batch + head * query_head + row[:, None].to(tl.int64) * query_row + dims[None, :]
    query = tl.load(at, mask=kept[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    if DOCUMENTS:
        own = tl.load(row_documents_at + batch * row_documents_batch + row * row_documents_row, mask=kept, other=0)
        key_documents_at += batch * key_documents_batch
    squares = tl.sum(query.to(tl.float32) * query.to(tl.float32), 1)
    length = tl.sqrt(tl.max(squares, 0)) + 0.0 * tl.sum(squares, 0)  # NaN where any is, which max passes over
    chunks = tl.load(longest_at + (both // heads * (heads // group) + head // group) * CHUNKS + tl.arange(0, CHUNKS))
    longest = tl.sqrt(tl.max(chunks, 0)) + 0.0 * tl.sum(chunks, 0)
    reach = length * longest * tl.abs(scale) * SLACK
    if CAPPED:
        reach = tl.minimum(reach, softcap)
    if MASK == ADDED:
        reach += tl.load(added_at)
    if tl.program_id(0) == 0:
        tl.store(calls_at, tl.load(calls_at) + 1.0)
    if (reach > tl.load(limit_at)) | (reach != reach):
        key_at += batch * key_batch + head // group * key_head
        if MASK != NO_MASK:
            mask_at += batch * mask_batch + head * mask_head + begins.to(tl.int64) * mask_row
        start, stop = tl.zeros_like(begins), kv_len
        if LAST:  # whole tiles that no row sees are left out
            stop = tl.minimum(kv_len, begins + TILE_ROWS + last)
        if FIRST:
            start = tl.maximum(begins + first, 0) // TILE_KEYS * TILE_KEYS
        highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        for here in range(start, stop, TILE_KEYS):
            column = here + offset
            key = key_tile(key_at, here, key_row, kv_len, HEAD_DIM, WIDTH, TILE_KEYS, True)
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
            if CAPPED:
                scores = softcap * tanh(scores / softcap)
            visible = (column < kv_len)[None, :] & kept[:, None]
            if LAST:
                visible = visible & (column[None, :] <= row[:, None] + last)
            if FIRST:
                visible = visible & (column[None, :] >= row[:, None] + first)
            if DOCUMENTS:
                theirs = tl.load(key_documents_at + column * key_documents_key, mask=column < kv_len, other=0)
                visible = visible & (own[:, None] == theirs[None, :])
            if MASK != NO_MASK:
                tile_at = mask_at + tl.cast(here, tl.int64) * mask_key
                if MASK_BY_ROW:
                    rows_at = (row - begins) * mask_row
                    inside = tl.load(tile_at + (rows_at[:, None] + offset[None, :] * mask_key), mask=visible, other=0)
                else:
                    inside = tl.load(tile_at + offset * mask_key, mask=column < kv_len, other=0)[None, :]
                scores, visible = masked(scores, visible, inside, MASK)
            scores = tl.where(scores == scores, scores, float("inf"))
            highest = tl.maximum(highest, tl.max(tl.where(visible, scores, float("-inf")), 1))
        tl.atomic_max(largest_at + head, tl.max(highest, 0))
