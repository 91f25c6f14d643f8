"""Launches that cost the host little: a kernel that was compiled for a kind of call is not looked up again."""
# mypy: disable-error-code="import-untyped"

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnscale.measure.cuda.triton.tiles import TENSOR_CORES

COMPILED: dict[Hashable, Any] = {}  # by the kernel and all that its compilation depends on
ALIGNMENT = 16  # bytes: triton compiles apart what is aligned to them


def kind_of(*tensors: Tensor) -> tuple[Hashable, ...]:
    """All that a kernel's compilation depends on of these tensors: their layout, type and place."""
    return tuple((x.shape, x.stride(), x.dtype, x.device.index, x.data_ptr() % ALIGNMENT) for x in tensors)


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
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)
        return
    compiled = kernel[grid](*arguments, *constants, num_warps=cut[0], num_stages=cut[1])
    if kind is not None and compiled is not None:  # triton's interpreter compiles nothing
        COMPILED[kernel, kind] = compiled


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
    if tensor.dtype != torch.float32:
        return "tf32"  # of no effect on narrower operands
    return "tf32x3" if capability(tensor.device.index) >= TENSOR_CORES else "ieee"
