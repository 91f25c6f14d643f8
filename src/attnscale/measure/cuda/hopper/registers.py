"""What a warpgroup keeps in its registers: row sums that stay in their threads, an output rescaled when it must be."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LANES = gl.constexpr(4)  # threads that share a row of a wgmma accumulator
PAIR = gl.constexpr(2)  # neighbouring columns each of those threads holds


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
def rescale(output, keep, LAZY: gl.constexpr):
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
