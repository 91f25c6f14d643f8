"""Fused attention and exact row statistics for Hopper GPUs, in Gluon: one producer warp, two consumers.

The schedule is FlashAttention-3's (Shah et al., 2024): a producer warp streams tiles through shared memory by TMA;
each consumer warpgroup owns 64 query rows and runs the next block's QKᵀ and the last block's PV on the tensor cores
while it exponentiates. Blocks go from the last visible key to the first, so that only the first one needs a mask.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,misc"

import math
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnscale.measure.cuda import sequence_tiles
from attnscale.measure.cuda.launch import SUMS, Launch, Layout, Tiles
from attnscale.measure.cuda.rows import LOG2_E
from attnscale.measure.cuda.sequence_tiles import most_tiles, tiles_of
from attnscale.numerics import HALF_DTYPES

FIELDS = gl.constexpr(sequence_tiles.FIELDS.value)
CONSUMERS = gl.constexpr(2)  # warpgroups that compute attention
ROWS = gl.constexpr(64)  # rows of one warpgroup's matrix instruction
MASKED = gl.constexpr(-1.0e30)  # finite, because p·x must be 0 and not NaN for a masked key
LN2 = gl.constexpr(math.log(2))
SLACK = gl.constexpr(8.0)  # log2; p stays under 2⁸, in range of float16, until the output is rescaled (FA4)
LANES = gl.constexpr(4)  # threads that share a row of a wgmma accumulator
PAIR = gl.constexpr(2)  # neighbouring columns each of those threads holds
L2_BUDGET = 32 * 2**20  # bytes of keys and values in use at a time: about half of the H200's 60 MB of L2
TMA_ALIGNMENT = 16  # bytes, of an address and of every stride
TMA_LAYOUT = gl.NVMMASharedLayout(128, 16, 4)  # 128 bytes swizzled, 16-bit elements, four axes


class Variant(NamedTuple):
    """Sizes and schedule that were fastest on an H200."""

    keys: int  # keys in a block
    stages: int  # blocks of keys, and of values, in flight
    persistent: bool  # one program for each multiprocessor, or one for each tile


# By padded head_dim. Short rows spend most time at the start and end of a tile, which persistent programs overlap.
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
    """Compute the output, the lse and the sums of each row; the scale is in units of log 2.

    With SEQUENCES, the input is packed sequences, and tiles_ptr points to their tiles.
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
        [240, 24],  # registers: 65536 over 12 warps; the first consumer gets the rest, as many as the second
    )


@gluon.jit
def tiles_in(sizes, tiles_ptr, SEQUENCES: gl.constexpr):
    """Return the number of tiles; for packed sequences it is read from device memory."""
    if SEQUENCES:
        return gl.load(tiles_ptr) * sizes[2]
    return sizes[6]


