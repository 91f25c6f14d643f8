"""Inputs that kernels support, their tiles, and their launches.

Tile sizes are plain tables, since autotuning needs a GPU and cannot run under graph capture. A launch is cheap for the
host: it does not look up the compiled kernel again.
"""

import threading
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.numerics import KERNEL_DTYPES
from attnscale.torch_internals import current_stream, has_mode

HAS_TRITON = find_spec("triton") is not None  # found at import, because Dynamo does not trace the import system
ALIGNMENT = 16  # bytes of one load
HOPPER = (9, 0)  # the compute capability that the Hopper kernel is written for
WIDEST_HEAD = 256  # a tile holds the whole head dimension
PLAIN_TYPES = (Tensor, torch.nn.Parameter)
SUMS = 8  # planes of sums, as in RowSums: max, total, gap, participation, mean, deviation, first, and visible keys
LEAST_SPAN = 128  # least keys of one program, if keys are split so that few sampled rows fill a GPU
SPANS = 264  # programs over all heads, two for each multiprocessor of an H200; fewer or more are slower

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int | None, int]
"""Shape, strides, dtype, index of the device, and alignment of a tensor."""


def layout_key(tensor: Tensor) -> Layout:
    """Return the properties of a tensor that the compilation of a kernel depends on."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device.index, tensor.data_ptr() % ALIGNMENT


def token_layout_key(tensor: Tensor) -> Layout:
    """Return layout_key() of (1, heads, total, head_dim), independent of the number of tokens where possible.

    Kernels depend on which strides of their outputs are one, and which are aligned.
    """
    _, heads, total, head_dim = tensor.shape
    shape = heads, total == 1, total % ALIGNMENT, head_dim
    return shape, tensor.stride(), tensor.dtype, tensor.device.index, tensor.data_ptr() % ALIGNMENT


def kernels_take(call: Call) -> bool:
    """Return True if the kernels support this query and key."""
    return call.query.dtype == call.key.dtype and _are_taken(call.query) and _are_taken(call.key)


def _are_taken(vectors: Tensor) -> bool:
    fits = vectors.is_cuda and vectors.dtype in KERNEL_DTYPES and vectors.shape[-1] <= WIDEST_HEAD
    return fits and vectors.numel() > 0 and HAS_TRITON


def is_intercepted(*tensors: Tensor) -> bool:
    """Return True if a compiler, mode, transform or tensor subclass is active: it would not see a launch."""
    return torch.compiler.is_compiling() or has_mode() or any(type(tensor) not in PLAIN_TYPES for tensor in tensors)


def capturing() -> bool:
    """Return True during the capture of a CUDA graph, whose replays refresh the statistics."""
    return not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


@cache
def on_hopper(device: int | None) -> bool:
    """Return True for a Hopper GPU."""
    return torch.cuda.get_device_capability(device) == HOPPER


def key_span(query: Tensor, key: Tensor) -> int:
    """Return the number of keys for one program, so that few rows fill a GPU; all keys on a CPU."""
    (batch, heads, *_), kv_len = query.shape, key.shape[2]
    spans = max(1, SPANS // (batch * heads))
    return kv_len if query.device.type == "cpu" else -(-kv_len // (spans * LEAST_SPAN)) * LEAST_SPAN


LEAST_WIDTH = 16  # the narrowest product of tiles
TENSOR_CORES = (8, 0)  # the first capability whose tensor cores multiply bfloat16
SAMPLED_ROWS = 64  # largest number in one tile: the default sample of a head


class Tiles(NamedTuple):
    """Query rows and keys of a tile, and the warps and pipeline stages that run it."""

    rows: int
    keys: int
    warps: int
    stages: int


# By head dimension, padded to a power of two. LARGE is the fastest on an H200, for Hopper and data-centre Blackwell.
LARGE = {64: Tiles(128, 64, 8, 3), 128: Tiles(128, 128, 8, 2), 256: Tiles(128, 32, 8, 2)}
# SMALL fits 99 KB of shared memory, for other GPUs. PLAIN fits the registers of GPUs without tensor cores.
SMALL = {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(64, 32, 8, 2)}
PLAIN = {64: Tiles(32, 32, 4, 1), 128: Tiles(32, 32, 8, 1), 256: Tiles(32, 16, 8, 1)}
# float32 is computed as three products on tensor cores, which needs twice the memory and both halves of the operands.
LARGE_FLOAT32 = {64: Tiles(128, 64, 8, 2), 128: Tiles(64, 64, 8, 1), 256: Tiles(64, 32, 8, 1)}
SMALL_FLOAT32 = {64: Tiles(64, 32, 4, 1), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)}
FEW_ROWS = 64  # up to this number, reading keys and values is nearly all the work, as in a decoding step
LEAST_ROWS = 16  # smallest tile of tensor cores


def padded_width(head_dim: int, least: int) -> int:
    """Return the width of a tile, a power of two."""
    return max(1 << (head_dim - 1).bit_length(), least)


def tile_constants(cut: Tiles, head_dim: int, dtype: torch.dtype, device: int | None) -> dict[str, object]:
    """Return the constants that every pass over tiles is compiled for."""
    return {
        "HEAD_DIM": head_dim,
        "WIDTH": padded_width(head_dim, LEAST_WIDTH),
        "TILE_ROWS": cut.rows,
        "TILE_KEYS": cut.keys,
        "PRECISION": precision(dtype, device),
    }


def tiles(rows: int, head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> Tiles:
    """Return the tiles of a pass over this many rows."""
    if capability < TENSOR_CORES:
        table = PLAIN
    elif dtype == torch.float32:
        table = LARGE_FLOAT32 if _large(capability) else SMALL_FLOAT32
    else:
        table = LARGE if _large(capability) else SMALL
    cut = table[padded_width(head_dim, 64)]
    return cut if rows > FEW_ROWS else Tiles(LEAST_ROWS, min(cut.keys, 64), 4, cut.stages)


def sample_tiles(rows: int, head_dim: int, dtype: torch.dtype, capability: tuple[int, int], banded: bool) -> Tiles:
    """Return the tiles of a pass over a few rows. On Hopper, some tile sizes are five times as slow as others.

    `banded` means that each row sees only keys near it, so that a tile of few rows skips most keys.
    """
    width = padded_width(head_dim, 64)
    if dtype == torch.float32 or capability < TENSOR_CORES:
        return Tiles(16, *PLAIN[width][1:])
    height = min(padded_width(rows, 16), SAMPLED_ROWS)
    if width > 128:
        return Tiles(height, 32, 4, 2)
    if not _large(capability):
        return Tiles(height, 64, 8 if height > 32 else 4, 3)
    if banded:
        return Tiles(16, 256, 4, 2)
    if width == 64:
        return Tiles(16, 256, 4, 2) if rows <= 16 else Tiles(32, 64, 4, 3)
    return Tiles(16, 128, 4, 3) if rows <= 32 else Tiles(64, 128, 8, 3)


def masked_tiles(head_dim: int, dtype: torch.dtype, capability: tuple[int, int], mask_by_row: bool) -> Tiles:
    """Return the tiles of a pass over every row with a mask; tiles that do not fit the registers are far slower.

    If a tile has as many keys as head_dim, a mask with one row per query has the layout of the keys: no data is moved.
    """
    width = padded_width(head_dim, 64)
    if capability < TENSOR_CORES:
        return PLAIN[width]
    if mask_by_row and dtype != torch.float32 and width <= 128 and _large(capability):
        return Tiles(64, width, width // 16, 3 if width == 64 else 2)
    return Tiles(64, 32, 4, 1 if dtype == torch.float32 else 2 if width > 128 else 3)


def _large(capability: tuple[int, int]) -> bool:
    """Return True for Hopper and data-centre Blackwell, which have 227 KB of shared memory."""
    return capability[0] in (9, 10)


class Launch:
    """A kernel with its constants, compiled at its first launch.

    Later launches must have the same properties that triton compiles for: dtypes, alignments, and which sizes are 1 or
    multiples of 16. Callers therefore cache a Launch by the layout of its tensors.
    """

    def __init__(self, kernel: Any, device: int | None, constants: Mapping[str, Any], tiles: Tiles) -> None:
        self.tiles = tiles
        self._kernel, self._device, self._constants = kernel, device, dict(constants)
        self._options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        self._compiled: Any = None

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch this many programs on the current stream of the device."""
        if self._device is not None and self._device != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self(grid, *arguments)
        if self._compiled is None:  # always None in triton's interpreter
            self._compiled = self._kernel[grid](*arguments, **self._constants, **self._options)
        else:
            self._compiled[*grid, 1, 1](*arguments, *self._constants.values())
        if RECORDING.launches is not None:
            RECORDING.launches.append((self, grid, arguments))
        return None

    def on(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return a function that launches this many programs of the compiled kernel; pointers may be numbers."""
        run, constants = self._compiled[*grid, 1, 1], tuple(self._constants.values())
        return lambda *arguments: run(*arguments, *constants)


class _Recording(threading.local):
    launches: list[tuple[Launch, tuple[int, ...], tuple[Any, ...]]] | None = None


RECORDING = _Recording()  # launches of this thread, with their grids and arguments, while replay.py records


def counters(device: torch.device, count: int) -> Tensor:
    """Return counters, which kernels reset to zero: one tensor for each stream, and a new one for each CUDA graph."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = device.index, current_stream(device.index)
    found = COUNTERS.get(key)
    if found is None or found.shape[0] < count:
        found = COUNTERS[key] = torch.zeros(max(count, LEAST_COUNTERS), dtype=torch.int32, device=device)
    return found


COUNTERS: dict[tuple[int, int], Tensor] = {}
LEAST_COUNTERS = 256


@cache
def capability(device: int | None) -> tuple[int, int]:
    """Return the compute capability of a GPU; (0, 0) in triton's interpreter, which has none."""
    return (0, 0) if device is None else torch.cuda.get_device_capability(device)


def precision(dtype: torch.dtype, device: int | None) -> str:
    """Return the input precision of products: three tf32 products for float32, independent of torch's own setting.

    Each half has the 11 bits of tf32: together 22 of the 24 bits of float32.
    """
    if dtype != torch.float32:
        return "tf32"  # ignored for narrower dtypes
    return "tf32x3" if capability(device) >= TENSOR_CORES else "ieee"


def unit_stride(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy whose last axis is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return a query and a positive scale with the same scores, because kernels take maxima before scaling."""
    if scale > 0.0:
        return query, scale
    return (-query, -scale) if scale else (torch.zeros_like(query), 1.0)
