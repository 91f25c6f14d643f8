"""The pass over sampled rows, and over rows with masks, biases, windows, documents or a soft-cap.

A program takes a span of a head's keys, so that few rows still fill a GPU; finish.py merges the spans of a row. A mask
is read once, and only for the measured rows. The same pass can find the largest score of each head that exceeds a
limit; it skips tiles of rows whose bounds are within the limit.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cuda.launch import (
    LEAST_WIDTH,
    SUMS,
    Launch,
    Layout,
    Tiles,
    capability,
    layout_key,
    masked_tiles,
    padded_width,
    sample_tiles,
    tile_constants,
    tiles,
    unit_stride,
)
from attnscale.measure.cuda.rows import VANISHED, key_tile
from attnscale.measure.cuda.sequence_tiles import SIZES

SLACK: tl.constexpr = tl.constexpr(1 + 1e-4)  # rounding may raise a score above the product of the norms by this factor
LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
NO_MASK: tl.constexpr = tl.constexpr(0)
BOOLEAN: tl.constexpr = tl.constexpr(1)
ADDED: tl.constexpr = tl.constexpr(2)
KEY_PARTS: tl.constexpr = tl.constexpr(16)  # number of programs that find the longest key of a head
KEY_TILE = 4096  # elements of keys that such a program reads at once


@triton.jit(
    do_not_specialize=SIZES,
    do_not_specialize_on_alignment=["rows_at", "limit_at", "largest_at", "calls_at"],  # parts of larger tensors
)
def masked_kernel(
    query_at,
    key_at,
    rows_at,
    mask_at,
    row_documents_at,
    key_documents_at,
    sums_at,
    longest_at,
    added_at,
    limit_at,
    largest_at,
    calls_at,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    mask_batch,
    mask_head,
    mask_row,
    mask_key,
    row_documents_batch,
    row_documents_row,
    key_documents_batch,
    key_documents_key,
    heads,
    group,
    count,
    kv_len,
    kv_span,
    first,
    last,
    scale,
    softcap,
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
    LARGEST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the sums of a tile of rows over one span of a head's keys, and each row's number of visible keys.

    With LARGEST, raise the largest score of the head instead, if one can be above the limit; NaN counts as ∞.
    """
    PLAIN: tl.constexpr = MASK == NO_MASK and not FIRST and not DOCUMENTS  # each row sees a prefix of the keys
    row_tiles = tl.cdiv(count, TILE_ROWS)
    spans, all_heads = tl.num_programs(1), tl.num_programs(0) // row_tiles
    span, both, begins = tl.program_id(1), tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles * TILE_ROWS
    if GIVEN_ROWS:  # the keys that the attention read last are still in the L2
        both = all_heads - 1 - both
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
    if MASK_BY_ROW and not GIVEN_ROWS:  # one 64-bit offset, then 32 bits for each element
        mask_at += begins.to(tl.int64) * mask_row
        mask_rows = (row - begins) * mask_row
    if MASK_BY_ROW and GIVEN_ROWS:
        mask_rows = position.to(tl.int64) * mask_row
    if DOCUMENTS:
        own = tl.load(row_documents_at + batch * row_documents_batch + position * row_documents_row)
        key_documents_at += batch * key_documents_batch

    begin, end = span * kv_span, tl.minimum(span * kv_span + kv_span, kv_len)
    start, stop = begin, end
    if LAST:  # skips tiles that no row sees
        stop = tl.minimum(stop, tl.max(position, 0) + last + 1)
    if FIRST:
        ahead = tl.maximum(tl.min(position, 0) + first - begin, 0)
        start = begin + ahead // TILE_KEYS * TILE_KEYS
    if LARGEST:
        squares = tl.sum(query.to(tl.float32) * query.to(tl.float32), 1)
        length = tl.sqrt(tl.max(squares, 0)) + 0.0 * tl.sum(squares, 0)  # NaN if any value is NaN, which tl.max ignores
        own_key = both // heads * (heads // group) + head // group
        lengths = tl.load(longest_at + own_key * KEY_PARTS + tl.arange(0, KEY_PARTS))
        longest = tl.max(lengths, 0) + 0.0 * tl.sum(lengths, 0)  # NaN if a key has NaN
        reach = length * longest * tl.abs(scale) * SLACK
        if CAPPED:
            reach = tl.minimum(reach, softcap)
        if MASK == ADDED:
            reach += tl.load(added_at)
        if tl.program_id(0) == 0:
            tl.store(calls_at, tl.load(calls_at) + 1.0)
        passes = (reach > tl.load(limit_at)) | (reach != reach)
        stop = tl.where(passes, stop, start)
    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    slope = tl.zeros([TILE_ROWS], tl.float32)
    square = tl.zeros([TILE_ROWS], tl.float32)
    number = tl.zeros([TILE_ROWS], tl.float32)
    first_key = tl.load(key_at + begin.to(tl.int64) * key_row + dims, mask=dims < HEAD_DIM, other=0.0)
    mean = tl.sum(query.to(tl.float32) * first_key.to(tl.float32)[None, :], 1) * scale  # initial value near the scores
    deviation = tl.zeros([TILE_ROWS], tl.float32)
    first_score = mean  # score of the first visible key
    if CAPPED:
        first_score = softcap * tanh(mean / softcap)
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
        if LARGEST:
            scores = tl.where(scores == scores, scores, float("inf"))
            highest = tl.maximum(highest, tl.max(tl.where(visible, scores, float("-inf")), 1))
        else:
            scores = tl.where(visible, scores, float("-inf"))
            if PLAIN:
                seen = tl.minimum(here + TILE_KEYS, end)
                if LAST:
                    seen = tl.minimum(seen, position + last + 1)
                number = (tl.zeros_like(position) + tl.maximum(seen - begin, 0)).to(tl.float32)
            else:
                earliest = tl.min(tl.where(visible, column[None, :], kv_len), 1)
                first_here = tl.sum(tl.where(column[None, :] == earliest[:, None], scores, 0.0), 1)
                first_score = tl.where(number == 0.0, first_here, first_score)
                number += tl.sum(visible.to(tl.float32), 1)
            # moments about the mean so far, then about the combined mean (Chan et al. 1979)
            away = tl.where(visible, scores - mean[:, None], 0.0)
            total_away = tl.sum(away, 1)
            moves = total_away / tl.maximum(number, 1.0)
            deviation += tl.sum(away * away, 1) - total_away * moves
            mean += moves

            higher = tl.maximum(highest, tl.max(scores, 1), propagate_nan=tl.PropagateNan.ALL)
            base = tl.where(higher == float("-inf"), 0.0, higher)  # the row may have no visible key yet
            moved = tl.where(highest == float("-inf"), 0.0, (highest - base) * LOG2_E)
            shrink = tl.exp2(moved)
            z = tl.maximum((scores - base[:, None]) * LOG2_E, VANISHED, propagate_nan=tl.PropagateNan.ALL)
            p = tl.exp2(z)
            slope = (slope + total * moved) * shrink + tl.sum(p * z, 1)
            total = total * shrink + tl.sum(p, 1)
            square = square * shrink * shrink + tl.sum(p * p, 1)
            highest = higher

    if LARGEST:
        if passes:
            tl.atomic_max(largest_at + head, tl.max(highest, 0))
    else:
        some = tl.where(total == 0.0, 1.0, total)
        to = sums_at + (span * all_heads + both).to(tl.int64) * count + row
        plane = spans.to(tl.int64) * all_heads * count  # statistics are stored one after the other, as in RowSums
        tl.store(to, highest, mask=kept)
        tl.store(to + plane, total, mask=kept)
        tl.store(to + 2 * plane, tl.maximum(-tl.div_rn(slope, some) / LOG2_E, 0.0), mask=kept)
        tl.store(to + 3 * plane, tl.div_rn(tl.div_rn(square, some), some), mask=kept)
        tl.store(to + 4 * plane, mean, mask=kept)
        tl.store(to + 5 * plane, tl.maximum(deviation, 0.0), mask=kept)
        peak = tl.where(number == 0.0, 0.0, highest)  # a row without keys would give −∞ − −∞
        below = tl.minimum(first_score - peak, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(to + 6 * plane, tl.where(number == 0.0, 0.0, below), mask=kept)
        tl.store(to + 7 * plane, number, mask=kept)


@triton.jit(do_not_specialize=SIZES)
def longest_kernel(
    key_at: tl.tensor,
    longest_at: tl.tensor,
    key_batch: tl.tensor,
    key_head: tl.tensor,
    key_row: tl.tensor,
    keys: tl.tensor,
    kv_len: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write the norm of the longest key among a part of the keys of one head; NaN if a key has NaN."""
    both, part = tl.program_id(0), tl.program_id(1)
    key_at += (both // keys).to(tl.int64) * key_batch + (both % keys).to(tl.int64) * key_head
    column = tl.arange(0, WIDTH)
    longest = tl.zeros([TILE], tl.float32)
    for begin in range(part * TILE, kv_len, KEY_PARTS * TILE):
        row = begin + tl.arange(0, TILE)
        at = key_at + row[:, None].to(tl.int64) * key_row + column[None, :]
        values = tl.load(at, mask=(row < kv_len)[:, None] & (column < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
        longest = tl.maximum(longest, tl.sum(values * values, 1), propagate_nan=tl.PropagateNan.ALL)
    has_nan = tl.sum(tl.where(longest != longest, 1, 0), 0) > 0
    tl.store(longest_at + both * KEY_PARTS + part, tl.where(has_nan, float("nan"), tl.sqrt(tl.max(longest, 0))))


@triton.jit
def masked(scores, visible, inside, MASK: tl.constexpr):
    """Return scores with the mask added, and True for visible scores."""
    if MASK == BOOLEAN:
        return scores, visible & (inside != 0)
    return scores + inside.to(tl.float32), visible & (inside != float("-inf"))


@triton.jit
def tanh(x):
    """Compute the hyperbolic tangent by 1 − 2/(1 + e^{2x}), or near zero by its series, which is more precise there."""
    squared = x * x
    near = x * (1.0 - squared * (1.0 / 3.0 - squared * (2.0 / 15.0 - squared * (17.0 / 315.0))))
    return tl.where(squared < 0.01, near, 1.0 - 2.0 / (1.0 + tl.exp2(2.0 * LOG2_E * x)))


def score_masked_rows(call: Call, rows: Tensor | None, span: int, sums: Tensor | None = None) -> Tensor:
    """Return the sums over each span of keys, for every row or for the rows at these positions, (batch, rows).

    Their shape is (SUMS, spans, batch, heads, rows), in `sums` if given. Hidden keys of the mask are False or −∞.
    """
    count = call.query.shape[2] if rows is None else rows.shape[1]
    sums = empty_sums(call.query, call.key, count, span) if sums is None else sums
    _run(call, None if rows is None else rows.contiguous(), count, span, sums, None)
    return sums


def empty_sums(query: Tensor, key: Tensor, count: int, span: int) -> Tensor:
    """Return memory for the sums of this many rows."""
    batch, heads, *_ = query.shape
    shape = SUMS, -(-key.shape[2] // span), batch, heads, count
    return torch.empty(shape, dtype=torch.float32, device=query.device)


def raise_largest_(largest: Tensor, limit: Tensor, calls: Tensor, call: Call, added: Tensor | None) -> None:
    """Raise `largest`, one float32 for each head, to the head's largest score if that exceeds the limit.

    `added` is the largest value that is added to a score. `calls` is incremented by one.
    """
    longest = _longest_keys(unit_stride(call.key))
    written = longest, limit if added is None else added, limit, largest, calls
    _run(call, None, call.query.shape[2], call.key.shape[2], largest, written)


def _longest_keys(key: Tensor) -> Tensor:
    """Return the norm of the longest key in each part of the keys of a head, float32 (batch · kv_heads, KEY_PARTS)."""
    batch, keys, kv_len, _ = key.shape
    longest = torch.empty(batch * keys, KEY_PARTS.value, dtype=torch.float32, device=key.device)
    launch = _longest_launch(layout_key(key))
    launch((batch * keys, KEY_PARTS.value), key, longest, *key.stride()[:3], keys, kv_len)
    return longest


@lru_cache(maxsize=1024)
def _longest_launch(key: Layout) -> Launch:
    (*_, head_dim), _, _, device, _ = key
    width = padded_width(head_dim, LEAST_WIDTH)
    cut = Tiles(max(1, KEY_TILE // width), 0, 4, 2)
    return Launch(longest_kernel, device, {"HEAD_DIM": head_dim, "WIDTH": width, "TILE": cut.rows}, cut)


def _run(
    call: Call, rows: Tensor | None, count: int, span: int, sums: Tensor, written: tuple[Tensor, ...] | None
) -> None:
    query, key, seen = unit_stride(call.query), unit_stride(call.key), call.visibility
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = query.shape, key.shape
    own, theirs = (None, None) if seen.documents is None else seen.documents
    own = None if own is None else own.expand(batch, q_len)
    theirs = None if theirs is None else theirs.expand(batch, kv_len)
    layouts = (None if tensor is None else layout_key(tensor) for tensor in (query, key, seen.mask, own, theirs))
    flags = seen.bias is not None, seen.first is not None, seen.last is not None, call.softcap is not None
    launch = _launch(*layouts, *flags, None if rows is None else count, written is not None)
    launch(
        (-(-count // launch.tiles.rows) * batch * heads, -(-kv_len // span)),
        *(query, key, query if rows is None else rows),
        *(_as_numbers(each, query) for each in (seen.mask, own, theirs)),
        *(sums, *(written or (sums,) * 5), *query.stride()[:3], *key.stride()[:3], *_mask_strides(seen.mask)),
        *((0, 0) if own is None else own.stride()),
        *((0, 0) if theirs is None else theirs.stride()),
        *(heads, heads // kv_heads, count, kv_len, span, seen.first or 0, seen.last or 0),
        *(float(call.scale), float(call.softcap or 1.0)),
    )


@lru_cache(maxsize=1024)
def _launch(
    query: Layout,
    key: Layout,
    mask: Layout | None,
    own_documents: Layout | None,
    their_documents: Layout | None,
    is_bias: bool,
    has_first: bool,
    has_last: bool,
    is_capped: bool,
    sampled: int | None,
    is_largest: bool,
) -> Launch:
    (*_, rows, head_dim), _, dtype, device, _ = query
    by_row = mask is not None and mask[0][2] > 1 and mask[1][2] != 0
    known = head_dim, dtype, capability(device)
    if sampled is not None:
        cut = sample_tiles(sampled, *known, has_first)
    else:
        cut = tiles(rows, *known) if is_largest and not by_row else masked_tiles(*known, by_row)
    constants = {
        **tile_constants(cut, head_dim, dtype, device),
        "GIVEN_ROWS": sampled is not None,
        "MASK": (NO_MASK if mask is None else ADDED if is_bias else BOOLEAN).value,
        "MASK_BY_ROW": by_row,
        "FIRST": has_first,
        "LAST": has_last,
        "DOCUMENTS": own_documents is not None,
        "CAPPED": is_capped,
        "LARGEST": is_largest,
    }
    return Launch(masked_kernel, device, constants, cut)


def _mask_strides(mask: Tensor | None) -> tuple[int, ...]:
    """Return the strides of a mask; zero along an axis of one element."""
    if mask is None:
        return (0, 0, 0, 0)
    return tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))


def _as_numbers(tensor: Tensor | None, otherwise: Tensor) -> Tensor:
    if tensor is None:
        return otherwise
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
