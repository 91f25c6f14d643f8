"""Rows of parameters that are whole on ranks with heads of their own: what each rank finds of them, put together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscale.acting.replicas import Axis
from attnscale.acting.uses import Floats

FLAG = ("", ())  # by which ranks tell each other something that belongs to no row


@dataclass(frozen=True)
class Block:
    """A parameter, as this rank computes with it, whose rows are known by numbers from `first` on."""

    name: str
    shape: tuple[int, ...]
    across: tuple[int, ...]
    offset: float
    first: int


@dataclass(frozen=True)
class Common:
    """The axes along which heads are shared out, and the rows that this rank knows of."""

    axes: Sequence[Axis]
    blocks: Sequence[Block]
    rows: int

    def least(self, *values: Floats, flag: float = 0.0) -> tuple[list[Floats], float]:
        """The least of each number of a row over all ranks that have it, ∞ where one knows none; and of the flags."""
        found = np.stack(values)
        for axis in self.axes:
            told: list[dict[Any, tuple[NDArray[np.int64], Floats]]] = axis.gathered(self._said(axis, found, flag))
            flag = min(float(each[FLAG][1].min()) for each in told)
            for block, last in self._spans():
                for rows, numbers in (each[key] for each in told if (key := (block.name, block.across)) in each):
                    held = rows < last - block.first
                    at = block.first + rows[held]
                    found[:, at] = np.minimum(found[:, at], numbers[:, held])
        return list(found), flag

    def _said(self, axis: Axis, found: Floats, flag: float) -> dict[Any, tuple[NDArray[np.int64], Floats]]:
        said: dict[Any, tuple[NDArray[np.int64], Floats]] = {FLAG: (np.zeros(1, dtype=np.int64), np.array([flag]))}
        for block, last in self._spans():
            rows = np.flatnonzero(np.isfinite(found[:, block.first : last]).any(0))
            if block.name not in axis.cut and len(rows):
                said[block.name, block.across] = (rows, found[:, block.first + rows])
        return said

    def _spans(self) -> list[tuple[Block, int]]:
        bounds = [block.first for block in self.blocks] + [self.rows]
        return list(zip(self.blocks, bounds[1:], strict=True))
