"""The length of all vectors of each head, in one launch that reads them once and adds up in a fixed order.

Some positions may be left out.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscale.measure.cuda.layout import Layout, layout_key
from attnscale.measure.cuda.triton.launch import Launch, counters, unit_stride
from attnscale.measure.cuda.triton.tiles import LEAST_WIDTH, Tiles, padded_width

PROGRAMS = 1056  # eight a multiprocessor of an H200
TILE = 4096  # elements that a program reads at once
AT_ONCE: tl.constexpr = tl.constexpr(128)  # programs whose sums are added up
PARTS: tl.constexpr = tl.constexpr(4)  # Σx² of every position, of those that count, how many count; the largest x²


@triton.jit(do_not_specialize=["rows", "length", "rows_each", "key_rows", "key_length", "key_rows_each"])
def lengths_kernel(
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
    """Some rows of a head a program, first heads of queries, then those of keys; the last one adds up what all left.

    A program reads the batch entries one behind the other. The length of a key is written for every query head that
    shares it. With LONGEST, behind both lengths, (2, heads), the largest squared length of a query and of a key.
    """
    place = tl.program_id(1)
    if place < heads:
        _measure_head(
            query_at, padding_at, left_at, arrived_at, lengths_at, place, place, query_batch, query_head, query_row,
            padding_batch, padding_row, rows, length, rows_each, 1, 2 * heads, HEAD_DIM, WIDTH, TILE_ROWS,
            HAS_PADDING, IS_MEAN, LONGEST,
        )  # fmt: skip
    else:
        _measure_head(
            key_at, hidden_at, left_at, arrived_at, lengths_at + heads, place, place - heads, key_batch, key_head,
            key_row, hidden_batch, hidden_row, key_rows, key_length, key_rows_each, group, 2 * heads, HEAD_DIM, WIDTH,
            TILE_ROWS, HIDES, IS_MEAN, LONGEST,
        )  # fmt: skip


@triton.jit
def _measure_head(
    vectors_at: tl.tensor,
    left_out_at: tl.tensor,
    left_at: tl.tensor,
    arrived_at: tl.tensor,
    lengths_at: tl.tensor,
    place: tl.tensor,
    head: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
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
    LEAVES_OUT: tl.constexpr,
    IS_MEAN: tl.constexpr,
    LONGEST: tl.constexpr,
) -> None:
    """Rows of a head, which has a place among all; the last program writes its length `told` times."""
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
        total, divisor = _total(left_at, slots), tl.full([], 1.0, tl.float64)
        if IS_MEAN:
            divisor = rows.to(tl.float64)
        if LEAVES_OUT:  # where none would count, all do
            number = _total(left_at + 2 * slots, slots)
            total = tl.where(number > 0.0, _total(left_at + slots, slots), total)
            divisor = tl.where(number > 0.0, number, divisor)
        for number in range(0, told):
            tl.store(lengths_at + head * told + number, tl.sqrt(total / divisor))
        if LONGEST:  # NaN where any vector is: the sum of all is then
            highest = _largest(left_at + 3 * slots, slots) + 0.0 * _total(left_at, slots)
            for number in range(0, told):
                tl.store(lengths_at + longest_behind + head * told + number, highest)
        tl.store(arrived_at + place, 0)  # for the next launch


@triton.jit
def _total(left_at: tl.tensor, slots: tl.tensor) -> tl.tensor:
    """What so many programs left, in a fixed order."""
    total = tl.zeros([AT_ONCE], tl.float64)
    for start in range(0, slots, AT_ONCE):
        place = start + tl.arange(0, AT_ONCE)
        total += tl.load(left_at + place, mask=place < slots, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def _largest(left_at: tl.tensor, slots: tl.tensor) -> tl.tensor:
    """The largest of what so many programs left."""
    highest = tl.zeros([AT_ONCE], tl.float64)
    for start in range(0, slots, AT_ONCE):
        place = start + tl.arange(0, AT_ONCE)
        here = tl.load(left_at + place, mask=place < slots, other=0.0, cache_modifier=".cg")
        highest = tl.maximum(highest, here)
    return tl.max(highest, 0)


def head_lengths(vectors: Tensor) -> Tensor:
    """Return √Σx² of each head of (batch, heads, length, features), float64."""
    return _lengths(vectors, None, None, None, is_mean=False, longest=False)[0]


def mean_lengths(vectors: Tensor, left_out: Tensor | None) -> Tensor:
    """Return √(Σx² / positions) of each head, without the positions left out, (batch or 1, length)."""
    return _lengths(vectors, None, left_out, None, is_mean=True, longest=False)[0]


def lengths_of_both(
    query: Tensor, key: Tensor, left_out: tuple[Tensor | None, Tensor | None] = (None, None), is_mean: bool = False
) -> Tensor:
    """Return the lengths of queries, and of the key that each of their heads has, (2, heads)."""
    return _lengths(query, key, *left_out, is_mean=is_mean, longest=False)


def _lengths(
    query: Tensor, key: Tensor | None, padding: Tensor | None, hidden: Tensor | None, is_mean: bool, longest: bool
) -> Tensor:
    query, key = unit_stride(query), None if key is None else unit_stride(key)
    found = torch.empty((4 if longest else 2, query.shape[1]), dtype=torch.float64, device=query.device)
    padding = None if padding is None else padding.expand(len(query), -1)
    hidden = None if hidden is None or key is None else hidden.expand(len(key), -1)
    layouts = (None if each is None else layout_key(each) for each in (query, key, padding, hidden))
    prepared_lengths(*layouts, is_mean, longest)(query, key, padding, hidden, found)
    return found


class LengthsLaunch:
    """The launch for tensors of some layouts."""

    def __init__(
        self, query: Layout, key: Layout | None, padding: Layout | None, hidden: Layout | None, is_mean: bool,
        longest: bool,
    ) -> None:  # fmt: skip
        (batch, heads, length, head_dim), strides, _, device, _ = query
        (key_batch, kv_heads, kv_len, _), key_strides, *_ = key or ((0, 0, 0, 0), strides)
        rows, key_rows, self._programs = batch * length, key_batch * kv_len, heads + kv_heads
        width = padded_width(head_dim, LEAST_WIDTH)
        parts, tile = _parts_of(self._programs, max(rows, key_rows), width)
        self._size, self._device = self._programs * parts * PARTS.value, _device(device)
        constants = {
            "HEAD_DIM": head_dim,
            "WIDTH": width,
            "TILE_ROWS": tile,
            "HAS_PADDING": padding is not None,
            "HIDES": hidden is not None,
            "IS_MEAN": is_mean,
            "LONGEST": longest,
        }
        self._launch = Launch(lengths_kernel, device, constants, Tiles(tile, 0, 4, 1)).bind(
            (parts, self._programs),
            *(*strides[:3], *key_strides[:3]),
            *((0, 0) if padding is None else padding[1]),
            *((0, 0) if hidden is None else hidden[1]),
            *(heads, heads // max(kv_heads, 1), rows, length, _rows_each(rows, parts, tile)),
            *(key_rows, kv_len, _rows_each(key_rows, parts, tile)),
        )

    def __call__(
        self, query: Tensor, key: Tensor | None, padding: Tensor | None, hidden: Tensor | None, lengths: Tensor
    ) -> None:
        """Write the lengths of queries and keys; what is left out is of booleans."""
        padding, hidden = (query if each is None else each.view(torch.uint8) for each in (padding, hidden))
        sums = torch.empty(self._size, dtype=torch.float64, device=self._device)
        arrived = counters(self._device, self._programs)
        self._launch(query, query if key is None else key, padding, hidden, sums, arrived, lengths)


prepared_lengths = lru_cache(maxsize=256)(LengthsLaunch)


def _parts_of(heads: int, rows: int, width: int) -> tuple[int, int]:
    """Return how many programs share out the rows of a head, and how many rows each reads at once."""
    tile = max(1, TILE // width)
    parts = max(1, min(PROGRAMS // heads, -(-rows // tile)))
    return -(-rows // _rows_each(rows, parts, tile)), tile


def _rows_each(rows: int, parts: int, tile: int) -> int:
    return -(-rows // (parts * tile)) * tile


def _device(index: int | None) -> torch.device:
    return torch.device("cpu") if index is None else torch.device("cuda", index)