@gluon.jit
def tile_at(
    index, sizes, tiles_ptr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, SEQUENCES: gl.constexpr
):
    """Return batch, head, first row and number of key blocks of a tile, and the start and number of its rows.

    Packed sequences are one batch entry; each attends to itself.
    """
    if SEQUENCES:
        number = gl.load(tiles_ptr)
        at = tiles_ptr + (1 + index % number) * FIELDS
        begin, length, row = gl.load(at), gl.load(at + 1), gl.load(at + 2)
        blocks = gl.cdiv(length, BLOCK_N)
        if CAUSAL:
            blocks = gl.minimum(blocks, gl.cdiv(row + BLOCK_M, BLOCK_N))
        return 0, index // number, row, blocks, begin, length, length
    q_len, kv_len, heads, _, all_heads, together, _ = sizes
    tiles_each = gl.cdiv(q_len, BLOCK_M)
    blocks = gl.cdiv(kv_len, BLOCK_N)
    if CAUSAL:  # longest rows first, one group of heads at a time, so that their keys stay in the L2
        first_head = index // (together * tiles_each) * together
        group = gl.minimum(together, all_heads - first_head)
        within = index % (together * tiles_each)
        row = (tiles_each - 1 - within // group) * BLOCK_M
        if BLOCK_N % BLOCK_M != 0:  # an incomplete tile holds the shortest rows, and begins before the first row
            row -= (tiles_each * BLOCK_M - q_len) // ROWS * ROWS
        head = first_head + within % group
        blocks = gl.minimum(blocks, gl.cdiv(row + BLOCK_M, BLOCK_N))
    else:
        row = index % tiles_each * BLOCK_M
        head = index // tiles_each
    return head // heads, head % heads, row, blocks, 0, q_len, kv_len


@gluon.jit
def _load(descriptor, coordinates, barrier, buffer):
    """Start a TMA load of one tile, completing on a barrier."""
    mbarrier.expect(barrier, descriptor.block_type.nbytes)
    tile = buffer._reinterpret(descriptor.dtype, descriptor.block_shape, descriptor.layout)
    tma.async_copy_global_to_shared(descriptor, coordinates, barrier, tile)


@gluon.jit
def produce(
    descriptors,
    buffers,
    barriers,
    sizes,
    tiles_ptr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    SEQUENCES: gl.constexpr,
):
    """Stream queries, keys and values of this program's tiles into shared memory."""
    q_desc, k_desc, v_desc = descriptors
    q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    heads, kv_heads, tiles = sizes[2], sizes[3], tiles_in(sizes, tiles_ptr, SEQUENCES)
    q_phase = 1
    step = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch, head, row, blocks, begin, _, _ = tile_at(index, sizes, tiles_ptr, BLOCK_M, BLOCK_N, CAUSAL, SEQUENCES)
        kv_head = head // (heads // kv_heads)
        for consumer in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(consumer), q_phase)
            at = [batch, head, begin + row + consumer * ROWS, 0]
            _load(q_desc, at, q_full.index(consumer), q_smem.index(consumer))
        q_phase ^= 1
        for done in range(blocks):
            at = [batch, kv_head, begin + (blocks - 1 - done) * BLOCK_N, 0]
            slot = step % STAGES
            free = (step // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(slot), free)
            _load(k_desc, at, k_full.index(slot), k_smem.index(slot))
            mbarrier.wait(v_empty.index(slot), free)
            _load(v_desc, at, v_full.index(slot), v_smem.index(slot))
            step += 1


@gluon.jit
def consume(
    shared,
    CONSUMER: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    SEQUENCES: gl.constexpr,
):
    """Attend from 64 rows of each of this program's tiles; scores are in units of log 2.

    Σ z and Σ z² are relative to the same base as the weights' exponents. When that base decreases by δ, the sums of n
    values become Σ z + nδ and Σ z² + 2δ Σ z + nδ².

    With SEQUENCES, rows past the end of a sequence belong to the next: they are not written, and no value is read.
    """
    o_desc, o_ptr, width, sums_ptr, lse_ptr, tiles_ptr, buffers, barriers, sizes, scale = shared
    q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    rows_each, heads, all_heads = sizes[0], sizes[2], sizes[4]
    tiles = tiles_in(sizes, tiles_ptr, SEQUENCES)
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    HEAD_DIM: gl.constexpr = q_smem.shape[2]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    output_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, output_layout, 2)
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, scores_layout)
    query = q_smem.index(CONSUMER)
    q_phase = 0
    step = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch, head, tile_row, blocks, begin, q_len, kv_len = tile_at(
            index, sizes, tiles_ptr, BLOCK_M, BLOCK_N, CAUSAL, SEQUENCES
        )
        row = tile_row + CONSUMER * ROWS
        if CAUSAL and BLOCK_N % BLOCK_M != 0:  # the tile's last blocks may lie beyond this warpgroup's rows
            own = gl.maximum(gl.minimum(blocks, gl.cdiv(row + ROWS, BLOCK_N)), 1)
            for _ in range(blocks - own):
                mbarrier.wait(k_full.index(step % STAGES), step // STAGES & 1)
                mbarrier.arrive(k_empty.index(step % STAGES))
                mbarrier.wait(v_full.index(step % STAGES), step // STAGES & 1)
                mbarrier.arrive(v_empty.index(step % STAGES))
                step += 1
            blocks = own

        mbarrier.wait(q_full.index(CONSUMER), q_phase)
        q_phase ^= 1
        slot = step % STAGES
        mbarrier.wait(k_full.index(slot), step // STAGES & 1)
        scores = warpgroup_mma(query, k_smem.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(slot))
        columns = (blocks - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores_layout))
        visible = (columns < kv_len)[None, :]
        if CAUSAL:
            rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
            visible = visible & (columns[None, :] <= rows[:, None])
        scores = gl.where(visible, scores * scale, MASKED)
        row_max = gl.max(scores, 1)
        base = row_max
        scores = scores - base[:, None]
        weights = gl.exp2(scores)
        total = partial_sum(weights)
        moment = partial_sum(weights * scores)
        square = partial_sum(weights * weights)
        below = gl.where(visible, scores, 0.0)
        first = partial_sum(below)
        second = partial_sum(below * below)
        counted = gl.sum(visible.to(gl.float32).broadcast_to([ROWS, BLOCK_N]), 1)
        operand = gl.convert_layout(weights.to(q_smem.dtype), weights_layout, assert_trivial=True)
        output = gl.zeros([ROWS, HEAD_DIM], gl.float32, output_layout)
        if SEQUENCES and blocks * BLOCK_N > kv_len:
            mbarrier.wait(v_full.index(slot), step // STAGES & 1)
            blank_from(v_smem.index(slot), kv_len - (blocks - 1) * BLOCK_N)
            fence_async_shared()

        for _ in range(blocks - 1):
            v_slot = slot
            v_phase = step // STAGES & 1
            step += 1
            slot = step % STAGES
            mbarrier.wait(k_full.index(slot), step // STAGES & 1)
            scores = warpgroup_mma(query, k_smem.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_slot), v_phase)
            output = warpgroup_mma(operand, v_smem.index(v_slot), output, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            mbarrier.arrive(k_empty.index(slot))
            row_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
            new_base = gl.where(row_max - base > SLACK, row_max, base)
            shift = base - new_base
            keep = gl.exp2(shift)
            base = new_base
            scores = scores * scale - base[:, None]
            weights = gl.exp2(scores)
            lanes_keep = beside_lanes(keep, total)
            moment = lanes_keep * (moment + total * beside_lanes(shift, total)) + partial_sum(weights * scores)
            square = lanes_keep * lanes_keep * square + partial_sum(weights * weights)
            total = lanes_keep * total + partial_sum(weights)
            lanes_shift = beside_lanes(shift, total)  # each thread of a row counts its share of the keys so far
            moved = lanes_shift * beside_lanes(counted * (1.0 / (LANES * PAIR)), total)
            second += lanes_shift * (2.0 * first + moved) + partial_sum(scores * scores)
            first += moved + partial_sum(scores)
            counted += BLOCK_N
            output, operand = warpgroup_mma_wait(0, deps=(output, operand))
            mbarrier.arrive(v_empty.index(v_slot))
            operand = gl.convert_layout(weights.to(q_smem.dtype), weights_layout, assert_trivial=True)
            output = rescale_if_moved(output, keep)

        mbarrier.wait(v_full.index(slot), step // STAGES & 1)
        output = warpgroup_mma(operand, v_smem.index(slot), output, is_async=True)
        relative = full_sum(total)
        inverse = 1.0 / relative
        row_layout: gl.constexpr = relative.type.layout
        ahead = gl.convert_layout(row_max - base, row_layout, assert_trivial=True)  # distance of the maximum from base
        largest = gl.convert_layout(row_max, row_layout, assert_trivial=True)
        exact_total = gl.maximum(relative * gl.exp2(-ahead), 1.0)
        own_rows = row + gl.arange(0, ROWS, row_layout)
        inside = (own_rows >= 0) & (own_rows < q_len)
        plane = all_heads.to(gl.int64) * rows_each  # statistics are stored one after the other, in the order of RowSums
        place = (batch * heads + head).to(gl.int64) * rows_each + begin + own_rows
        to = sums_ptr + place
        gl.store(to, largest * LN2, mask=inside)
        gl.store(to + plane, exact_total, mask=inside)
        gl.store(to + 2 * plane, gl.maximum(ahead - full_sum(moment) * inverse, 0.0) * LN2, mask=inside)
        gl.store(to + 3 * plane, gl.minimum(full_sum(square) * inverse * inverse, 1.0), mask=inside)
        number = gl.convert_layout(counted, row_layout, assert_trivial=True)
        from_base = full_sum(first) / number
        deviation = gl.maximum(full_sum(second) - full_sum(first) * from_base, 0.0)
        mean = largest - ahead + from_base
        gl.store(to + 4 * plane, mean * LN2, mask=inside)
        gl.store(to + 5 * plane, deviation * (LN2 * LN2), mask=inside)
        # The last block of keys begins with the first key.
        is_first = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores_layout)) == 0
        first_score = full_sum(partial_sum(gl.where(is_first[None, :], scores, 0.0)))
        gl.store(to + 6 * plane, gl.minimum(first_score - ahead, 0.0) * LN2, mask=inside)
        gl.store(to + 7 * plane, number, mask=inside)
        gl.store(lse_ptr + place, (largest + gl.log2(exact_total)) * LN2, mask=inside)
        output, operand = warpgroup_mma_wait(0, deps=(output, operand))
        mbarrier.arrive(v_empty.index(slot))
        step += 1

        output = output * _beside(inverse, output)
        is_whole = row >= 0  # TMA reads zeros before the first row, but must not write there
        if SEQUENCES:
            is_whole = row + ROWS <= q_len
            if not is_whole:
                _write(output.to(q_smem.dtype), o_ptr + head * width, begin, row, q_len, heads * width, width)
        if is_whole:
            query.store(output.to(q_smem.dtype))  # this warpgroup no longer needs its queries
            fence_async_shared()
            tile = query._reinterpret(o_desc.dtype, o_desc.block_shape, o_desc.layout)
            tma.async_copy_shared_to_global(o_desc, [batch, head, begin + row, 0], tile)
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(CONSUMER))


@gluon.jit
def _write(output, to, begin, row, length, stride, width):
    """Write rows of a sequence, up to its end, to tokens that lie `stride` elements apart."""
    layout: gl.constexpr = output.type.layout
    rows = row + gl.arange(0, output.shape[0], gl.SliceLayout(1, layout))
    columns = gl.arange(0, output.shape[1], gl.SliceLayout(0, layout))
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    gl.store(to + ((begin + rows).to(gl.int64) * stride)[:, None] + columns[None, :], output, mask=inside)


@gluon.jit
def partial_sum(values):
    """Return partial row sums (rows, lanes, pair) of each thread; no shuffles until the tile ends."""
    rows: gl.constexpr = values.shape[0]
    steps: gl.constexpr = values.shape[1] // (LANES * PAIR)
    return gl.sum(values.reshape([rows, steps, LANES, PAIR]), 1)


@gluon.jit
def full_sum(partial):
    """Return row sums from a (rows, lanes, pair) tensor of partial sums."""
    return gl.sum(gl.sum(partial, 2), 1)


@gluon.jit
def beside_lanes(row, partial):
    """Return a row vector shaped to multiply a (rows, lanes, pair) tensor."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, partial.type.layout))
    return gl.convert_layout(row, layout, assert_trivial=True).expand_dims(1).expand_dims(2)


@gluon.jit
def blank_from(tile, row):
    """Overwrite the rows of a tile from this one on with zeros."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    kept = tile.load(layout)
    tile.store(gl.where((rows < row)[:, None], kept, 0.0).to(tile.dtype))


@gluon.constexpr_function
def _rescale_assembly(elements):
    """Return PTX that multiplies by the factors, and skips the multiplication in warps whose factors are all 1."""
    tests = " ".join(
        f"setp.neu.f32 one, ${2 * elements + element}, 0f3F800000; or.pred any, any, one;"
        for element in (0, PAIR.value)  # a thread holds two rows: its first pair of elements, then its second
    )
    products = " ".join(f"mul.f32 ${i}, ${elements + i}, ${2 * elements + i};" for i in range(elements))
    return (
        "{ .reg .pred one, any; setp.ne.s32 any, 0, 0; "
        + tests
        + " vote.sync.any.pred any, any, 0xffffffff; @!any bra KEPT; "
        + products
        + " KEPT: }"
    )


@gluon.constexpr_function
def _rescale_constraints(elements):
    """Return constraints that tie the outputs to the first operand, then the factors."""
    return ",".join(["=f"] * elements + [str(i) for i in range(elements)] + ["f"] * elements)


@gluon.jit
def rescale_if_moved(output, keep):
    """Multiply each row of the output by its factor, in warps where one is not 1."""
    elements: gl.constexpr = output.shape[1] // 2  # 64 rows over the 128 threads of a warpgroup
    return gl.inline_asm_elementwise(
        _rescale_assembly(elements),
        _rescale_constraints(elements),
        [output, _beside(keep, output).broadcast_to(output.shape)],
        dtype=gl.float32,
        is_pure=False,
        pack=elements,
    )


@gluon.jit
def _beside(row, output):
    """Return a row vector shaped to multiply the output."""
    return gl.convert_layout(row, gl.SliceLayout(1, output.type.layout), assert_trivial=True)[:, None]


def takes(query: Layout, key: Layout, value: Layout) -> bool:
    """Return True if attend_rows() supports these layouts: one dtype, on a Hopper GPU."""
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
    """Return the strides; an axis with one element gets another stride, because its own is arbitrary."""
    shape, strides, *_ = layout
    return [stride if size > 1 else shape[-1] for size, stride in zip(shape, strides, strict=True)]


class Attention:
    """The kernel for tensors of one layout, with the state that all calls of this layout share."""

    def __init__(self, query: Layout, key: Layout, value: Layout, is_causal: bool, in_sequences: bool) -> None:
        (batch, heads, q_len, head_dim), _, dtype, device, _ = query
        _, kv_heads, kv_len, _ = key[0]
        width = padded(head_dim)
        variant, all_heads = VARIANTS[width], batch * heads
        tiles = all_heads * -(-q_len // TILE_ROWS)
        head_bytes = 2 * kv_len * head_dim * dtype.itemsize * kv_heads // heads
        together = min(all_heads, max(1, L2_BUDGET // max(1, head_bytes)))
        self._shape = (q_len, heads, head_dim) if in_sequences else query[0]
        self._rows, self._is_causal, self._tiles = (batch, heads, q_len), is_causal, tiles
        self._programs = _multiprocessors(device) if variant.persistent else None
        strides = (heads * head_dim, head_dim) if in_sequences else (head_dim, q_len * head_dim)
        output = query[0], (heads * q_len * head_dim, strides[1], strides[0], 1), dtype, device, 0
        blocks = ROWS.value, variant.keys, variant.keys, ROWS.value
        self._descriptors = [
            (list(each[0]), _strides(each), [1, 1, rows, width])
            for each, rows in zip((query, key, value, output), blocks, strict=True)
        ]
        self._sizes = head_dim, q_len, kv_len, heads, kv_heads, all_heads, together
        self._launch = _launch(width, dtype, is_causal, in_sequences, device)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, starts: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, the lse and the sums of every row, as rows.attend_rows()."""
        device, tiles = query.device, self._tiles
        output = torch.empty(self._shape, dtype=query.dtype, device=device)
        sums = torch.empty((SUMS, *self._rows), dtype=torch.float32, device=device)
        lse = torch.empty(self._rows, dtype=torch.float32, device=device)
        placed = sums
        if starts is not None:
            _, heads, total = self._rows
            sums[-1].zero_()  # tokens after the last sequence see no keys
            tiles = heads * most_tiles(starts, total, TILE_ROWS)
            placed = tiles_of(starts, total, TILE_ROWS, self._is_causal)
        self._launch(
            (tiles if self._programs is None else min(tiles, self._programs),),
            *map(_descriptor, (query, key, value, output), self._descriptors),
            *(output, sums, lse, placed, scale * LOG2_E, *self._sizes, tiles),
        )
        return output, lse, sums


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
    """Return the width of a tile. TMA fills the padding with zeros when it reads, and skips it when it writes."""
    return next(width for width in VARIANTS if head_dim <= width)


def _descriptor(base: Tensor, tiles: tuple[list[int], list[int], list[int]]) -> TensorDescriptor:
    """Return a TMA descriptor for tiles of some rows of one head; reads past the end give zeros, writes are dropped.

    The constructor is bypassed: its checks take longer than a launch, and takes() has made them already.
    """
    found = TensorDescriptor.__new__(TensorDescriptor)
    found.base, found.layout, found.padding = base, TMA_LAYOUT, "zero"
    found.shape, found.strides, found.block_shape = tiles
    return found


@cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
