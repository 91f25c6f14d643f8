"""The length of all vectors of each head, in one launch that reads them once and adds up in a fixed order."""
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


@triton.jit(do_not_specialize=["rows", "length", "rows_each"])
def lengths_kernel(
    vectors_at: tl.tensor,
    left_at: tl.tensor,
    arrived_at: tl.tensor,
    lengths_at: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    rows_each: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
) -> None:
    """Some rows of a head a program, the batch entries one behind the other; the last one adds up what all left."""
    slot, head, slots = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    dims = tl.arange(0, WIDTH)
    squares = tl.zeros([TILE_ROWS, WIDTH], tl.float32)
    end = tl.minimum((slot + 1) * rows_each, rows)
    for start in range(slot * rows_each, end, TILE_ROWS):
        row = start + tl.arange(0, TILE_ROWS)
        entry, position = (row // length).to(tl.int64), (row % length).to(tl.int64)
        at = vectors_at + head.to(tl.int64) * head_stride + entry * batch_stride + position * row_stride
        inside = (row < end)[:, None] & (dims < HEAD_DIM)[None, :]
        vectors = tl.load(at[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
        squares += vectors * vectors
    left_at += head * slots
    tl.store(left_at + slot, tl.sum(tl.sum(squares, 1).to(tl.float64), 0))
    tl.debug_barrier()
    if tl.atomic_add(arrived_at + head, 1, sem="acq_rel") == slots - 1:
        total = tl.zeros([AT_ONCE], tl.float64)
        for start in range(0, slots, AT_ONCE):
            place = start + tl.arange(0, AT_ONCE)
            total += tl.load(left_at + place, mask=place < slots, other=0.0, cache_modifier=".cg")
        tl.store(lengths_at + head, tl.sqrt(tl.sum(total, 0)))
        tl.store(arrived_at + head, 0)  # for the next launch


def head_lengths(vectors: Tensor, kind: Hashable = None) -> Tensor:
    """Of (batch, heads, length, features), a float64 a head."""
    vectors = unit_stride(vectors)
    batch, heads, length, features = vectors.shape
    width = padded_width(features, LEAST_WIDTH)
    tile = max(1, TILE // width)
    parts = max(1, min(PROGRAMS // heads, -(-batch * length // tile)))
    rows_each = -(-batch * length // (parts * tile)) * tile
    parts = -(-batch * length // rows_each)
    left = torch.empty(heads * parts, dtype=torch.float64, device=vectors.device)
    found = torch.empty(heads, dtype=torch.float64, device=vectors.device)
    with on_device(vectors):
        launch(
            lengths_kernel,
            (parts, heads),
            (
                *(vectors, left, counters(vectors.device, heads), found, *vectors.stride()[:3]),
                *(batch * length, length, rows_each),
            ),
            (features, width, tile),
            (4, 1),
            kind,
        )
    return found
