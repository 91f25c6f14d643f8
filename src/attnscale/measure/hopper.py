"""Fused attention and exact row statistics for Hopper GPUs, in Gluon: one producer warp, two or three consumers.

The schedule is FlashAttention-3's (Shah et al., 2024): a producer warp streams tiles through shared memory by TMA;
each consumer warpgroup owns 64 query rows and runs the next block's QKᵀ and the last block's PV on the tensor cores
while it exponentiates. Blocks go from the last visible key to the first, so that only the first one needs a mask.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,misc"

import math
from functools import lru_cache
from typing import Any, NamedTuple

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

ROWS = gl.constexpr(64)  # rows of one warpgroup's matrix instruction
LANES = gl.constexpr(4)  # threads that share a row of a wgmma accumulator
PAIR = gl.constexpr(2)  # neighbouring columns each of those threads holds
MASKED = gl.constexpr(-1.0e30)  # finite, because p·x must be 0 and not NaN for a masked key
LN2 = gl.constexpr(math.log(2))
SLACK = gl.constexpr(8.0)  # log2; p stays under 2⁸, in range of float16, while the output waits to be rescaled (FA4)
LOG2E = math.log2(math.e)
L2_BUDGET = 32 * 2**20  # bytes of keys and values in use at a time: about half of the H200's 60 MB of L2


class Variant(NamedTuple):
    """One way to lay the work out."""

    consumers: int  # warpgroups of 64 rows each
    block_n: int  # keys in a block
    stages: int  # blocks of keys, and of values, in flight
    lazy: bool  # the output is rescaled only where the maximum moved by more than SLACK
    persistent: bool  # one program a multiprocessor, or one a tile


VARIANTS = {
    "two": Variant(2, 128, 3, lazy=True, persistent=False),
    "two_persistent": Variant(2, 128, 3, lazy=True, persistent=True),
    "three": Variant(3, 128, 2, lazy=False, persistent=False),
    "three_deep": Variant(3, 128, 3, lazy=False, persistent=False),
    "three_persistent": Variant(3, 128, 2, lazy=False, persistent=True),
}
FASTEST = {64: "three", 128: "two"}  # by head_dim, on one H200; three warpgroups' registers do not hold 128 columns
DEFAULT = "fastest"


@gluon.jit
def _tile(index, sizes, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Batch, head, first row and number of key blocks of a tile."""
    q_len, kv_len, heads, _, all_heads, together, _ = sizes
    tiles_each = gl.cdiv(q_len, BLOCK_M)
    blocks = gl.cdiv(kv_len, BLOCK_N)
    if CAUSAL:  # the longest rows first, a group of heads at a time so that their keys stay in the L2
        first_head = index // (together * tiles_each) * together
        group = gl.minimum(together, all_heads - first_head)
        within = index % (together * tiles_each)
        row = (tiles_each - 1 - within // group) * BLOCK_M
        head = first_head + within % group
        blocks = gl.minimum(blocks, gl.cdiv(row + BLOCK_M, BLOCK_N))
    else:
        row = index % tiles_each * BLOCK_M
        head = index // tiles_each
    return head // heads, head % heads, row, blocks


@gluon.jit
def _load(descriptor, coordinates, barrier, buffer):
    """Start a TMA load of one tile, completing on a barrier."""
    mbarrier.expect(barrier, descriptor.block_type.nbytes)
    tile = buffer._reinterpret(descriptor.dtype, descriptor.block_shape, descriptor.layout)
    tma.async_copy_global_to_shared(descriptor, coordinates, barrier, tile)


@gluon.jit
def _produce(
    descriptors,
    buffers,
    barriers,
    sizes,
    CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Stream queries, keys and values of this program's tiles into shared memory."""
    q_desc, k_desc, v_desc = descriptors
    q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    heads, kv_heads, tiles = sizes[2], sizes[3], sizes[6]
    q_phase = 1
    step = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch, head, row, blocks = _tile(index, sizes, BLOCK_M, BLOCK_N, CAUSAL)
        kv_head = head // (heads // kv_heads)
        for consumer in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(consumer), q_phase)
            at = [batch, head, row + consumer * ROWS, 0]
            _load(q_desc, at, q_full.index(consumer), q_smem.index(consumer))
        q_phase ^= 1
        for done in range(blocks):
            at = [batch, kv_head, (blocks - 1 - done) * BLOCK_N, 0]
            slot = step % STAGES
            free = (step // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(slot), free)
            _load(k_desc, at, k_full.index(slot), k_smem.index(slot))
            mbarrier.wait(v_empty.index(slot), free)
            _load(v_desc, at, v_full.index(slot), v_smem.index(slot))
            step += 1


@gluon.jit
def _partial_sum(values):
    """Row sums (rows, lanes, pair) that stay inside each thread: no shuffles until the tile is done."""
    rows: gl.constexpr = values.shape[0]
    steps: gl.constexpr = values.shape[1] // (LANES * PAIR)
    return gl.sum(values.reshape([rows, steps, LANES, PAIR]), 1)


@gluon.jit
def _full_sum(partial):
    """The row sums of a (rows, lanes, pair) tensor of partial ones."""
    return gl.sum(gl.sum(partial, 2), 1)


@gluon.jit
def _beside_lanes(row, partial):
    """A row vector shaped to multiply a (rows, lanes, pair) tensor."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, partial.type.layout))
    return gl.convert_layout(row, layout, assert_trivial=True).expand_dims(1).expand_dims(2)


@gluon.constexpr_function
def _rescale_assembly(elements):
    """PTX that multiplies by the factors, and jumps over that in warps whose factors are all 1."""
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
    """Outputs tied to the first operand, then the factors."""
    return ",".join(["=f"] * elements + [str(i) for i in range(elements)] + ["f"] * elements)


@gluon.jit
def _rescale(output, keep, LAZY: gl.constexpr):
    """Multiply each row of the output by its factor."""
    factor = gl.convert_layout(keep, gl.SliceLayout(1, output.type.layout), assert_trivial=True)[:, None]
    if LAZY:
        elements: gl.constexpr = output.shape[1] // 2  # 64 rows over the 128 threads of a warpgroup
        output = gl.inline_asm_elementwise(
            _rescale_assembly(elements),
            _rescale_constraints(elements),
            [output, factor.broadcast_to(output.shape)],
            dtype=gl.float32,
            is_pure=False,
            pack=elements,
        )
    else:
        output = output * factor
    return output


@gluon.jit
def _consume(
    shared,
    CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    LAZY: gl.constexpr,
):
    """Attend from 64 rows of each of this program's tiles; scores are in units of log 2."""
    o_desc, results, buffers, barriers, sizes, scale = shared
    max_ptr, total_ptr, gap_ptr, participation_ptr = results
    q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    q_len, kv_len, heads, tiles = sizes[0], sizes[1], sizes[2], sizes[6]
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
        batch, head, tile_row, blocks = _tile(index, sizes, BLOCK_M, BLOCK_N, CAUSAL)
        row = tile_row + CONSUMER * ROWS
        if CAUSAL and BLOCK_N % BLOCK_M != 0:  # the tile's last blocks may lie beyond this warpgroup's rows
            own = gl.minimum(blocks, gl.cdiv(row + ROWS, BLOCK_N))
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
        total = _partial_sum(weights)
        moment = _partial_sum(weights * scores)
        square = _partial_sum(weights * weights)
        operand = gl.convert_layout(weights.to(q_smem.dtype), weights_layout, assert_trivial=True)
        output = gl.zeros([ROWS, HEAD_DIM], gl.float32, output_layout)

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
            new_base = row_max
            if LAZY:
                new_base = gl.where(row_max - base > SLACK, row_max, base)
            shift = base - new_base
            keep = gl.exp2(shift)
            base = new_base
            scores = scores * scale - base[:, None]
            weights = gl.exp2(scores)
            lanes_keep = _beside_lanes(keep, total)
            moment = lanes_keep * (moment + total * _beside_lanes(shift, total)) + _partial_sum(weights * scores)
            square = lanes_keep * lanes_keep * square + _partial_sum(weights * weights)
            total = lanes_keep * total + _partial_sum(weights)
            output, operand = warpgroup_mma_wait(0, deps=(output, operand))
            mbarrier.arrive(v_empty.index(v_slot))
            operand = gl.convert_layout(weights.to(q_smem.dtype), weights_layout, assert_trivial=True)
            output = _rescale(output, keep, LAZY)

        mbarrier.wait(v_full.index(slot), step // STAGES & 1)
        output = warpgroup_mma(operand, v_smem.index(slot), output, is_async=True)
        total_sum = _full_sum(total)
        inverse = 1.0 / total_sum
        row_layout: gl.constexpr = total_sum.type.layout
        ahead = gl.convert_layout(row_max - base, row_layout, assert_trivial=True)  # how far the maximum ran from base
        own_rows = row + gl.arange(0, ROWS, row_layout)
        inside = own_rows < q_len
        at = (batch * heads + head) * q_len + own_rows
        gl.store(max_ptr + at, gl.convert_layout(row_max, row_layout, assert_trivial=True) * LN2, mask=inside)
        gl.store(total_ptr + at, gl.maximum(total_sum * gl.exp2(-ahead), 1.0), mask=inside)
        gl.store(gap_ptr + at, gl.maximum(ahead - _full_sum(moment) * inverse, 0.0) * LN2, mask=inside)
        gl.store(participation_ptr + at, gl.minimum(_full_sum(square) * inverse * inverse, 1.0), mask=inside)
        output, operand = warpgroup_mma_wait(0, deps=(output, operand))
        mbarrier.arrive(v_empty.index(slot))
        step += 1

        output = _rescale(output, inverse, False)
        query.store(output.to(q_smem.dtype))  # this warpgroup is done with its queries
        fence_async_shared()
        tile = query._reinterpret(o_desc.dtype, o_desc.block_shape, o_desc.layout)
        tma.async_copy_shared_to_global(o_desc, [batch, head, row, 0], tile)
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(CONSUMER))


@gluon.jit(do_not_specialize=["q_len", "kv_len", "heads", "kv_heads", "all_heads", "together", "tiles"])
def _attend(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    max_ptr,
    total_ptr,
    gap_ptr,
    participation_ptr,
    scale,
    q_len,
    kv_len,
    heads,
    kv_heads,
    all_heads,
    together,
    tiles,
    CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    LAZY: gl.constexpr,
):
    """Attention output and row statistics, scale in units of log 2."""
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
    results = (max_ptr, total_ptr, gap_ptr, participation_ptr)
    buffers = (q_smem, k_smem, v_smem)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (q_len, kv_len, heads, kv_heads, all_heads, together, tiles)
    shared = (o_desc, results, buffers, barriers, sizes, scale)
    # Registers: 65536 over 12 or 16 warps; the first consumer gets what the others leave: as many as the second.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (shared, 0, CONSUMERS, BLOCK_N, STAGES, CAUSAL, LAZY)),
                (_consume, (shared, 1, CONSUMERS, BLOCK_N, STAGES, CAUSAL, LAZY)),
                (_produce, (loads, buffers, barriers, sizes, CONSUMERS, BLOCK_N, STAGES, CAUSAL)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (shared, 0, CONSUMERS, BLOCK_N, STAGES, CAUSAL, LAZY)),
                (_consume, (shared, 1, CONSUMERS, BLOCK_N, STAGES, CAUSAL, LAZY)),
                (_consume, (shared, 2, CONSUMERS, BLOCK_N, STAGES, CAUSAL, LAZY)),
                (_produce, (loads, buffers, barriers, sizes, CONSUMERS, BLOCK_N, STAGES, CAUSAL)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


@lru_cache
def _multiprocessors(device: int) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _strides(tensor: Tensor) -> list[int]:
    """Strides of a (batch, heads, len, head_dim) tensor; that of an axis of one element says nothing: replaced."""
    return [tensor.stride(axis) if tensor.shape[axis] > 1 else tensor.shape[-1] for axis in range(4)]


def _descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """A TMA descriptor for tiles of some rows of one head; reads past the end give zeros, writes are dropped."""
    *outer, _ = _strides(tensor)
    layout = gl.NVMMASharedLayout(128, 16, 4)
    return TensorDescriptor(tensor, list(tensor.shape), [*outer, 1], [1, 1, rows, tensor.shape[-1]], layout)


def _loadable(tensor: Tensor) -> bool:
    """Whether TMA can read the tensor: 16-byte strides and address, head_dim contiguous, no broadcast axis."""
    *outer, inner = _strides(tensor)
    return inner == 1 and all(stride > 0 and stride % 8 == 0 for stride in outer) and tensor.data_ptr() % 16 == 0


def supported(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attend_rows` takes these (batch, heads, len, head_dim) tensors."""
    tensors = (query, key, value)
    return (
        all(tensor.is_cuda and tensor.ndim == 4 and tensor.numel() > 0 for tensor in tensors)
        and torch.cuda.get_device_capability(query.device) == (9, 0)
        and query.dtype in (torch.bfloat16, torch.float16)
        and all(tensor.dtype == query.dtype and tensor.device == query.device for tensor in tensors)
        and query.shape[-1] in (64, 128)
        and all(tensor.shape[-1] == query.shape[-1] and tensor.shape[0] == query.shape[0] for tensor in tensors)
        and key.shape == value.shape
        and query.shape[1] % key.shape[1] == 0
        and all(_loadable(tensor) for tensor in tensors)
    )


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    is_causal: bool,
    variant: str = DEFAULT,
) -> tuple[Any, ...]:
    """Attention output and, for each row of scores s = scale·q·k, m = max s, l = Σ e^(s−m), E[m − s] and Σ p².

    Row i sees keys j ≤ i if causal; statistics are float32
    (batch, heads, q_len).
    """
    batch, heads, q_len, head_dim = query.shape
    chosen = VARIANTS[FASTEST[head_dim] if variant == DEFAULT else variant]
    kv_heads, kv_len = key.shape[1:3]
    if scale < 0:  # the kernel takes a row's maximum before it scales
        query, scale = -query, -scale
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    shape = (batch, heads, q_len)
    statistics = [query.new_empty(shape, dtype=torch.float32) for _ in range(4)]
    tiles = batch * heads * -(-q_len // (chosen.consumers * ROWS.value))
    head_bytes = 2 * kv_len * head_dim * key.element_size() * kv_heads // heads
    programs = min(tiles, _multiprocessors(query.device.index)) if chosen.persistent else tiles
    with torch.cuda.device(query.device):
        _attend[(programs,)](
            _descriptor(query, ROWS.value),
            _descriptor(key, chosen.block_n),
            _descriptor(value, chosen.block_n),
            _descriptor(output, ROWS.value),
            *statistics,
            scale * LOG2E,
            q_len,
            kv_len,
            heads,
            kv_heads,
            batch * heads,
            min(batch * heads, max(1, L2_BUDGET // max(1, head_bytes))),
            tiles,
            CONSUMERS=chosen.consumers,
            BLOCK_N=chosen.block_n,
            STAGES=chosen.stages,
            CAUSAL=is_causal,
            LAZY=chosen.lazy,
            num_warps=4,
        )
    return output, *statistics
