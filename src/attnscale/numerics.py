"""What every room needs of floating point."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Given = ParamSpec("Given")
Result = TypeVar("Result")
HALF_DTYPES = (torch.float16, torch.bfloat16)
WIDE_DTYPES = (torch.float32, torch.float64)
KERNEL_DTYPES = (*HALF_DTYPES, torch.float32)  # what kernels of a GPU are written for


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Autocast off for the tensor's device, where it is on; a meta tensor's has none to turn off."""
    kind = tensor.device.type
    is_on = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if is_on else nullcontext()


def uncompiled(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function, uncompiled where torch.compile traces: what depends on lengths of sequences makes no graph."""
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The tensor's dtype, or float32 where that is wider."""
    dtype = tensor.dtype
    return dtype if dtype in WIDE_DTYPES else torch.promote_types(dtype, torch.float32)


def is_surely_finite(values: Tensor) -> bool:
    """Whether none is NaN or infinite, as far as a sum tells on a CPU, for a fifteenth of the time; of a GPU, unknown.

    >>> is_surely_finite(torch.ones(3)), is_surely_finite(torch.tensor([torch.inf, -torch.inf]))
    (True, False)
    """
    return values.device.type == "cpu" and values.is_floating_point() and math.isfinite(float(values.detach().sum()))


def has_nan_of_its_own(output: Tensor, value: Tensor) -> Tensor:
    """Whether any of the output is NaN and none of the value, on their device."""
    if is_surely_finite(output):
        return torch.tensor(False)
    return output.isnan().any() & ~value.isnan().any()


def lengths(vectors: Tensor) -> Tensor:
    """‖x‖ over the last axis, in float32 at least; on a CPU, in float64 where its square is past float32."""
    found: Tensor = torch.linalg.vector_norm(vectors, dim=-1, dtype=wide_dtype(vectors))
    if found.device.type == "cpu" and not is_surely_finite(found) and bool(found.isinf().any()):
        found = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64)
    return found


def constant_on(device: torch.device, array: NDArray[Any]) -> Tensor:
    """Return an array as a tensor on a device, copied there once: a training run asks for the same ones at every step.

    Nothing may be written to it.
    """
    return _constant_on(device, array.dtype.str, array.shape, array.tobytes())


@lru_cache(maxsize=512)
def _constant_on(device: torch.device, dtype: str, shape: tuple[int, ...], data: bytes) -> Tensor:
    with torch.inference_mode(False):  # it may be used outside it
        return torch.from_numpy(np.frombuffer(data, dtype).reshape(shape).copy()).to(device)
