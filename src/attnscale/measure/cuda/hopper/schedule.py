"""Which tile of which head a program of the grid works on."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  # rows of one warpgroup's matrix instruction


@gluon.jit
def tile_at(index, sizes, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Batch, head, first row and number of key blocks of a tile."""
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
    return head // heads, head % heads, row, blocks
