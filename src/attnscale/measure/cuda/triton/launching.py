"""Launches that cost the host little: a kernel that was compiled for a kind of call is not looked up again."""
# mypy: disable-error-code="import-untyped"

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnscale.measure.cuda.triton.tiles import TENSOR_CORES
from attnscale.torch_internals import current_stream

COMPILED: dict[Hashable, Any] = {}  # by the kernel and all that its compilation depends on


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    cut: tuple[int, int],
    kind: Hashable = None,
) -> None:
    """Run a kernel on so many programs; `kind` stands for all that arguments, constants and cut can be for it."""
    compiled = None if kind is None else COMPILED.get((kernel, kind))
    if compiled is not None:
        compiled.run((*grid, 1, 1), (*arguments, *constants))
        return
    found = kernel[grid](*arguments, *constants, num_warps=cut[0], num_stages=cut[1])
    if kind is not None and found is not None:  # triton's interpreter compiles nothing
        COMPILED[kernel, kind] = Compiled(found)


class Compiled:
    """A compiled kernel, launched without looking up what it was compiled for."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launcher = kernel, kernel.run
        scratch = self.launcher.global_scratch_size or self.launcher.profile_scratch_size
        self.plain = not scratch  # triton would allocate it
        self.before = self.launcher.launch_cooperative_grid, self.launcher.launch_pdl, None, None
        self.after = kernel.packed_metadata, None, None, None  # no metadata for a profiler, no hooks of one

    def run(self, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """Launch on the current stream of the current device."""
        if not self.plain:
            self.kernel[grid[:3]](*arguments)
            return
        self.launcher.launch(*grid[:3], current_stream(), self.kernel.function, *self.before, *self.after, *arguments)


def counters(device: torch.device, count: int) -> Tensor:
    """So many zeros, which whoever counts with them leaves as zeros; one set a stream, and a graph has its own."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = device.index, current_stream(device.index)
    found = COUNTERS.get(key)
    if found is None or found.shape[0] < count:
        found = COUNTERS[key] = torch.zeros(max(count, LEAST_COUNTERS), dtype=torch.int32, device=device)
    return found


COUNTERS: dict[tuple[int, int], Tensor] = {}
LEAST_COUNTERS = 256


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Launch on the tensor's device, which mostly is the current one."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


@cache
def capability(device: int | None) -> tuple[int, int]:
    """Of a GPU; none at all where triton's interpreter runs."""
    return (0, 0) if device is None else torch.cuda.get_device_capability(device)


def precision(tensor: Tensor) -> str:
    """How float32 operands are multiplied, whatever torch allows its own products: as three products of their halves.

    Each half has the 11 bits of tf32, so that both have all but two of float32's.
    """
    return precision_of(tensor.dtype, tensor.device.index)


def precision_of(dtype: torch.dtype, device: int | None) -> str:
    """The same by the dtype and the device of operands."""
    if dtype != torch.float32:
        return "tf32"  # of no effect on narrower operands
    return "tf32x3" if capability(device) >= TENSOR_CORES else "ieee"
