"""SeenCall: one attention call as it was seen; the calls of one place become a Layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.measure.stats import ScoreStats
from attnscale.tracing.coordinates import Indices
from attnscale.tracing.following import ProjectionPath
from attnscale.tracing.parameters import Origins
from attnscale.tracing.roles import Softmax
from attnscale.watching.gradients import GradientLengths
from attnscale.watching.saved_call import SavedCall

Factors = NDArray[np.float64]  # a value a head
COMPUTED = "its multiplier is computed from activations"
ROW_TO_ROW = 0.01  # relative: more than a multiplier of all rows is rounded by


@dataclass(frozen=True)
class Reading:
    """Findings on the way from the projections to the softmax, beside the multiplier itself."""

    unread: str = ""  # why the multiplier cannot be judged; empty: it can
    learned_terms: int = 0  # added to q·k: products with positions, distances of points, biases made of activations
    learned_factor: bool = False  # the multiplier holds a parameter of the model
    detached: tuple[str, ...] = ()  # "queries", "keys": through which no gradient goes back
    dropped: bool = False  # scores were set to zero at random
    inert_fill: float | None = None  # what a mask puts in the place of scores, where it does not hide them
    capped_mask: float | None = None  # what hidden scores become, where a soft-cap follows the mask
    inert_added: float | None = None  # what a mask of zeros and ones adds to scores, where it was to hide them
    scale_after_cap: float | None = None  # a multiplier that stands behind the soft-cap, and makes it that much lower
    rescaled: tuple[str, ...] = ()  # "queries", "keys": normalised, or given a temperature, after their projection

    @classmethod
    def of_calls(cls, readings: Sequence["Reading"]) -> "Reading":
        """Merge those of all calls of one layer."""
        caps = (reading.scale_after_cap for reading in readings if reading.scale_after_cap is not None)
        return cls(
            next((reading.unread for reading in readings if reading.unread), ""),
            max(reading.learned_terms for reading in readings),
            any(reading.learned_factor for reading in readings),
            tuple(name for name in ("queries", "keys") if all(name in reading.detached for reading in readings)),
            any(reading.dropped for reading in readings),
            next((reading.inert_fill for reading in readings if reading.inert_fill is not None), None),
            next((reading.capped_mask for reading in readings if reading.capped_mask is not None), None),
            next((reading.inert_added for reading in readings if reading.inert_added is not None), None),
            next(caps, None),
            tuple(name for name in ("queries", "keys") if any(name in reading.rescaled for reading in readings)),
        )


def lost_on_the_way(query: ProjectionPath, key: ProjectionPath) -> str:
    """Return why factors on queries or keys may have been missed; empty where none was."""
    sides = (("queries", query), ("keys", key))
    lost, mixed = ([name for name, path in sides if getattr(path, why)] for why in ("lost", "shared_out"))
    if lost:
        return f"its {' and '.join(lost)} were not followed to a projection"
    if query.computed_factor or key.computed_factor:
        return COMPUTED
    return f"its {' and '.join(mixed)} are sums of several terms, by learned shares" if mixed else ""


def differs_by_row(multipliers: NDArray[np.float64]) -> str:
    """Return why multipliers, (heads, rows), are not one number a head; empty where they are."""
    if (multipliers == multipliers[:, :1]).all():
        return ""
    low, high = np.abs(multipliers).min(), np.abs(multipliers).max()
    apart = np.ptp(multipliers, axis=1) > ROW_TO_ROW * np.abs(multipliers).max(axis=1)
    return f"its multiplier differs from row to row, from {low:.3g} to {high:.3g}" if bool(apart.any()) else ""


def detached_sides(query: ProjectionPath, key: ProjectionPath) -> tuple[str, ...]:
    """Return which of queries and keys were detached from what made them."""
    return tuple(name for name, path in (("queries", query), ("keys", key)) if path.detached)


def rescaled_sides(query: ProjectionPath, key: ProjectionPath) -> tuple[str, ...]:
    """Return which of queries and keys pass a norm or a learned factor after their projection."""
    sides = (("queries", query), ("keys", key))
    return tuple(name for name, path in sides if path.normalised or path.learned_factor)


def scale_after_cap(factors: Sequence[float]) -> float | None:
    """Return what multiplies a soft-cap itself, of the factors that follow its tanh, the last first."""
    return None if len(factors) < 2 else float(np.prod(factors[:-1]))


class NotedCall(Protocol):
    """A call as it is noted while a model runs: a SeenCall, or what one can be made of later."""

    depth: int
    key_len: int
    softcap: float | None

    @property
    def heads(self) -> int:
        """Query heads."""

    @property
    def head_dim(self) -> int:
        """Features of a head."""

    @property
    def rescaled(self) -> tuple[str, ...]:
        """Sides that are normalised, or given a temperature, after their projection."""

    @property
    def first_row(self) -> tuple[object, ...]:
        """Row of a parameter that makes the query of the first head; empty where that is unknown."""

    @property
    def seen(self) -> "SeenCall":
        """All that is known of it."""


@dataclass(eq=False)
class SeenCall:
    """One attention call: the fields of Layer, before calls are merged."""

    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    model_dims: tuple[int, ...]
    query_len: int
    key_len: int
    causal: bool
    softcap: float | None
    dtype: torch.dtype
    stats: ScoreStats
    scales: Tensor
    query_norm: Tensor
    key_norm: Tensor
    batch: int = 1
    attends_itself: bool = False  # queries and keys are of the same positions
    padding: Tensor | None = field(default=None, repr=False)  # (batch, query_len): queries that are left out
    normalised: bool = False
    biased: bool = False
    bias_is_scaled: bool = False
    softcap_discarded: bool = False
    softcap_unbounded: bool = False
    over_pairs: bool = False  # its softmax runs over queries and keys at once
    kept: SavedCall | None = field(default=None, repr=False)  # all of it
    gradients: GradientLengths | None = field(default=None, repr=False)
    origins: Origins = field(default_factory=Origins, repr=False)
    highest_bias: float = 0.0
    sinks: Tensor | None = field(default=None, repr=False)
    cosine: Tensor | None = field(default=None, repr=False)  # of queries and keys, where the scores hold a bias too
    factors: tuple[Factors, Factors] | None = field(default=None, repr=False)  # constants on queries and keys since
    key_owners: Indices | None = field(default=None, repr=False)  # which key each head has; None: as kernels share
    first_row: tuple[object, ...] = field(default=(), repr=False)  # of a parameter: what makes its first head's query
    depth: int = 0  # runs of its module before this one, in the same forward
    reading: Reading = field(default_factory=Reading)
    softmax: Softmax = field(default_factory=lambda: Softmax(axis=-1), repr=False)  # and what became of its weights

    @property
    def seen(self) -> "SeenCall":
        """The call itself; one that a probe measured is made only when it is asked for."""
        return self

    @property
    def rescaled(self) -> tuple[str, ...]:
        """Sides that are normalised, or given a temperature, after their projection."""
        return self.reading.rescaled

    @property
    def rows(self) -> int:
        """Rows of every head, including padding."""
        return self.batch * self.query_len

    @property
    def mixes_along_softmax(self) -> bool:
        """True if values are summed over the axis along which weights sum to one."""
        return self.softmax.renormalised or (self.softmax.mixes_along_axis and not self.over_pairs)

    @property
    def origins_of_all(self) -> Origins:
        """Origins of its queries and keys, and of the values that its weights mixed."""
        return replace(self.origins, value=self.origins.value or self.softmax.values)
