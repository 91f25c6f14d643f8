"""The host's side of the Hopper kernel: which inputs it takes, how its work is laid out, a launch that costs little."""
# mypy: disable-error-code="import-untyped"

import math
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnscale.measure.cuda.hopper.kernel import attend
from attnscale.measure.cuda.hopper.schedule import ROWS
from attnscale.measure.cuda.triton.launching import Compiled, on_device
from attnscale.measure.cuda.triton.sequences import most_tiles, tiles_of
from attnscale.numerics import HALF_DTYPES
from attnscale.torch_internals import current_stream

LOG2E = math.log2(math.e)
SUMS = {False: 4, True: 6}  # a row: max, total, gap, participation; with moments, mean and deviation
OF_SEQUENCES = 7  # and the number of visible keys
L2_BUDGET = 32 * 2**20  # bytes of keys and values in use at a time: about half of the H200's 60 MB of L2
TMA_ALIGNMENT = 16  # bytes, of an address and of every stride


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
    "wide": Variant(2, 64, 2, lazy=True, persistent=False),
    "three_persistent": Variant(3, 128, 2, lazy=False, persistent=True),
}
# By head_dim, padded, on one H200; three warpgroups' registers do not hold 128 columns, nor the memory 128 keys of 256.
FASTEST = {64: "three", 128: "two", 256: "wide"}
# With moments three warpgroups' registers do not hold 64 columns either, and short rows are a tile's beginning and end.
FASTEST_WITH_MOMENTS = {64: "two_persistent", 128: "two", 256: "wide"}
WIDEST = max(FASTEST)
DEFAULT = "fastest"


def padded(head_dim: int) -> int:
    """How wide a tile is: TMA fills it up with zeros where it reads, and drops them where it writes."""
    return next(width for width in FASTEST if head_dim <= width)


