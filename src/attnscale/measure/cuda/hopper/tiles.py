"""Tiles: which one of which head a program works on, and the producer warp that loads them by TMA."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from attnscale.measure.cuda.triton import sequence_tiles

FIELDS = gl.constexpr(sequence_tiles.FIELDS.value)
CONSUMERS = gl.constexpr(2)  # warpgroups that attend
ROWS = gl.constexpr(64)  # rows of one warpgroup's matrix instruction


@gluon.jit
def tiles_in(sizes, tiles_ptr, SEQUENCES: gl.constexpr):
    """How many tiles there are: of sequences that are laid end to end the device alone knows it."""
    if SEQUENCES:
        return gl.load(tiles_ptr) * sizes[2]
    return sizes[6]


@gluon.jit
def tile_at(
    index, sizes, tiles_ptr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, SEQUENCES: gl.constexpr
):
    """Batch, head, first row and number of key blocks of a tile; where its rows begin, and how many rows and keys.

    Sequences that are laid end to end are one batch entry; each sees itself.
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
    if CAUSAL:  # the longest rows first, a group of heads at a time so that their keys stay in the L2
        first_head = index // (together * tiles_each) * together
        group = gl.minimum(together, all_heads - first_head)
        within = index % (together * tiles_each)
        row = (tiles_each - 1 - within // group) * BLOCK_M
        if BLOCK_N % BLOCK_M != 0:  # what does not fill a tile is missing from the shortest rows, before the first one
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
