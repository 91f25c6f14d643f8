"""The length of all vectors of each head, in one launch that reads them once and adds up in a fixed order.

Vectors may come as copies whose sum is meant, and some positions may be left out.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscale.measure.cuda.triton.launch import LEAST_WIDTH, unit_stride
from attnscale.measure.cuda.triton.launching import counters, launch, on_device
from attnscale.measure.cuda.triton.tiles import padded_width

PROGRAMS = 1056  # eight a multiprocessor of an H200
TILE = 4096  # elements that a program reads at once
AT_ONCE: tl.constexpr = tl.constexpr(128)  # programs whose sums are added up
PARTS: tl.constexpr = tl.constexpr(4)  # Σx² of every position, of those that count, how many count; the largest x²


@triton.jit(do_not_specialize=["rows", "length", "rows_each"])
def lengths_kernel(
    vectors_at: tl.tensor,
    left_out_at: tl.tensor,
    left_at: tl.tensor,
    arrived_at: tl.tensor,
    lengths_at: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    copy_stride: tl.tensor,
    row_stride: tl.tensor,
    left_out_batch: tl.tensor,
    left_out_row: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    rows_each: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COPIES: tl.constexpr,
    LEAVES_OUT: tl.constexpr,
    IS_MEAN: tl.constexpr,
) -> None:
    """Some rows of a head a program, the batch entries one behind the other; the last one adds up what all left."""
    head = tl.program_id(1)
    look_at_head(
        vectors_at, left_out_at, left_at, arrived_at, lengths_at, head, head, batch_stride, head_stride, copy_stride,
        row_stride, left_out_batch, left_out_row, rows, length, rows_each, 1, 0, HEAD_DIM, WIDTH, TILE_ROWS, COPIES,
        LEAVES_OUT, IS_MEAN, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "length", "rows_each", "key_rows", "key_length", "key_rows_each"])
def both_lengths_kernel(
    query_at: tl.tensor,
    key_at: tl.tensor,
    padding_at: tl.tensor,
    hidden_at: tl.tensor,
    left_at: tl.tensor,
    arrived_at: tl.tensor,
    lengths_at: tl.tensor,
    query_batch: tl.tensor,
    query_head: tl.tensor,
    query_row: tl.tensor,
    key_batch: tl.tensor,
    key_head: tl.tensor,
    key_row: tl.tensor,
    padding_batch: tl.tensor,
    padding_row: tl.tensor,
    hidden_batch: tl.tensor,
    hidden_row: tl.tensor,
    heads: tl.tensor,
    group: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    rows_each: tl.tensor,
    key_rows: tl.tensor,
    key_length: tl.tensor,
    key_rows_each: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    HIDES: tl.constexpr,
    IS_MEAN: tl.constexpr,
    LONGEST: tl.constexpr,
) -> None:
    """The same of the heads of queries, then of those of keys, whose length every query head that shares one gets.

    With LONGEST, behind both lengths, (2, heads), the largest squared length of a query and of a key.
    """
    place = tl.program_id(1)
    if place < heads:
        look_at_head(
            query_at, padding_at, left_at, arrived_at, lengths_at, place, place, query_batch, query_head, 0, query_row,
            padding_batch, padding_row, rows, length, rows_each, 1, 2 * heads, HEAD_DIM, WIDTH, TILE_ROWS, 1,
            HAS_PADDING, IS_MEAN, LONGEST,
        )  # fmt: skip
    else:
        look_at_head(
            key_at, hidden_at, left_at, arrived_at, lengths_at + heads, place, place - heads, key_batch, key_head, 0,
            key_row, hidden_batch, hidden_row, key_rows, key_length, key_rows_each, group, 2 * heads, HEAD_DIM, WIDTH,
            TILE_ROWS, 1, HIDES, IS_MEAN, LONGEST,
        )  # fmt: skip


@triton.jit
def look_at_head(
    vectors_at: tl.tensor,
    left_out_at: tl.tensor,
    left_at: tl.tensor,
    arrived_at: tl.tensor,
    lengths_at: tl.tensor,
    place: tl.tensor,
    head: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    copy_stride: tl.tensor,
    row_stride: tl.tensor,
    left_out_batch: tl.tensor,
    left_out_row: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    rows_each: tl.tensor,
    told: tl.tensor,
    longest_behind: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COPIES: tl.constexpr,
    LEAVES_OUT: tl.constexpr,
    IS_MEAN: tl.constexpr,
    LONGEST: tl.constexpr,
) -> None:
    """A program's rows of a head, which has a place among all; whoever comes last tells its length so many times."""
    slot, slots = tl.program_id(0), tl.num_programs(0)
    dims = tl.arange(0, WIDTH)
    squares = tl.zeros([TILE_ROWS, WIDTH], tl.float32)
    of_counted = tl.zeros([TILE_ROWS, WIDTH], tl.float32)
    counted = tl.zeros([TILE_ROWS], tl.float32)
    longest = tl.zeros([TILE_ROWS], tl.float32)
    end = tl.minimum((slot + 1) * rows_each, rows)
    for start in range(slot * rows_each, end, TILE_ROWS):
        row = start + tl.arange(0, TILE_ROWS)
        entry, position = (row // length).to(tl.int64), (row % length).to(tl.int64)
        at = vectors_at + head.to(tl.int64) * head_stride + entry * batch_stride + position * row_stride
        inside = (row < end)[:, None] & (dims < HEAD_DIM)[None, :]
        vectors = tl.load(at[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
        for copy in tl.static_range(1, COPIES):
            other = at + copy * copy_stride
            vectors += tl.load(other[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
        squares += vectors * vectors
        if LONGEST:
            longest = tl.maximum(longest, tl.sum(vectors * vectors, 1))
        if LEAVES_OUT:
            out = tl.load(left_out_at + entry * left_out_batch + position * left_out_row, mask=row < end, other=1)
            of_counted += tl.where((out == 0)[:, None], vectors * vectors, 0.0)
            counted += (out == 0).to(tl.float32)
    left_at += place * slots * PARTS
    tl.store(left_at + slot, tl.sum(tl.sum(squares, 1).to(tl.float64), 0))
    if LEAVES_OUT:
        tl.store(left_at + slots + slot, tl.sum(tl.sum(of_counted, 1).to(tl.float64), 0))
        tl.store(left_at + 2 * slots + slot, tl.sum(counted.to(tl.float64), 0))
    if LONGEST:
        tl.store(left_at + 3 * slots + slot, tl.max(longest, 0).to(tl.float64))
    tl.debug_barrier()
    if tl.atomic_add(arrived_at + place, 1, sem="acq_rel") == slots - 1:
        total, divisor = added_up(left_at, slots), tl.full([], 1.0, tl.float64)
        if IS_MEAN:
            divisor = rows.to(tl.float64)
        if LEAVES_OUT:  # where none would count, all do
            number = added_up(left_at + 2 * slots, slots)
            total = tl.where(number > 0.0, added_up(left_at + slots, slots), total)
            divisor = tl.where(number > 0.0, number, divisor)
        for number in range(0, told):
            tl.store(lengths_at + head * told + number, tl.sqrt(total / divisor))
        if LONGEST:  # NaN where any vector is: the sum of all is then
            highest = largest_of_all(left_at + 3 * slots, slots) + 0.0 * added_up(left_at, slots)
            for number in range(0, told):
                tl.store(lengths_at + longest_behind + head * told + number, highest)
        tl.store(arrived_at + place, 0)  # for the next launch


@triton.jit
def added_up(left_at: tl.tensor, slots: tl.tensor) -> tl.tensor:
    """What so many programs left, in a fixed order."""
    total = tl.zeros([AT_ONCE], tl.float64)
    for start in range(0, slots, AT_ONCE):
        place = start + tl.arange(0, AT_ONCE)
        total += tl.load(left_at + place, mask=place < slots, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def largest_of_all(left_at: tl.tensor, slots: tl.tensor) -> tl.tensor:
    """The largest of what so many programs left."""
    highest = tl.zeros([AT_ONCE], tl.float64)
    for start in range(0, slots, AT_ONCE):
        place = start + tl.arange(0, AT_ONCE)
        here = tl.load(left_at + place, mask=place < slots, other=0.0, cache_modifier=".cg")
        highest = tl.maximum(highest, here)
    return tl.max(highest, 0)


def head_lengths(copies: Tensor, kind: Hashable = None) -> Tensor:
    """Of what copies are together, (batch, heads, copies, length, features), a float64 a head."""
    return _measured(copies, None, is_mean=False, kind=kind)


def mean_lengths(vectors: Tensor, left_out: Tensor | None, kind: Hashable = None) -> Tensor:
    """√(Σx² / positions) of (batch, heads, length, features), without those left out, (batch or 1, length)."""
    return _measured(vectors.unsqueeze(2), left_out, is_mean=True, kind=kind)


def lengths_of_both(
    query: Tensor,
    key: Tensor,
    left_out: tuple[Tensor | None, Tensor | None] = (None, None),
    is_mean: bool = False,
    kind: Hashable = None,
) -> Tensor:
    """(2, heads): of queries, and of the key that each of their heads has, as wide as they are; in one launch."""
    query, key = unit_stride(query), unit_stride(key)
    (batch, heads, length, features), (key_batch, keys, key_length, _) = query.shape, key.shape
    rows, key_rows, width = batch * length, key_batch * key_length, padded_width(features, LEAST_WIDTH)
    parts, tile = parts_of(heads + keys, max(rows, key_rows), width)
    left = torch.empty((heads + keys) * parts * PARTS.value, dtype=torch.float64, device=query.device)
    found = torch.empty((2, heads), dtype=torch.float64, device=query.device)
    padding, hidden = _as_numbers(left_out[0], query), _as_numbers(left_out[1], key)
    with on_device(query):
        launch(
            both_lengths_kernel,
            (parts, heads + keys),
            (
                *(query, key, padding, hidden, left, counters(query.device, heads + keys), found),
                *(*_strides(query), *_strides(key), *padding.stride()[:2], *hidden.stride()[:2], heads, heads // keys),
                *(rows, length, rows_each(rows, parts, tile), key_rows, key_length, rows_each(key_rows, parts, tile)),
            ),
            (features, width, tile, left_out[0] is not None, left_out[1] is not None, is_mean, False),
            (4, 1),
            kind,
        )
    return found


def _measured(copies: Tensor, left_out: Tensor | None, is_mean: bool, kind: Hashable) -> Tensor:
    copies = unit_stride(copies)
    batch, heads, count, length, features = copies.shape
    rows, width = batch * length, padded_width(features, LEAST_WIDTH)
    parts, tile = parts_of(heads, rows, width)
    left = torch.empty(heads * parts * PARTS.value, dtype=torch.float64, device=copies.device)
    found = torch.empty(heads, dtype=torch.float64, device=copies.device)
    out = _as_numbers(left_out, copies)
    with on_device(copies):
        launch(
            lengths_kernel,
            (parts, heads),
            (
                *(copies, out, left, counters(copies.device, heads), found, *copies.stride()[:4], *out.stride()[:2]),
                *(rows, length, rows_each(rows, parts, tile)),
            ),
            (features, width, tile, count, left_out is not None, is_mean),
            (4, 1),
            kind,
        )
    return found


def parts_of(heads: int, rows: int, width: int) -> tuple[int, int]:
    """How many programs share out the rows of a head, and how many rows each reads at once."""
    tile = max(1, TILE // width)
    parts = max(1, min(PROGRAMS // heads, -(-rows // tile)))
    return -(-rows // rows_each(rows, parts, tile)), tile


def rows_each(rows: int, parts: int, tile: int) -> int:
    """Of so many programs, in whole tiles."""
    return -(-rows // (parts * tile)) * tile


def _strides(vectors: Tensor) -> tuple[int, ...]:
    """Of batch entries, heads and rows."""
    return vectors.stride()[:3]


def _as_numbers(left_out: Tensor | None, vectors: Tensor) -> Tensor:
    """Which are left out of each batch entry; anything, where none is."""
    return vectors if left_out is None else left_out.expand(len(vectors), -1).view(torch.uint8)