def supported(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attend_rows` takes these (batch, heads, len, head_dim) tensors of one dtype, on one Hopper GPU."""
    return (
        query.shape[-1] <= WIDEST
        and query.shape[-1] % (TMA_ALIGNMENT // query.element_size()) == 0
        and query.dtype in HALF_DTYPES
        and key.shape == value.shape
        and _loadable(query)
        and _loadable(key)
        and _loadable(value)
    )


def _loadable(tensor: Tensor) -> bool:
    """Whether TMA can read the tensor: aligned, head_dim contiguous, no empty and no broadcast axis."""
    *outer, inner = _strides(tensor)
    aligned = TMA_ALIGNMENT // tensor.element_size()
    return (
        inner == 1
        and all(stride > 0 and stride % aligned == 0 for stride in outer)
        and tensor.data_ptr() % TMA_ALIGNMENT == 0
        and tensor.numel() > 0
    )


def _strides(tensor: Tensor) -> list[int]:
    """Strides of a (batch, heads, len, head_dim) tensor; that of an axis of one element says nothing: replaced."""
    width = tensor.shape[-1]
    return [stride if size > 1 else width for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    is_causal: bool,
    moments: bool = False,
    variant: str = DEFAULT,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention output, the lse, and for each row of scores s = scale·q·k, m = max s, l = Σ e^(s−m), E[m − s], Σ p².

    With `moments`, also the mean of s and Σ (s − mean)². Row i sees keys j ≤ i if causal; the statistics are float32
    (4 or 6, batch, heads, q_len).
    """
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return _launched(query, key, value, output, None, scale, is_causal, moments, variant)


def sequence_rows(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of sequences laid end to end, (1, heads, total, head_dim), each of which sees itself, with moments.

    The output is (total, heads, head_dim); a seventh statistic says how many keys a row sees.
    """
    _, heads, total, head_dim = query.shape
    output = torch.empty((total, heads, head_dim), dtype=query.dtype, device=query.device)
    as_row = output.transpose(0, 1).unsqueeze(0)
    _, lse, sums = _launched(query, key, value, as_row, starts, scale, is_causal, True, DEFAULT)
    return output, lse, sums


def _launched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    starts: Tensor | None,
    scale: float,
    is_causal: bool,
    moments: bool,
    variant: str,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, q_len, head_dim = query.shape
    width = padded(head_dim)
    fastest = FASTEST_WITH_MOMENTS if moments else FASTEST
    name = fastest[width] if variant == DEFAULT else variant
    chosen = VARIANTS[name]
    kv_heads, kv_len = key.shape[1:3]
    if scale < 0:  # the kernel takes a row's maximum before it scales
        query, scale = -query, -scale
    planes = SUMS[moments] if starts is None else OF_SEQUENCES
    sums = torch.empty((planes, batch, heads, q_len), dtype=torch.float32, device=query.device)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=query.device)
    all_heads = batch * heads
    tile_rows = chosen.consumers * ROWS.value
    tiles, placed = all_heads * -(-q_len // tile_rows), sums
    if starts is not None:
        sums[-1].zero_()  # tokens behind the last sequence see nothing
        tiles = heads * most_tiles(starts, q_len, tile_rows)
        placed = tiles_of(starts, q_len, tile_rows, is_causal)
    head_bytes = 2 * kv_len * head_dim * key.element_size() * kv_heads // heads
    together = min(all_heads, max(1, L2_BUDGET // max(1, head_bytes)))
    programs = min(tiles, _multiprocessors(query.device.index)) if chosen.persistent else tiles
    kind = name, width, query.dtype, is_causal, moments, starts is None, query.device.index
    scalars = (
        *(output, sums, lse, placed, scale * LOG2E, head_dim),
        *(q_len, kv_len, heads, kv_heads, all_heads, together, tiles),
        *(chosen.consumers, chosen.block_n, chosen.stages, is_causal, chosen.lazy, moments, starts is not None),
    )
    tensors = (query, ROWS.value), (key, chosen.block_n), (value, chosen.block_n), (output, ROWS.value)
    with on_device(query):
        compiled = COMPILED.get(kind)
        if compiled is None:
            described = [_descriptor(tensor, rows, width) for tensor, rows in tensors]
            COMPILED[kind] = Described(attend[(programs,)](*described, *scalars, num_warps=4))
        else:
            compiled.launch(programs, tensors, width, scalars)
    return output, lse, sums


class Described(Compiled):
    """The compiled kernel with its TMA descriptors: those of a place and shape met before are not encoded again."""

    def __init__(self, kernel: Any) -> None:
        super().__init__(kernel)
        inner = self.launcher.launch  # triton's own encodes every descriptor at every launch, then calls this:
        within = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
        self.direct = within["launcher"].cell_contents
        self.layouts = within["tensordesc_meta"].cell_contents
        self.encoded: dict[Hashable, list[Any]] = {}

    def launch(
        self, programs: int, tensors: Sequence[tuple[Tensor, int]], width: int, scalars: tuple[Any, ...]
    ) -> None:
        """Run it on so many programs."""
        arguments: list[Any] = []
        for (tensor, rows), layout in zip(tensors, self.layouts, strict=True):
            place = tensor.data_ptr(), tensor.shape, tensor.stride(), rows
            encoded = self.encoded.get(place)
            if encoded is None:
                if len(self.encoded) >= MOST_ENCODED:
                    self.encoded.clear()
                encoded = self.encoded[place] = make_tensordesc_arg(_descriptor(tensor, rows, width), layout)
            arguments += encoded
        stream = current_stream()
        self.direct(programs, 1, 1, stream, self.kernel.function, *self.before, *self.after, *arguments, *scalars)


MOST_ENCODED = 1024  # descriptors: 128 bytes each, and what names them
COMPILED: dict[tuple[object, ...], Described] = {}  # kernels, by all that their compilation depends on
LAYOUT = gl.NVMMASharedLayout(128, 16, 4)  # 128 bytes swizzled, 16-bit elements, four axes


def _descriptor(tensor: Tensor, rows: int, width: int) -> Any:
    """A TMA descriptor for tiles of some rows of one head; reads past the end give zeros, writes are dropped."""
    return TensorDescriptor(tensor, list(tensor.shape), _strides(tensor), [1, 1, rows, width], LAYOUT)


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
