"""Rows of a parameter, multiplied in place: of a plain tensor, or of the shard of one that this rank holds."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.errors import InputError
from attnscale.numerics import wide_dtype
from attnscale.torch_internals import local_part, shard_offset

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Touched:
    """Rows of a parameter that were multiplied by one factor; they run along the axes `across`, counted over the rest.

    `factor` multiplies the values with `offset` added: a gain that is kept as 1 + weight has an offset of 1.
    """

    parameter: str
    rows: tuple[int, ...]
    factor: float
    across: tuple[int, ...] = ()
    offset: float = 0.0

    def __str__(self) -> str:
        spans = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in _spans(self.rows))
        return f"{self.parameter}, rows {spans}: × {self.factor:.4g}"


def _spans(rows: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Neighbours as first and last."""
    start = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[at - 1] + 1:
            yield rows[start], rows[at - 1]
            start = at


def multiply_rows_(
    parameter: Tensor, across: tuple[int, ...], rows: Indices, factors: NDArray[np.float64], offset: float = 0.0
) -> None:
    """Multiply rows, which run along the axes `across`, in place and rounded once; `offset` counts with the values.

    >>> weight = torch.nn.Parameter(torch.ones(2, 3))
    >>> multiply_rows_(weight, (0,), np.array([1]), np.array([0.5]))
    >>> weight.tolist()
    [[1.0, 0.5, 1.0], [1.0, 0.5, 1.0]]
    """
    kept = [axis for axis in range(parameter.dim()) if axis not in across]
    at = np.stack(np.unravel_index(rows, [parameter.shape[axis] for axis in kept])) if kept else np.zeros((0, 1))
    with torch.no_grad():
        local, start = _held(parameter)
        at = at - np.array([[start[axis]] for axis in kept], dtype=np.int64).reshape(len(kept), 1)
        sizes = np.array([local.shape[axis] for axis in kept]).reshape(len(kept), 1)
        held = ((at >= 0) & (at < sizes)).all(0)
        if not held.any() or not local.numel():
            return
        by_row = local.permute(*kept, *across)
        index = tuple(torch.from_numpy(np.ascontiguousarray(each[held])).to(local.device) for each in at)
        values = by_row[index] if index else by_row[None]
        wide = values.to(wide_dtype(local))
        factor = torch.from_numpy(factors[held]).to(wide).reshape(-1, *(1 for _ in across))
        changed = ((wide + offset) * factor - offset).to(local.dtype)
        if index:
            by_row[index] = changed
        else:
            by_row.copy_(changed[0])


def _held(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The part of a parameter that this rank holds, and where in the whole it begins."""
    if not is_sharded(parameter):
        return parameter.detach(), (0,) * parameter.dim()
    found = shard_offset(parameter.shape, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    if found is None:
        raise InputError(f"torch {torch.__version__} does not tell which part of a sharded parameter a rank holds.")
    _, start = found
    return parameter.to_local().detach(), tuple(start)  # type: ignore[attr-defined]


def held_as(parameter: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """The parameter, or the part of it that this rank computes with, whichever was watched with this shape."""
    if parameter is None or tuple(parameter.shape) == shape:
        return parameter
    local = local_part(parameter)
    return local if local is not None and tuple(local.shape) == shape else None


def is_sharded(parameter: Tensor) -> bool:
    """Whether a parameter is spread over ranks, as FSDP2's are."""
    return hasattr(parameter, "device_mesh") and hasattr(parameter, "placements")
