"""Sequences laid end to end, cut into tiles of rows: which tile lies where, found on the GPU without waiting for it."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscale.measure.cuda.launch import ALIGNMENT, Launch, Tiles

FIELDS: tl.constexpr = tl.constexpr(4)  # of a tile: where its sequence begins, how long that is, the tile's first row
AT_ONCE: tl.constexpr = tl.constexpr(256)  # sequences, or tiles of one
TILES_BESIDE: tl.constexpr = tl.constexpr(16)  # tiles of one, each beside so many sequences:
SEQUENCES_BESIDE: tl.constexpr = tl.constexpr(128)
MOST_SORTED = 1024  # sequences: where there are more, each program has many tiles, and about as much to do as others


@triton.jit(do_not_specialize=["count"])
def tiles_kernel(
    starts_at: tl.tensor, tiles_at: tl.tensor, count: tl.tensor, TILE_ROWS: tl.constexpr, SORTED: tl.constexpr
) -> None:
    """Write the tiles of one sequence, the last rows first; the last program writes the number of all tiles.

    They lie behind those of the sequences before it, or, sorted, behind all that begin further along their sequence:
    causal rows that see most then come first, and programs that take every so many-th tile have as much to do.
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
        place = _further_along(starts_at, tile, number, count, TILE_ROWS) if SORTED else first + each
        to = tiles_at + (1 + place) * FIELDS
        tl.store(to, tl.zeros_like(each) + begin, mask=each < own)
        tl.store(to + 1, tl.zeros_like(each) + length, mask=each < own)
        tl.store(to + 2, tile * TILE_ROWS, mask=each < own)
    if number == count - 1:
        tl.store(tiles_at, first + own)


@triton.jit
def _tiles_in(starts_at: tl.tensor, each: tl.tensor, count: tl.tensor, TILE_ROWS: tl.constexpr) -> tl.tensor:
    """Return how many tiles each of these sequences has; those from `count` on have none."""
    begins = tl.load(starts_at + each, mask=each < count, other=0)
    ends = tl.load(starts_at + each + 1, mask=each < count, other=0)
    return ((ends - begins + TILE_ROWS - 1) // TILE_ROWS).to(tl.int32)


@triton.jit
def _further_along(
    starts_at: tl.tensor, tile: tl.tensor, number: tl.tensor, count: tl.tensor, TILE_ROWS: tl.constexpr
) -> tl.tensor:
    """Return how many tiles come before these: further along their sequence, or as far in an earlier sequence."""
    place = tl.zeros_like(tile)
    for start in range(0, count, SEQUENCES_BESIDE):
        each = start + tl.arange(0, SEQUENCES_BESIDE)
        beyond = _tiles_in(starts_at, each, count, TILE_ROWS)[None, :] - 1 - tile[:, None]
        place += tl.sum(tl.maximum(beyond, 0) + ((beyond >= 0) & (each < number)[None, :]).to(tl.int32), 1)
    return place


def tiles_of(starts: Tensor, total: int, tile_rows: int, is_causal: bool) -> Tensor:
    """Return how many tiles there are, then FIELDS of each; there is room for as many as there can be."""
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
    """Return how many tiles there can be: every sequence may leave one that it does not fill."""
    return total // tile_rows + starts.shape[0] - 1
