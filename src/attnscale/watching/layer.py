"""Layer: everything seen of one attention of a model; MeasuredCall: one call of it."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.declared import Authority, Declared
from attnscale.errors import SettingError
from attnscale.measure.stats import ScoreStats
from attnscale.tracing.coordinates import Indices
from attnscale.tracing.following import ProjectionPath
from attnscale.tracing.parameters import Origins
from attnscale.tracing.roles import Softmax
from attnscale.watching.gradients import GradientLengths, norm_over
from attnscale.watching.saved_call import SavedCall

Factors = NDArray[np.float64]  # a value a head
COMPUTED = "its multiplier is computed from activations"
ROW_TO_ROW = 0.01  # relative: more than a multiplier of all rows is rounded by
SAME_SCALE = 0.02  # relative: half precision rounds a slope by less
NUMBER_AND_DEPTH = re.compile(r"(#\d+)?(\[\d+\])?$")
IN_EVERY_CALL = ("normalised", "detached")  # what a layer has only if all of its calls have it


@dataclass(frozen=True)
class Wiring:
    """Connections between the scores of an attention, its softmax and its values, where they can be wrong."""

    normalised: bool = False  # query and key both pass a normalisation after their projections
    biased: bool = False  # something other than a mask is added to the scores
    bias_is_scaled: bool = False  # ... and multiplied by the scale as well
    softcap_discarded: bool = False  # a tanh of the scores was computed and did not reach the softmax
    softcap_unbounded: bool = False  # the scores were multiplied by a tanh of themselves
    factor_after_softmax: float = 1.0  # a constant that multiplies the weights or the output instead of the scores
    mixes_along_softmax: bool = True  # the values are summed over the axis that the softmax normalises
    axis_of_keys: tuple[int, int, int] | None = None  # where another than that of the softmax, the two, and the rank
    unused_norms: tuple[str, ...] = ()  # norms of query or key, their gains, and scales that took no part
    misplaced_norms: tuple[str, ...] = ()  # norms of query and key that normalise something else


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
    def of_paths(cls, query: ProjectionPath, key: ProjectionPath) -> "Reading":
        """Read the paths of queries and keys from their projections."""
        sides = {"queries": query, "keys": key}
        return cls(
            _lost_on_the_way(sides),
            learned_factor=query.learned_factor or key.learned_factor,
            detached=tuple(name for name, path in sides.items() if path.detached),
            rescaled=tuple(name for name, path in sides.items() if path.normalised or path.learned_factor),
        )


def _lost_on_the_way(sides: Mapping[str, ProjectionPath]) -> str:
    """Return why factors on queries or keys may have been missed; empty where none was."""
    lost, mixed = ([name for name, path in sides.items() if getattr(path, why)] for why in ("lost", "shared_out"))
    if lost:
        return f"its {' and '.join(lost)} were not followed to a projection"
    if any(path.computed_factor for path in sides.values()):
        return COMPUTED
    return f"its {' and '.join(mixed)} are sums of several terms, by learned shares" if mixed else ""


def differs_by_row(multipliers: NDArray[np.float64]) -> str:
    """Return why multipliers, (heads, rows), are not one number a head; empty where they are."""
    if (multipliers == multipliers[:, :1]).all():
        return ""
    low, high = np.abs(multipliers).min(), np.abs(multipliers).max()
    apart = np.ptp(multipliers, axis=1) > ROW_TO_ROW * np.abs(multipliers).max(axis=1)
    return f"its multiplier differs from row to row, from {low:.3g} to {high:.3g}" if bool(apart.any()) else ""


Facts = TypeVar("Facts", Reading, Wiring)


def merged(calls: Sequence[Facts]) -> Facts:
    """Return what is known of a layer by all of its calls: of each field, the first value that is not the default."""
    found: dict[str, Any] = {}
    for each in fields(calls[0]):
        values = [getattr(call, each.name) for call in calls]
        known = [value for value in values if value != each.default]
        is_known = len(known) == len(values) if each.name in IN_EVERY_CALL else bool(known)
        found[each.name] = known[0] if is_known else each.default
    return type(calls[0])(**found)


class LayerCall(Protocol):
    """A call as it is noted while a model runs: a MeasuredCall, or what one can be made of later."""

    depth: int
    key_len: int
    softcap: float | None

    @property
    def heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def rescaled(self) -> tuple[str, ...]: ...

    @property
    def first_row(self) -> tuple[object, ...]: ...

    @property
    def seen(self) -> "MeasuredCall": ...


@dataclass(eq=False)
class MeasuredCall:
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
    wiring: Wiring = field(default_factory=Wiring)
    softmax: Softmax = field(default_factory=lambda: Softmax(axis=-1), repr=False)  # and what became of its weights

    @property
    def seen(self) -> "MeasuredCall":
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
    def wiring_of_all(self) -> Wiring:
        """Its wiring, and what became of its weights."""
        softmax = self.softmax
        along = softmax.renormalised or (softmax.mixes_along_axis and not self.over_pairs)
        axis = None if along else softmax.axis_of_keys
        return replace(
            self.wiring,
            factor_after_softmax=softmax.factor_after,
            mixes_along_softmax=along,
            axis_of_keys=None if axis is None else (softmax.axis, axis, softmax.rank),
        )

    @property
    def origins_of_all(self) -> Origins:
        """Origins of its queries and keys, and of the values that its weights mixed."""
        return replace(self.origins, value=self.origins.value or self.softmax.values)


@dataclass(frozen=True)
class Layer:
    """One attention of a watched model, over all its calls.

    Tensors have one value a query head; statistics, norms and gradients lie where the model ran.
    """

    name: str
    kind: str  # what computed it: "sdpa", "eager", "flex", "fast path", "flash"
    heads: int
    kv_heads: int
    head_dim: int
    model_dims: tuple[int, ...]  # widths a careless √d could have meant: of the projection's input, of all heads
    query_len: int  # of the longest call
    key_len: int
    causal: bool
    softcap: float | None
    stats: ScoreStats
    scales: Tensor  # the multiplier each head really applied
    query_norm: Tensor  # root mean square of ‖q‖, as it left its projection and any normalisation
    key_norm: Tensor
    declared: Declared  # what the model's own configuration says
    wiring: Wiring = field(default_factory=Wiring)
    reading: Reading = field(default_factory=Reading)
    softmaxes: tuple[Softmax, ...] = field(default=(), repr=False)  # a call each: what became of its weights
    calls: int = 1
    dtype: torch.dtype = torch.float32  # of queries and keys
    query: Tensor | None = field(default=None, repr=False)  # of the longest call, where they were to be kept
    key: Tensor | None = field(default=None, repr=False)
    kept: tuple[SavedCall, ...] = field(default=(), repr=False)  # its calls, where they were to be kept
    tokens: Tensor | None = field(default=None, repr=False)  # ids of its keys in the first sequence, where known
    origins: tuple[Origins, ...] = field(default=(), repr=False)  # a call: which parameters made queries, keys, values
    queries: int = 0  # of all calls, padding included
    left_out: tuple[Tensor, ...] = field(default=(), repr=False)  # a call, (batch, queries): which are padding
    highest_bias: float = 0.0  # the most that is added to a score, where anything but a mask is; never below 0
    cosine: Tensor | None = field(default=None, repr=False)  # of queries and keys, where the scores hold a bias too
    sinks: Tensor | None = field(default=None, repr=False)  # the highest score that stands beside the keys, of no key
    is_fallback: bool = False  # its module ran uncompiled under the tracer, where others had probes
    gradients: tuple[GradientLengths, ...] = field(default=(), repr=False)  # of its calls, where they were followed
    measured: tuple[ScoreStats, ...] = field(default=(), repr=False)  # a call each; together they are `stats`

    @property
    def module(self) -> str:
        """The path of its module: its name without the number of the attention in it, and without its depth."""
        return NUMBER_AND_DEPTH.sub("", self.name)

    @property
    def number(self) -> int:
        """Number of the attention within its module, from 1 on."""
        found = NUMBER_AND_DEPTH.search(self.name)
        return int(found[1][1:]) if found and found[1] else 1

    @property
    def scale_applied(self) -> float:
        """The slope of the softmax's input on q·k: over heads, the mean."""
        return float(self.scales.double().mean())

    @property
    def scale_expected(self) -> float:
        """The multiplier that the configuration, the module or theory asks for; `scale_source` says which."""
        said = self.declared.scale
        return float(self.head_dim**-0.5) if said is None or self.scale_source == "theory" else said

    @property
    def scale_source(self) -> str:
        """The source of `scale_expected`: `config`, `module`, or `theory`, which says 1/√d_k.

        A number that the module itself holds is not expected where it is the number that was applied: it may be wrong.
        """
        said, applied = self.declared, self.scale_applied
        if said.scale is None or said.scale_authority is Authority.CONFIGURED:
            return "theory" if said.scale is None else "config"
        is_applied = any(math.isclose(applied, each, rel_tol=SAME_SCALE) for each in said.scale_readings)
        return "theory" if is_applied or said.scale_authority is not Authority.NAMED else "module"

    def weights(self, head: int) -> Tensor:
        """Return the weights of a head over the first sequence of the longest call, (queries, keys).

        Where every query has keys of its own, they are those of the first query.
        """
        if not self.kept or not 0 <= head < self.heads:
            kept = f"one of {self.heads} heads" if self.kept else "a layer that was watched with keep=True"
            raise SettingError(f"Expected {kept} to show weights, got head {head} of {self.name!r}.")
        return max(self.kept, key=lambda call: call.query.shape[-2]).weights(head)

    @property
    def padding(self) -> int:
        """Queries that are left out of all numbers, since no query sees the key at their position.

        Of cross-attention that is not known: all of its queries count.
        """
        return sum(int(padding.sum()) for padding in self.left_out)

    @property
    def query_gradient(self) -> Tensor | None:
        """Length of the gradient that reached the queries so far; None where no backward pass did."""
        return norm_over(self.gradients, "query")

    @property
    def key_gradient(self) -> Tensor | None:
        """Length of the gradient that reached the keys so far."""
        return norm_over(self.gradients, "key")

    @property
    def alignment(self) -> Tensor:
        """Root mean square of the cosine between queries and keys: spread / (scale · ‖q‖ · ‖k‖), biases aside."""
        if self.cosine is not None:
            return self.cosine
        spread = (self.stats.variance + self.stats.mean.square()).sqrt()
        scales = self.scales.double().abs().to(spread.device)
        return (spread / (scales * self.query_norm * self.key_norm).clamp(min=1e-300)).clamp(max=1.0)
