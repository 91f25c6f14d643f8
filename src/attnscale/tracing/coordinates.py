"""Coordinate maps of operations that move elements, from the result back to an operand.

A map takes points of the result, an integer array (points, dimensions), to points of one operand; points outside the
operand become rows of −1.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Points = NDArray[np.int64]
Indices = NDArray[np.int64]
Map = Callable[[Points], Points]
Shape = tuple[int, ...]

NOWHERE = -1


def viewed(name: str, source: Shape, *args: Any, output: int | None = None, **kwargs: Any) -> tuple[Map, Map]:
    """Return the maps of a view to its source, and back.

    The view is replayed on a tensor without data, whose layout gives the position of each element. `output` is the
    index of the result, for an operation with several.
    """

    @cache
    def layouts() -> tuple[Tensor, Tensor]:
        dense = torch.empty(source, device="meta")
        result = getattr(torch.ops.aten, name)(dense, *args, **kwargs)
        return dense, result if output is None else result[output]

    def back(points: Points) -> Points:
        dense, result = layouts()
        return _same_memory(points, result, dense)

    def forth(points: Points) -> Points:
        dense, result = layouts()
        return _same_memory(points, dense, result)

    return back, forth


def _same_memory(points: Points, tensor: Tensor, other: Tensor) -> Points:
    """Return the points of `other` that share their memory with these points of `tensor`."""
    offset = int(tensor.storage_offset()) - int(other.storage_offset())
    rest: Indices = points @ np.array(tensor.stride(), dtype=np.int64) + offset
    found = np.zeros((len(points), other.dim()), dtype=np.int64)
    for axis in sorted(range(other.dim()), key=other.stride, reverse=True):
        if other.stride(axis) and other.shape[axis] > 1:
            found[:, axis] = np.clip(rest // other.stride(axis), 0, other.shape[axis] - 1)
            rest = rest - found[:, axis] * other.stride(axis)
    found[rest != 0] = NOWHERE
    return found


def broadcast(source: Shape, rank: int) -> Map:
    """Map a broadcast or expanded operand."""
    missing = rank - len(source)
    return lambda points: points[:, missing:] * np.array([size != 1 for size in source], dtype=np.int64)


def piece(axis: int, start: int, stop: int, is_stacked: bool) -> Map:
    """Map one operand of a concatenation, or of a stack."""

    def back(points: Points) -> Points:
        inside = (points[:, axis] >= start) & (points[:, axis] < stop)
        points = points.copy()
        points[:, axis] -= start
        points[~inside] = NOWHERE
        return np.delete(points, axis, axis=1) if is_stacked else points

    return back


def grid(*sizes: int) -> Points:
    """Return every point of a box, in order."""
    return np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), axis=1).astype(np.int64)
