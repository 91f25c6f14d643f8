"""SeenCall: one attention call as it was seen; the calls of one place become a Layer."""

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.measure.stats import ScoreStats
from attnscale.tracing.coordinates import Indices
from attnscale.tracing.parameters import Origins
from attnscale.tracing.roles import Softmax
from attnscale.watching.gradients import GradientLengths
from attnscale.watching.kept import Kept
from attnscale.watching.reading import Reading
from attnscale.watching.shards import Shard

Factors = NDArray[np.float64]  # a value a head


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
    def seen(self) -> "SeenCall":
        """All that is known of it."""

    def settle(self) -> None:
        """Wait for no further backward pass."""


@dataclass(eq=False)
class SeenCall:
    """What one call did; the fields of Layer, before calls are merged."""

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
    over_pairs: bool = False  # its softmax runs over queries and keys at once
    query: Tensor | None = field(default=None, repr=False)
    key: Tensor | None = field(default=None, repr=False)
    kept: Kept | None = field(default=None, repr=False)  # all of it
    gradients: GradientLengths | None = field(default=None, repr=False)
    origins: Origins = field(default_factory=Origins, repr=False)
    highest_bias: float = 0.0
    sinks: Tensor | None = field(default=None, repr=False)
    cosine: Tensor | None = field(default=None, repr=False)  # of queries and keys, where the scores hold a bias too
    shard: Shard | None = field(default=None, repr=False)
    factors: tuple[Factors, Factors] | None = field(default=None, repr=False)  # constants on queries and keys since
    key_owners: Indices | None = field(default=None, repr=False)  # which key each head has; None: as kernels share
    depth: int = 0  # runs of its module before this one, in the same forward
    reading: Reading = field(default_factory=Reading)
    softmax: Softmax = field(default_factory=lambda: Softmax(axis=-1), repr=False)  # and what became of its weights

    @property
    def seen(self) -> "SeenCall":
        """The call itself; one that a probe measured is made only when it is asked for."""
        return self

    def settle(self) -> None:
        """Wait for no further backward pass."""
        if self.gradients is not None:
            self.gradients.settle()

    @property
    def rescaled(self) -> tuple[str, ...]:
        """Sides that are normalised, or given a temperature, after their projection."""
        return self.reading.rescaled

    @property
    def rows(self) -> int:
        """Of every head, those of padding included."""
        return self.batch * self.query_len

    @property
    def mixes_along_softmax(self) -> bool:
        """Whether values are summed over the axis that sums to one, or over one along which they were made to."""
        return self.softmax.renormalised or (self.softmax.mixes_along_axis and not self.over_pairs)

    @property
    def origins_of_all(self) -> Origins:
        """Of its queries and keys, and of the values that its weights went on to mix."""
        return replace(self.origins, value=self.origins.value or self.softmax.values)
