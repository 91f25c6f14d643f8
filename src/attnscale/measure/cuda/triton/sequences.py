"""Sequences laid end to end, cut into tiles of rows: which tile lies where, found on the GPU without waiting for it."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscale.measure.cuda.triton.launching import launch, on_device
from attnscale.measure.cuda.ways import ALIGNMENT

FIELDS: tl.constexpr = tl.constexpr(4)  # of a tile: where its sequence begins, how long that is, the tile's first row
AT_ONCE: tl.constexpr = tl.constexpr(256)  # sequences, or tiles of one


@triton.jit(do_not_specialize=["count"])
def tiles_kernel(starts_at: tl.tensor, tiles_at: tl.tensor, count: tl.tensor, TILE_ROWS: tl.constexpr) -> None:
    """The tiles of one sequence, behind those of the sequences before it; the last program tells how many there are."""
    number = tl.program_id(0)
    before = tl.zeros([AT_ONCE], tl.int32)
    for start in range(0, number, AT_ONCE):
        each = start + tl.arange(0, AT_ONCE)
        begins = tl.load(starts_at + each, mask=each < number, other=0)
        ends = tl.load(starts_at + each + 1, mask=each < number, other=0)
        before += ((ends - begins + TILE_ROWS - 1) // TILE_ROWS).to(tl.int32)
    first = tl.sum(before, 0)
    begin = tl.load(starts_at + number).to(tl.int32)
    length = tl.load(starts_at + number + 1).to(tl.int32) - begin
    own = (length + TILE_ROWS - 1) // TILE_ROWS
    for start in range(0, own, AT_ONCE):
        each = start + tl.arange(0, AT_ONCE)
        to = tiles_at + (1 + first + each) * FIELDS
        tl.store(to, tl.zeros_like(each) + begin, mask=each < own)
        tl.store(to + 1, tl.zeros_like(each) + length, mask=each < own)
        tl.store(to + 2, (own - 1 - each) * TILE_ROWS, mask=each < own)  # causal rows that see most come first
    if number == count - 1:
        tl.store(tiles_at, first + own)


def tiles_of(starts: Tensor, total: int, tile_rows: int) -> Tensor:
    """How many tiles there are, then FIELDS of each; room for as many as there can be, (1 + tiles, FIELDS)."""
    count = starts.shape[0] - 1
    tiles = torch.empty(
        (1 + most_tiles(starts, total, tile_rows), FIELDS.value), dtype=torch.int32, device=starts.device
    )
    with on_device(starts):
        starts = starts.contiguous()
        kind = tile_rows, starts.dtype, starts.device.index, starts.data_ptr() % ALIGNMENT
        launch(tiles_kernel, (count,), (starts, tiles, count), (tile_rows,), (4, 1), kind if starts.is_cuda else None)
    return tiles


def most_tiles(starts: Tensor, total: int, tile_rows: int) -> int:
    """Every sequence may leave one that it does not fill."""
    return total // tile_rows + starts.shape[0] - 1
