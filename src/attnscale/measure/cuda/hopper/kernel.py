"""Fused attention and exact row statistics for Hopper GPUs, in Gluon: one producer warp, two consumers.

The schedule is FlashAttention-3's (Shah et al., 2024): a producer warp streams tiles through shared memory by TMA;
each consumer warpgroup owns 64 query rows and runs the next block's QKᵀ and the last block's PV on the tensor cores
while it exponentiates. Blocks go from the last visible key to the first, so that only the first one needs a mask.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,misc"

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnscale.measure.cuda.hopper.consumer import consume
from attnscale.measure.cuda.hopper.tiles import CONSUMERS, ROWS, produce
from attnscale.measure.cuda.layout import SUMS, SUMS_AND_VISIBLE, Layout, layout_key
from attnscale.measure.cuda.triton.launch import Launch, positive_scale
from attnscale.measure.cuda.triton.rows import LOG2_E, AttendedRows
from attnscale.measure.cuda.triton.sequence_tiles import most_tiles, tiles_of
from attnscale.measure.cuda.triton.tiles import Tiles
from attnscale.numerics import HALF_DTYPES

L2_BUDGET = 32 * 2**20  # bytes of keys and values in use at a time: about half of the H200's 60 MB of L2
TMA_ALIGNMENT = 16  # bytes, of an address and of every stride
TMA_LAYOUT = gl.NVMMASharedLayout(128, 16, 4)  # 128 bytes swizzled, 16-bit elements, four axes


class Variant(NamedTuple):
    """How the work is laid out: what won on an H200."""

    keys: int  # in a block
    stages: int  # blocks of keys, and of values, in flight
    persistent: bool  # one program a multiprocessor, or one a tile


# By head_dim, padded: short rows are a tile's beginning and end, which persistent programs overlap.
VARIANTS = {64: Variant(128, 3, True), 128: Variant(128, 3, False), 256: Variant(64, 2, False)}
WIDEST = max(VARIANTS)
TILE_ROWS = CONSUMERS.value * ROWS.value


@gluon.jit(do_not_specialize=["width", "q_len", "kv_len", "heads", "kv_heads", "all_heads", "together", "tiles"])
def attend(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    o_ptr,
    sums_ptr,
    lse_ptr,
    tiles_ptr,
    scale,
    width,
    q_len,
    kv_len,
    heads,
    kv_heads,
    all_heads,
    together,
    tiles,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    SEQUENCES: gl.constexpr,
):
    """Attention output, the lse and the sums of each row; scale in units of log 2.

    SEQUENCES: of those that are laid end to end, whose tiles lie at tiles_ptr; their sums end with the visible keys.
    """
    HEAD_DIM: gl.constexpr = q_desc.block_shape[3]
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, HEAD_DIM], layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], barrier_layout)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], barrier_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(consumer), 1)
        mbarrier.init(q_empty.index(consumer), 1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), 1)
        mbarrier.init(v_full.index(stage), 1)
        mbarrier.init(k_empty.index(stage), CONSUMERS)
        mbarrier.init(v_empty.index(stage), CONSUMERS)
    fence_async_shared()

    loads = (q_desc, k_desc, v_desc)
    buffers = (q_smem, k_smem, v_smem)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (q_len, kv_len, heads, kv_heads, all_heads, together, tiles)
    shared = (o_desc, o_ptr, width, sums_ptr, lse_ptr, tiles_ptr, buffers, barriers, sizes, scale)
    gl.warp_specialize(
        [
            (consume, (shared, 0, BLOCK_N, STAGES, CAUSAL, SEQUENCES)),
            (consume, (shared, 1, BLOCK_N, STAGES, CAUSAL, SEQUENCES)),
            (produce, (loads, buffers, barriers, sizes, tiles_ptr, BLOCK_N, STAGES, CAUSAL, SEQUENCES)),
        ],
        [4, 1],
        [240, 24],  # registers: 65536 over 12 warps; the first consumer gets what is left, as many as the second
    )


def takes(query: Layout, key: Layout, value: Layout) -> bool:
    """Return True if attend_rows() takes tensors of these layouts, of one dtype, on a Hopper GPU."""
    (*_, head_dim), _, dtype, *_ = query
    aligned = head_dim <= WIDEST and head_dim % (TMA_ALIGNMENT // dtype.itemsize) == 0
    return aligned and dtype in HALF_DTYPES and all(map(_is_loadable, (query, key, value))) and key[0] == value[0]


def _is_loadable(layout: Layout) -> bool:
    """Return True if TMA can read the tensor: aligned, head_dim contiguous, no empty and no broadcast axis."""
    shape, _, dtype, _, alignment = layout
    *outer, inner = _strides(layout)
    aligned = TMA_ALIGNMENT // dtype.itemsize
    return (
        inner == 1
        and all(stride > 0 and stride % aligned == 0 for stride in outer)
        and alignment == 0
        and math.prod(shape) > 0
    )


def _strides(layout: Layout) -> list[int]:
    """Return the strides, with another one for an axis of one element, whose own says nothing."""
    shape, strides, *_ = layout
    return [stride if size > 1 else shape[-1] for size, stride in zip(shape, strides, strict=True)]


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool, starts: Tensor | None = None
) -> AttendedRows:
    """Return the output, the lse and the sums of every row, as triton.rows.attend_rows()."""
    query, scale = positive_scale(query, scale)
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, _) = query.shape, key.shape
    shape = query.shape if starts is None else (q_len, heads, head_dim)
    output = torch.empty(shape, dtype=query.dtype, device=query.device)
    by_head = output if starts is None else output.transpose(0, 1).unsqueeze(0)
    planes = SUMS if starts is None else SUMS_AND_VISIBLE
    sums = torch.empty((planes, batch, heads, q_len), dtype=torch.float32, device=query.device)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=query.device)
    width = padded(head_dim)
    variant = VARIANTS[width]
    all_heads = batch * heads
    tiles, placed = all_heads * -(-q_len // TILE_ROWS), sums
    if starts is not None:
        sums[-1].zero_()  # tokens behind the last sequence see nothing
        tiles = heads * most_tiles(starts, q_len, TILE_ROWS)
        placed = tiles_of(starts, q_len, TILE_ROWS, is_causal)
    head_bytes = 2 * kv_len * head_dim * key.element_size() * kv_heads // heads
    together = min(all_heads, max(1, L2_BUDGET // max(1, head_bytes)))
    device = query.device.index
    programs = min(tiles, _multiprocessors(device)) if variant.persistent else tiles
    _launch(width, query.dtype, is_causal, starts is not None, device)(
        (programs,),
        _descriptor(query, ROWS.value, width),
        _descriptor(key, variant.keys, width),
        _descriptor(value, variant.keys, width),
        _descriptor(by_head, ROWS.value, width),
        *(by_head, sums, lse, placed, scale * LOG2_E, head_dim),
        *(q_len, kv_len, heads, kv_heads, all_heads, together, tiles),
    )
    return AttendedRows(output, lse, sums)


@lru_cache(maxsize=64)
def _launch(width: int, dtype: torch.dtype, is_causal: bool, in_sequences: bool, device: int) -> Launch:
    variant = VARIANTS[width]
    constants = {
        "BLOCK_N": variant.keys,
        "STAGES": variant.stages,
        "CAUSAL": is_causal,
        "SEQUENCES": in_sequences,
    }
    return Launch(attend, device, constants, Tiles(TILE_ROWS, variant.keys, 4, variant.stages))


def padded(head_dim: int) -> int:
    """Return how wide a tile is: TMA fills it with zeros where it reads, and drops them where it writes."""
    return next(width for width in VARIANTS if head_dim <= width)


def _descriptor(tensor: Tensor, rows: int, width: int) -> Any:
    """Return a TMA descriptor for tiles of some rows of one head; reads past the end give zeros, writes are dropped."""
    return TensorDescriptor(tensor, list(tensor.shape), _strides(layout_key(tensor)), [1, 1, rows, width], TMA_LAYOUT)


@cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
