"""Coordinate maps of operations that move elements, from the result back to an operand.

A map takes points of the result, an integer array (points, dimensions), to points of one operand; points outside the
operand become rows of −1.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.int64]
Indices = NDArray[np.int64]
Map = Callable[[Points], Points]
Shape = tuple[int, ...]

NOWHERE = -1


def unmoved(points: Points) -> Points:
    """Map an operation that moves no elements."""
    return points


def reshaped(source: Shape, result: Shape) -> Map:
    """Map a view, a flatten or an unsqueeze, in which elements keep their order."""
    sizes = np.maximum(np.array(source, dtype=np.int64), 1)
    source_steps, result_steps = _steps(source), _steps(result)

    def back(points: Points) -> Points:
        flat = points @ result_steps
        return (flat[:, None] // source_steps) % sizes

    return back


def permuted(order: Sequence[int]) -> Map:
    """Map a permutation: dimension `order[k]` of the operand becomes dimension k."""
    inverse = np.argsort(np.array([axis % len(order) for axis in order], dtype=np.int64))
    return lambda points: points[:, inverse]


def transposed(rank: int, first: int, second: int) -> Map:
    """Map a transposition of two dimensions."""
    order = list(range(rank))
    if rank:
        order[first], order[second] = order[second], order[first]
    return permuted(order)


def broadcast(source: Shape, rank: int) -> Map:
    """Map a broadcast or expanded operand."""
    missing = rank - len(source)
    return lambda points: points[:, missing:] * np.array([size != 1 for size in source], dtype=np.int64)


def sliced(axis: int, start: int, step: int = 1) -> Map:
    """Map a slice: every `step`-th element from `start` on."""
    return _along(axis, lambda at: start + step * at)


def chosen(axis: int, index: Indices) -> Map:
    """Map a selection by indices: element i of the result is element `index[i]` of the operand."""
    return _along(axis, lambda at: index[at])


def _along(axis: int, source_of: Callable[[Indices], Indices]) -> Map:
    def back(points: Points) -> Points:
        points = points.copy()
        points[:, axis] = source_of(points[:, axis])
        return points

    return back


def into_slice(axis: int, start: int, step: int, size: int) -> Map:
    """Map points of the whole tensor to points of a slice: the inverse of `sliced`."""

    def forth(points: Points) -> Points:
        points = points.copy()
        along, off = np.divmod(points[:, axis] - start, step)
        points[:, axis] = along
        points[(off != 0) | (along < 0) | (along >= size)] = NOWHERE
        return points

    return forth


def selected(axis: int, index: int) -> Map:
    """Map a selection of one index, which removes the dimension."""
    return lambda points: np.insert(points, axis, index, axis=1)


def reduced(source: Shape, axes: Sequence[int], keepdim: bool) -> Map:
    """Map a reduction over some dimensions to the first of the reduced elements."""
    gone = sorted(axis % len(source) for axis in axes) if source else []

    def back(points: Points) -> Points:
        for axis in gone:
            points = points if keepdim else np.insert(points, axis, 0, axis=1)
        return points * np.array([axis not in gone for axis in range(len(source))], dtype=np.int64)

    return back


def piece(axis: int, start: int, stop: int) -> Map:
    """Map one operand of a concatenation."""

    def back(points: Points) -> Points:
        inside = (points[:, axis] >= start) & (points[:, axis] < stop)
        points = points.copy()
        points[:, axis] -= start
        points[~inside] = NOWHERE
        return points

    return back


def stacked(axis: int, index: int) -> Map:
    """Map one operand of a stack."""

    def back(points: Points) -> Points:
        inside = points[:, axis] == index
        points = np.delete(points, axis, axis=1)
        points[~inside] = NOWHERE
        return points

    return back


def padded(source: Shape, before: Sequence[int]) -> Map:
    """Map a padded tensor, with `before` border elements at the start of each dimension."""

    def back(points: Points) -> Points:
        points = points - np.array(before, dtype=np.int64)
        points[((points < 0) | (points >= np.array(source))).any(1)] = NOWHERE
        return points

    return back


def repeated(source: Shape, rank: int) -> Map:
    """Map a tensor repeated as whole copies."""
    missing = rank - len(source)
    sizes = np.maximum(np.array(source, dtype=np.int64), 1)
    return lambda points: points[:, missing:] % sizes


def unfolded(axis: int, step: int) -> Map:
    """Map windows along a dimension, stored in a new last dimension."""

    def back(points: Points) -> Points:
        points, within = points[:, :-1].copy(), points[:, -1]
        points[:, axis] = points[:, axis] * step + within
        return points

    return back


def grid(*sizes: int) -> Points:
    """Return every point of a box, in order."""
    return np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), axis=1).astype(np.int64)


def _steps(shape: Shape) -> NDArray[np.int64]:
    return np.array([math.prod(shape[axis + 1 :]) for axis in range(len(shape))], dtype=np.int64)
