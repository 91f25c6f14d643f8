"""The producer: one warp that streams tiles into shared memory by TMA, as fast as they are used up."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from attnscale.measure.cuda.hopper.schedule import ROWS, tile_at, tiles_in


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
    CONSUMERS: gl.constexpr,
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
