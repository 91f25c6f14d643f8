"""The consumers: each warpgroup attends from 64 rows and leaves their statistics behind."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,misc"

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnscale.measure.cuda.hopper.tiles import CONSUMERS, ROWS, tile_at, tiles_in

MASKED = gl.constexpr(-1.0e30)  # finite, because p·x must be 0 and not NaN for a masked key
LN2 = gl.constexpr(math.log(2))
SLACK = gl.constexpr(8.0)  # log2; p stays under 2⁸, in range of float16, while the output waits to be rescaled (FA4)
LANES = gl.constexpr(4)  # threads that share a row of a wgmma accumulator
PAIR = gl.constexpr(2)  # neighbouring columns each of those threads holds


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

    Σ z and Σ z² have the same base as the weights' exponents; moved with it, n z's by the shift δ, they become Σ z + nδ
    and Σ z² + 2δ Σ z + nδ².

    SEQUENCES: rows past the end of one are those of the next, so nothing is written there, and no value is read.
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
            lanes_shift = beside_lanes(shift, total)  # each thread of a row takes its part of the keys counted so far
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
        ahead = gl.convert_layout(row_max - base, row_layout, assert_trivial=True)  # how far the maximum ran from base
        largest = gl.convert_layout(row_max, row_layout, assert_trivial=True)
        exact_total = gl.maximum(relative * gl.exp2(-ahead), 1.0)
        own_rows = row + gl.arange(0, ROWS, row_layout)
        inside = (own_rows >= 0) & (own_rows < q_len)
        plane = all_heads.to(gl.int64) * rows_each  # the statistics lie one behind the other, in the order of RowSums
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
        is_first = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores_layout)) == 0  # the last block begins with it
        first_score = full_sum(partial_sum(gl.where(is_first[None, :], scores, 0.0)))
        gl.store(to + 6 * plane, gl.minimum(first_score - ahead, 0.0) * LN2, mask=inside)
        if SEQUENCES:
            gl.store(to + 7 * plane, number, mask=inside)
        gl.store(lse_ptr + place, (largest + gl.log2(exact_total)) * LN2, mask=inside)
        output, operand = warpgroup_mma_wait(0, deps=(output, operand))
        mbarrier.arrive(v_empty.index(slot))
        step += 1

        output = output * _beside(inverse, output)
        is_whole = row >= 0  # TMA reads zeros before the first row, but cannot be told to write there
        if SEQUENCES:
            is_whole = row + ROWS <= q_len
            if not is_whole:
                _write(output.to(q_smem.dtype), o_ptr + head * width, begin, row, q_len, heads * width, width)
        if is_whole:
            query.store(output.to(q_smem.dtype))  # this warpgroup is done with its queries
            fence_async_shared()
            tile = query._reinterpret(o_desc.dtype, o_desc.block_shape, o_desc.layout)
            tma.async_copy_shared_to_global(o_desc, [batch, head, begin + row, 0], tile)
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(CONSUMER))


@gluon.jit
def _write(output, to, begin, row, length, stride, width):
    """Rows of a sequence, up to its end, into tokens that lie this far apart."""
    layout: gl.constexpr = output.type.layout
    rows = row + gl.arange(0, output.shape[0], gl.SliceLayout(1, layout))
    columns = gl.arange(0, output.shape[1], gl.SliceLayout(0, layout))
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    gl.store(to + ((begin + rows).to(gl.int64) * stride)[:, None] + columns[None, :], output, mask=inside)


@gluon.jit
def partial_sum(values):
    """Row sums (rows, lanes, pair) that stay inside each thread: no shuffles until the tile is done."""
    rows: gl.constexpr = values.shape[0]
    steps: gl.constexpr = values.shape[1] // (LANES * PAIR)
    return gl.sum(values.reshape([rows, steps, LANES, PAIR]), 1)


@gluon.jit
def full_sum(partial):
    """The row sums of a (rows, lanes, pair) tensor of partial ones."""
    return gl.sum(gl.sum(partial, 2), 1)


@gluon.jit
def beside_lanes(row, partial):
    """A row vector shaped to multiply a (rows, lanes, pair) tensor."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, partial.type.layout))
    return gl.convert_layout(row, layout, assert_trivial=True).expand_dims(1).expand_dims(2)


@gluon.jit
def blank_from(tile, row):
    """Zeros in the place of a tile's rows from this one on; those before are written as they were."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    kept = tile.load(layout)
    tile.store(gl.where((rows < row)[:, None], kept, 0.0).to(tile.dtype))


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
    """A row vector shaped to multiply the output."""
    return gl.convert_layout(row, gl.SliceLayout(1, output.type.layout), assert_trivial=True)[:, None]
