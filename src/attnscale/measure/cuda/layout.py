"""Checks of what the kernels take, and the layout of tensors that their compilation depends on."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.numerics import KERNEL_DTYPES
from attnscale.torch_internals import looks_on

HAS_TRITON = find_spec("triton") is not None  # looked for here, since Dynamo does not trace the import system
ALIGNMENT = 16  # bytes, of what is loaded at once
HOPPER = (9, 0)  # the compute capability that the Hopper kernel is written for
LEAST_SPAN = 128  # keys of one program, where the keys of sampled rows are split so that few rows still fill a GPU
SPANS = 264  # of all heads, two a multiprocessor of an H200: fewer leave it idle, more end before they are fast
PLAIN_TYPES = (Tensor, torch.nn.Parameter)
SUMS = 7  # planes of sums, as in RowSums: max, total, gap, participation, mean, deviation and first of each row
SUMS_AND_VISIBLE = 8  # and the number of visible keys, where the position of a row does not tell it
WIDEST_HEAD = 256  # a tile holds whole heads

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int | None, int]
"""Shape, strides, dtype, index of the device, and alignment of a tensor."""


def layout_key(tensor: Tensor) -> Layout:
    """Return all that the compilation of a kernel depends on of a tensor."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device.index, tensor.data_ptr() % ALIGNMENT


def token_layout_key(tensor: Tensor) -> Layout:
    """Return the same of (1, heads, total, head_dim) whatever the number of tokens, as far as compilation allows.

    It depends on whether strides of what a kernel writes are one, or aligned.
    """
    _, heads, total, head_dim = tensor.shape
    shape = heads, total == 1, total % ALIGNMENT, head_dim
    return shape, tensor.stride(), tensor.dtype, tensor.device.index, tensor.data_ptr() % ALIGNMENT


def kernels_take(call: Call) -> bool:
    """Return True if query and key are what the kernels are written for."""
    return call.query.dtype == call.key.dtype and _are_taken(call.query) and _are_taken(call.key)


def _are_taken(vectors: Tensor) -> bool:
    fits = vectors.is_cuda and vectors.dtype in KERNEL_DTYPES and vectors.shape[-1] <= WIDEST_HEAD
    return fits and vectors.numel() > 0 and HAS_TRITON


def is_intercepted(*tensors: Tensor) -> bool:
    """Return True if a compiler, mode, transform or tensor subclass is active: none of them would see a launch."""
    return torch.compiler.is_compiling() or looks_on() or any(type(tensor) not in PLAIN_TYPES for tensor in tensors)


def capturing() -> bool:
    """Return True if the replays of a CUDA graph will refresh what is measured now."""
    return not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


@cache
def on_hopper(device: int | None) -> bool:
    """Return True if that GPU is one."""
    return torch.cuda.get_device_capability(device) == HOPPER


def key_span(query: Tensor, key: Tensor) -> int:
    """Return how many keys of a head one program takes, so that few rows fill a GPU; on a CPU, all."""
    (batch, heads, *_), kv_len = query.shape, key.shape[2]
    spans = max(1, SPANS // (batch * heads))
    return kv_len if query.device.type == "cpu" else -(-kv_len // (spans * LEAST_SPAN)) * LEAST_SPAN
