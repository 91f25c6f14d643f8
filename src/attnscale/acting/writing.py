"""Rows of a parameter, multiplied in place: of a plain tensor, or of the shard of one that this rank holds."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.errors import InputError
from attnscale.numerics import wide_dtype
from attnscale.plain import printable
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
        return printable(f"{self.parameter}, rows {spans}: × {self.factor:.4g}")


def _spans(rows: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Neighbours as first and last."""
    start = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[at - 1] + 1:
            yield rows[start], rows[at - 1]
            start = at


@dataclass(frozen=True, eq=False)
class Change:
    """Rows of a parameter, as a rank computes with it, and what each is multiplied by; `shape` is that of this part."""

    shape: tuple[int, ...]
    across: tuple[int, ...]
    offset: float
    rows: Indices
    factors: NDArray[np.float64]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for changes that are equal to the last bit."""
        return (self.shape, self.across, self.offset, self.rows.tobytes(), self.factors.tobytes())

    def with_rows_of(self, other: "Change") -> "Change":
        """And the rows of another that are not among its own, where both say the same of the parameter."""
        if (self.shape, self.across, self.offset) != (other.shape, other.across, other.offset):
            return self
        more = ~np.isin(other.rows, self.rows)
        rows = np.concatenate([self.rows, other.rows[more]])
        order = np.argsort(rows)
        factors = np.concatenate([self.factors, other.factors[more]])
        return Change(self.shape, self.across, self.offset, rows[order], factors[order])

    def apply_(self, parameter: Tensor) -> None:
        """Make it."""
        held = held_as(parameter, self.shape)
        if held is not None:
            whole, start = held
            multiply_rows_(whole, self.across, self.rows, self.factors, self.offset, self.shape, start)


def multiply_rows_(
    parameter: Tensor,
    across: tuple[int, ...],
    rows: Indices,
    factors: NDArray[np.float64],
    offset: float = 0.0,
    shape: tuple[int, ...] | None = None,
    begins: tuple[int, ...] | None = None,
) -> None:
    """Multiply rows, which run along the axes `across`, in place and rounded once; `offset` counts with the values.

    Rows are counted in a part of this `shape`, which `begins` at these indices; in all of the parameter where None.

    >>> weight = torch.nn.Parameter(torch.ones(2, 3))
    >>> multiply_rows_(weight, (0,), np.array([1]), np.array([0.5]))
    >>> weight.tolist()
    [[1.0, 0.5, 1.0], [1.0, 0.5, 1.0]]
    """
    kept = [axis for axis in range(parameter.dim()) if axis not in across]
    shape = tuple(parameter.shape) if shape is None else shape
    at = np.stack(np.unravel_index(rows, [shape[axis] for axis in kept])) if kept else np.zeros((0, 1))
    if kept and begins is not None:
        at = at + np.array([[begins[axis]] for axis in kept], dtype=np.int64)
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


def rows_held(parameter: Tensor, shape: tuple[int, ...], across: tuple[int, ...]) -> tuple[Tensor, Indices] | None:
    """What this rank holds of a parameter that was watched with this shape, and the number of each row in that.

    −1 for rows of another part; the numbers have the shape of what is held, and 1 for the axes that rows run along.
    """
    found = held_as(parameter, shape)
    if found is None:
        return None
    whole, begins = found
    local, start = _held(whole)
    numbers = np.zeros((1,) * local.dim(), dtype=np.int64)
    outside = np.zeros_like(numbers, dtype=bool)
    for axis in (axis for axis in range(local.dim()) if axis not in across):
        at = np.arange(local.shape[axis]) + start[axis] - begins[axis]
        at = at.reshape([-1 if each == axis else 1 for each in range(local.dim())])
        numbers, outside = numbers * shape[axis] + at, outside | (at < 0) | (at >= shape[axis])
    return local, np.where(outside, -1, numbers)


def _held(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The part of a parameter that this rank holds, and where in the whole it begins."""
    if not is_sharded(parameter):
        return parameter.detach(), (0,) * parameter.dim()
    found = shard_offset(parameter.shape, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    if found is None:
        raise InputError(f"torch {torch.__version__} does not tell which part of a sharded parameter a rank holds.")
    _, start = found
    return parameter.to_local().detach(), tuple(start)  # type: ignore[attr-defined]


def held_as(parameter: Tensor | None, shape: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]] | None:
    """The parameter, or this rank's part of it, whichever was watched with this shape, and where in it that begins.

    Where heads are shared out and each part is sharded again (FSDP2 and tensor parallel), the last axis of the mesh
    cuts heads, as torch lays them out.
    """
    nowhere = (0,) * len(shape)
    if parameter is None or tuple(parameter.shape) == shape:
        return None if parameter is None else (parameter, nowhere)
    local = local_part(parameter)
    if local is None:
        return None
    mesh, placement = parameter.device_mesh, parameter.placements[-1]  # type: ignore[attr-defined]
    if mesh.ndim == 1:
        return (local, nowhere) if tuple(local.shape) == shape else None
    if placement.is_replicate():
        return None
    size, axis = -(-parameter.shape[placement.dim] // mesh.size(mesh.ndim - 1)), placement.dim
    first = mesh.get_coordinate()[-1] * size
    cut = [*parameter.shape]
    cut[axis] = max(0, min(size, cut[axis] - first))
    return (parameter, (*nowhere[:axis], first, *nowhere[axis + 1 :])) if tuple(cut) == shape else None


def is_sharded(parameter: Tensor) -> bool:
    """Whether a parameter is spread over ranks, as FSDP2's are."""
    return hasattr(parameter, "device_mesh") and hasattr(parameter, "placements")
