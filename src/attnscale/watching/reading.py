"""Reading: how surely the multiplier of an attention was read, and what else was done on the way to its softmax."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnscale.tracing.following import Way

ROW_TO_ROW = 0.01  # relative: more than a multiplier of all rows is rounded by


@dataclass(frozen=True)
class Reading:
    """What is known of the way from the projections to the softmax, beside the multiplier itself."""

    unread: str = ""  # why the multiplier cannot be judged; empty: it can
    learned_terms: int = 0  # added to q·k: products with positions, distances of points, biases made of activations
    learned_factor: bool = False  # the multiplier holds a parameter of the model
    detached: tuple[str, ...] = ()  # "queries", "keys": through which no gradient goes back
    dropped: bool = False  # scores were set to zero at random
    inert_fill: float | None = None  # what a mask puts in the place of scores, where it does not hide them
    inert_added: float | None = None  # what a mask of zeros and ones adds to scores, where it was to hide them
    scale_after_cap: float | None = None  # a multiplier that stands behind the soft-cap, and makes it that much lower
    rescaled: tuple[str, ...] = ()  # "queries", "keys": normalised, or given a temperature, after their projection

    @classmethod
    def of_calls(cls, readings: Sequence["Reading"]) -> "Reading":
        """Of all calls of one layer."""
        caps = (reading.scale_after_cap for reading in readings if reading.scale_after_cap is not None)
        return cls(
            next((reading.unread for reading in readings if reading.unread), ""),
            max(reading.learned_terms for reading in readings),
            any(reading.learned_factor for reading in readings),
            tuple(name for name in ("queries", "keys") if all(name in reading.detached for reading in readings)),
            any(reading.dropped for reading in readings),
            next((reading.inert_fill for reading in readings if reading.inert_fill is not None), None),
            next((reading.inert_added for reading in readings if reading.inert_added is not None), None),
            next(caps, None),
            tuple(name for name in ("queries", "keys") if any(name in reading.rescaled for reading in readings)),
        )


def lost_on_the_way(query: Way, key: Way) -> str:
    """Why factors on queries or keys may have been missed."""
    sides = (("queries", query), ("keys", key))
    lost, mixed = ([name for name, way in sides if getattr(way, why)] for why in ("lost", "shared_out"))
    if lost:
        return f"its {' and '.join(lost)} were not followed to a projection"
    return f"its {' and '.join(mixed)} are sums of several terms, by learned shares" if mixed else ""


def differs_by_row(multipliers: NDArray[np.float64]) -> str:
    """Whether one number multiplies every row of a head, (heads, rows)."""
    if (multipliers == multipliers[:, :1]).all():
        return ""
    low, high = np.abs(multipliers).min(), np.abs(multipliers).max()
    apart = np.ptp(multipliers, axis=1) > ROW_TO_ROW * np.abs(multipliers).max(axis=1)
    return f"its multiplier differs from row to row, from {low:.3g} to {high:.3g}" if bool(apart.any()) else ""


def detached_sides(query: Way, key: Way) -> tuple[str, ...]:
    """Of queries and keys, those that were detached from what made them."""
    return tuple(name for name, way in (("queries", query), ("keys", key)) if way.detached)


def rescaled_sides(query: Way, key: Way) -> tuple[str, ...]:
    """Name those of queries and keys that pass a norm or a learned factor after their projection."""
    sides = (("queries", query), ("keys", key))
    return tuple(name for name, way in sides if way.normalised or way.learned_factor)


def scale_after_cap(factors: Sequence[float]) -> float | None:
    """Of the factors that follow a tanh, the last first: what multiplies the cap itself."""
    return None if len(factors) < 2 else float(np.prod(factors[:-1]))
