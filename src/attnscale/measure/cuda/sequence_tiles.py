"""Tiles of rows of packed sequences, computed on the GPU without a host synchronisation."""
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscale.measure.cuda.launch import ALIGNMENT, Launch, Tiles

FIELDS: tl.constexpr = tl.constexpr(4)  # for each tile: start and length of its sequence, its first row, and padding
AT_ONCE: tl.constexpr = tl.constexpr(256)  # sequences, or tiles of one sequence, in one block
TILES_BESIDE: tl.constexpr = tl.constexpr(16)  # tiles of one sequence, each compared with so many sequences:
SEQUENCES_BESIDE: tl.constexpr = tl.constexpr(128)
# Arguments of all kernels that are sizes: one compilation serves all of them.
SIZES = [
    *("batch", "heads", "keys", "group", "count", "q_len", "kv_len", "kv_span", "first", "last"),
    *("spans", "rows_each"),
]
MOST_SORTED = 1024  # sequences; with more, each program has many tiles and the work is even without sorting


@triton.jit(do_not_specialize=SIZES)
def tiles_kernel(starts_at, tiles_at, count, TILE_ROWS: tl.constexpr, SORTED: tl.constexpr):
    """Write the tiles of one sequence, last rows first; the last program writes the total number of tiles.

    Tiles are ordered by sequence. If SORTED, they are ordered by their position in the sequence, latest first:
    then causal rows with the most keys come first, and programs that stride over the tiles have equal work.
    """
    number = tl.program_id(0)
    before = tl.zeros([AT_ONCE], tl.int32)
    for start in range(0, number, AT_ONCE):
        before += _tiles_in(starts_at, start + tl.arange(0, AT_ONCE), number, TILE_ROWS)
    first = tl.sum(before, 0)
    begin = tl.load(starts_at + number).to(tl.int32)
    length = tl.load(starts_at + number + 1).to(tl.int32) - begin
    own = (length + TILE_ROWS - 1) // TILE_ROWS
    STEP: tl.constexpr = TILES_BESIDE if SORTED else AT_ONCE
    for start in range(0, own, STEP):
        each = start + tl.arange(0, STEP)
        tile = own - 1 - each
        place = _tiles_before(starts_at, tile, number, count, TILE_ROWS) if SORTED else first + each
        to = tiles_at + (1 + place) * FIELDS
        tl.store(to, tl.zeros_like(each) + begin, mask=each < own)
        tl.store(to + 1, tl.zeros_like(each) + length, mask=each < own)
        tl.store(to + 2, tile * TILE_ROWS, mask=each < own)
    if number == count - 1:
        tl.store(tiles_at, first + own)


@triton.jit
def _tiles_in(starts_at, each, count, TILE_ROWS: tl.constexpr):
    """Return the number of tiles of each sequence; zero for sequences from `count` on."""
    begins = tl.load(starts_at + each, mask=each < count, other=0)
    ends = tl.load(starts_at + each + 1, mask=each < count, other=0)
    return ((ends - begins + TILE_ROWS - 1) // TILE_ROWS).to(tl.int32)


@triton.jit
def _tiles_before(starts_at, tile, number, count, TILE_ROWS: tl.constexpr):
    """Return how many tiles precede each: those later in their sequence, or equally late in an earlier sequence."""
    place = tl.zeros_like(tile)
    for start in range(0, count, SEQUENCES_BESIDE):
        each = start + tl.arange(0, SEQUENCES_BESIDE)
        beyond = _tiles_in(starts_at, each, count, TILE_ROWS)[None, :] - 1 - tile[:, None]
        place += tl.sum(tl.maximum(beyond, 0) + ((beyond >= 0) & (each < number)[None, :]).to(tl.int32), 1)
    return place


def tiles_of(starts: Tensor, total: int, tile_rows: int, is_causal: bool) -> Tensor:
    """Return the number of tiles, then FIELDS of each, in a tensor with room for the largest possible number."""
    count, starts = starts.shape[0] - 1, starts.contiguous()
    shape = 1 + most_tiles(starts, total, tile_rows), FIELDS.value
    tiles = torch.empty(shape, dtype=torch.int32, device=starts.device)
    alignment = starts.data_ptr() % ALIGNMENT
    is_sorted = is_causal and count <= MOST_SORTED
    _launch(starts.dtype, starts.device.index, alignment, tile_rows, is_sorted)((count,), starts, tiles, count)
    return tiles


@lru_cache(maxsize=64)
def _launch(dtype: torch.dtype, device: int | None, alignment: int, tile_rows: int, is_sorted: bool) -> Launch:
    return Launch(tiles_kernel, device, {"TILE_ROWS": tile_rows, "SORTED": is_sorted}, Tiles(tile_rows, 0, 4, 1))


def most_tiles(starts: Tensor, total: int, tile_rows: int) -> int:
    """Return the largest possible number of tiles: each sequence may have one incomplete tile."""
    return total // tile_rows + starts.shape[0] - 1
