"""Who makes what: which rows of parameters take part in which features of which heads, and what share each takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Uses:
    """Row `row[i]` takes part in feature `feature[i]` of head `head[i]`."""

    row: Indices
    head: Indices
    feature: Indices

    @staticmethod
    def joined(parts: "Sequence[Uses]") -> "Uses":
        """All uses of several parts."""
        none = np.zeros(0, dtype=np.int64)
        names = ("row", "head", "feature")
        return Uses(*(np.concatenate([none, *(getattr(part, name) for part in parts)]) for name in names))


def extremes(values: Floats, at: Indices, size: int) -> tuple[Floats, Floats]:
    """The lowest and the highest of the values at each of `size` places; ∞ and −∞ where there is none."""
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(low, at, values)
    np.maximum.at(high, at, values)
    return low, high


def groups(numbers: Indices) -> Iterator[Indices]:
    """Where each number that is met more than once is met."""
    order = np.argsort(numbers, kind="stable")
    bounds = np.flatnonzero(np.diff(numbers[order], prepend=-1, append=-1))
    for group in np.flatnonzero(np.diff(bounds) > 1):
        yield order[bounds[group] : bounds[group + 1]]


@dataclass(frozen=True, eq=False)
class Shares:
    """Heads of one family take one factor; row `i` is multiplied by that of `head[i]` to the power of `exponent[i]`."""

    families: Floats  # of every head
    broken: NDArray[np.bool_]  # heads that cannot be multiplied, since what makes their queries makes more
    fixed: NDArray[np.bool_]  # those, and heads whose parameters are not known
    head: Indices  # −1: a row that nobody multiplies
    exponent: Floats

    def by_row(self, factors: Floats) -> Floats:
        """What each row is multiplied by."""
        return np.where(self.head < 0, 1.0, factors[self.head] ** self.exponent)
