"""Launches of Triton kernels that cost the host little: what a kernel was compiled for is not looked up again."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnscale.measure.cuda.triton.tiles import TENSOR_CORES, Tiles
from attnscale.torch_internals import current_stream


class Launch:
    """A kernel with its constants, compiled at its first launch.

    Later launches must be alike in all that triton compiles for: dtypes, alignments, and which sizes are 1 or multiples
    of 16. Whoever makes one therefore caches it by the layout of its tensors.
    """

    def __init__(self, kernel: Any, device: int | None, constants: Mapping[str, Any], tiles: Tiles) -> None:
        self.tiles = tiles
        self._kernel, self._device, self._constants = kernel, device, dict(constants)
        self._options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        self._compiled: Any = None

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch so many programs on the current stream of the device."""
        with _on_device(self._device):
            if self._compiled is None:  # always so in triton's interpreter
                self._compiled = self._kernel[grid](*arguments, **self._constants, **self._options)
            else:
                self._compiled[*grid, 1, 1](*arguments, *self._constants.values())

    def bind(self, grid: tuple[int, ...], *sizes: Any) -> Callable[..., None]:
        """Return a launch that takes tensors alone, behind which these sizes are passed."""
        return lambda *tensors: self(grid, *tensors, *sizes)


def _on_device(device: int | None) -> AbstractContextManager[object]:
    is_current = device is None or device == torch.cuda.current_device()
    return nullcontext() if is_current else torch.cuda.device(device)


def counters(device: torch.device, count: int) -> Tensor:
    """Return zeros that kernels count with and leave as zeros: one tensor a stream, and a new one for a CUDA graph."""
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
    """Return how operands are multiplied: float32 as three products of tf32 halves, whatever torch allows its own.

    Each half has the 11 bits of tf32, so that both have all but two of float32's.
    """
    if dtype != torch.float32:
        return "tf32"  # of no effect on narrower operands
    return "tf32x3" if capability(device) >= TENSOR_CORES else "ieee"


def unit_stride(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy whose last axis is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return a query and a positive scale with the same scores: kernels take maxima before they scale."""
    if scale > 0.0:
        return query, scale
    return (-query, -scale) if scale else (torch.zeros_like(query), 1.0)
