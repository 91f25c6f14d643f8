"""Which tile of which head a program of the grid works on."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnscale.measure.cuda.triton import sequences

FIELDS = gl.constexpr(sequences.FIELDS.value)
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
