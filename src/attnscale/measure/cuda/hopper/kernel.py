"""Fused attention and exact row statistics for Hopper GPUs, in Gluon: one producer warp, two or three consumers.

The schedule is FlashAttention-3's (Shah et al., 2024): a producer warp streams tiles through shared memory by TMA;
each consumer warpgroup owns 64 query rows and runs the next block's QKᵀ and the last block's PV on the tensor cores
while it exponentiates. Blocks go from the last visible key to the first, so that only the first one needs a mask.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnscale.measure.cuda.hopper.consumer import consume
from attnscale.measure.cuda.hopper.producer import produce
from attnscale.measure.cuda.hopper.schedule import ROWS


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
    CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    LAZY: gl.constexpr,
    MOMENTS: gl.constexpr,
    SEQUENCES: gl.constexpr,
):
    """Attention output, the lse and four statistics of each row, or six; scale in units of log 2.

    SEQUENCES: of those that are laid end to end, whose tiles lie at tiles_ptr; their rows have a seventh.
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
    # Registers: 65536 over 12 or 16 warps; the first consumer gets what the others leave: as many as the second.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (shared, 0, CONSUMERS, BLOCK_N, STAGES, CAUSAL, LAZY, MOMENTS, SEQUENCES)),
                (consume, (shared, 1, CONSUMERS, BLOCK_N, STAGES, CAUSAL, LAZY, MOMENTS, SEQUENCES)),
                (produce, (loads, buffers, barriers, sizes, tiles_ptr, CONSUMERS, BLOCK_N, STAGES, CAUSAL, SEQUENCES)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (shared, 0, CONSUMERS, BLOCK_N, STAGES, CAUSAL, LAZY, MOMENTS, SEQUENCES)),
                (consume, (shared, 1, CONSUMERS, BLOCK_N, STAGES, CAUSAL, LAZY, MOMENTS, SEQUENCES)),
                (consume, (shared, 2, CONSUMERS, BLOCK_N, STAGES, CAUSAL, LAZY, MOMENTS, SEQUENCES)),
                (produce, (loads, buffers, barriers, sizes, tiles_ptr, CONSUMERS, BLOCK_N, STAGES, CAUSAL, SEQUENCES)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
