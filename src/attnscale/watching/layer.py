"""Layer: all measurements of one attention of a model; MeasuredCall: those of one call."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.declared import Authority, Declared
from attnscale.errors import SettingError
from attnscale.measure.stats import ScoreStats
from attnscale.numerics import wide_dtype
from attnscale.tracing.coordinates import Indices
from attnscale.tracing.parameters import Origins
from attnscale.tracing.roles import Softmax
from attnscale.visibility import EVERYTHING, Visibility
from attnscale.watching.gradients import GradientLengths, norm_over

ROUNDING = 1e-5  # relative to the largest score; a larger remainder is a bias
Factors = NDArray[np.float64]  # one value per head
SAME_SCALE = 0.02  # relative; half precision rounds a slope by less
NUMBER_AND_DEPTH = re.compile(r"(#\d+)?(\[\d+\])?$")
IN_EVERY_CALL = ("normalised", "detached")  # a layer has these properties only if all of its calls have them


@dataclass(frozen=True)
class Wiring:
    """Connections between scores, softmax and values that a model may have wrong."""

    normalised: bool = False  # query and key both pass a normalisation after their projections
    biased: bool = False  # something other than a mask is added to the scores
    bias_is_scaled: bool = False  # that bias is multiplied by the scale as well
    softcap_discarded: bool = False  # a tanh of the scores was computed and did not reach the softmax
    softcap_unbounded: bool = False  # the scores were multiplied by a tanh of themselves
    factor_after_softmax: float = 1.0  # a constant that multiplies the weights or the output instead of the scores
    mixes_along_softmax: bool = True  # the values are summed over the axis that the softmax normalises
    axis_of_keys: tuple[int, int, int] | None = None  # (softmax axis, axis of the keys, rank) if they differ
    unused_norms: tuple[str, ...] = ()  # unused norms of query or key, unused gains and scales
    misplaced_norms: tuple[str, ...] = ()  # norms of query and key that normalise something else


@dataclass(frozen=True)
class Reading:
    """Facts about the operations between projections and softmax, apart from the multiplier."""

    unread: str = ""  # why the multiplier cannot be judged; empty if it can
    learned_terms: int = 0  # terms added to q·k: products with positions, distances, biases computed from activations
    learned_factor: bool = False  # the multiplier contains a parameter of the model
    detached: tuple[str, ...] = ()  # sides that pass no gradient back: "queries", "keys"
    dropped: bool = False  # scores were set to zero at random
    inert_fill: float | None = None  # value that a mask writes over scores, if too small to hide them
    capped_mask: float | None = None  # value of hidden scores after a soft-cap that follows the mask
    inert_added: float | None = None  # value that a mask of zeros and ones adds instead of hiding
    scale_after_cap: float | None = None  # multiplier after the soft-cap, which lowers the cap by that factor
    rescaled: tuple[str, ...] = ()  # sides normalised, or multiplied by a temperature, after their projection


Facts = TypeVar("Facts", Reading, Wiring)


def merged(calls: Sequence[Facts]) -> Facts:
    """Merge facts of all calls of a layer: for each field, the first value other than the default."""
    found: dict[str, Any] = {}
    for each in fields(calls[0]):
        values = [getattr(call, each.name) for call in calls]
        others = [value for value in values if value != each.default]
        is_set = len(others) == len(values) if each.name in IN_EVERY_CALL else bool(others)
        found[each.name] = others[0] if is_set else each.default
    return type(calls[0])(**found)


@dataclass(eq=False)
class SavedCall:
    """One call. Scores are scales · q·k, soft-capped, plus the bias and mask in `visibility`.

    If each query has its own keys, each query is a batch entry.
    """

    query: Tensor  # (batch, heads, queries, features), straight from the projection
    key: Tensor  # (batch, key heads, keys, features)
    scales: Tensor  # one value per head
    visibility: Visibility = EVERYTHING
    softcap: float | None = None
    value: Tensor | None = None  # None if it could not be identified

    def scores(self) -> Tensor:
        """Return scales · q·k, soft-capped, (batch, heads, queries, keys)."""
        key = self.key.repeat_interleave(self.query.shape[1] // self.key.shape[1], 1)
        scores = self.query.to(wide_dtype(self.query)) @ key.to(wide_dtype(key)).mT
        scores = scores * self.scales.to(scores)[:, None, None]
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def weights(self, head: int) -> Tensor:
        """Return a head's weights in the first batch entry, (queries, keys); zeros for rows that see no key."""
        shared = head // (self.query.shape[1] // self.key.shape[1])
        scales = self.scales[head : head + 1]
        one = replace(self, query=self.query[:1, [head]], key=self.key[:1, [shared]], scales=scales)
        scores = one.scores()[0, 0]
        seen = self.visibility.at(0, slice(head, head + 1))
        added = seen.added(slice(0, scores.shape[-2]), slice(0, scores.shape[-1]), scores)
        scores = scores if added is None else scores + added.reshape(-1, *added.shape[-2:])[0]
        return scores.softmax(-1).nan_to_num(0.0)


def added_to(predicted: Tensor, scores: Tensor, visible: Tensor | None) -> Visibility:
    """Return the mask or bias that turns predicted scores into scores, (batch, heads, rows, keys)."""
    rest = scores - predicted
    shown = rest if visible is None else rest.masked_fill(~visible, 0.0)
    if bool(shown.abs().amax() > ROUNDING * predicted.abs().amax()) if shown.numel() else False:
        return Visibility(mask=rest if visible is None else rest.masked_fill(~visible, -math.inf))
    return EVERYTHING if visible is None else Visibility(mask=visible)


class LayerCall(Protocol):
    """A call recorded while a model runs: a MeasuredCall, or an object that builds one on demand."""

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
    attends_itself: bool = False  # self-attention: queries and keys have the same positions
    padding: Tensor | None = field(default=None, repr=False)  # (batch, query_len): True for padding queries
    over_pairs: bool = False  # its softmax runs over queries and keys at once
    kept: SavedCall | None = field(default=None, repr=False)  # its tensors, with keep=True
    gradients: GradientLengths | None = field(default=None, repr=False)
    origins: Origins = field(default_factory=Origins, repr=False)
    highest_bias: float = 0.0
    sinks: Tensor | None = field(default=None, repr=False)
    cosine: Tensor | None = field(default=None, repr=False)  # between queries and keys; None if scores have no bias
    factors: tuple[Factors, Factors] | None = field(default=None, repr=False)  # constants on queries and keys
    key_owners: Indices | None = field(default=None, repr=False)  # key number of each head; None: kernel's grouping
    first_row: tuple[object, ...] = field(default=(), repr=False)  # parameter row that makes the first head's query
    depth: int = 0  # earlier runs of its module in the same forward
    reading: Reading = field(default_factory=Reading)
    wiring: Wiring = field(default_factory=Wiring)
    softmax: Softmax = field(default_factory=lambda: Softmax(axis=-1), repr=False)

    @property
    def seen(self) -> "MeasuredCall":
        """The call itself; probes build theirs on first access."""
        return self

    @property
    def rescaled(self) -> tuple[str, ...]:
        """Sides that are normalised, or multiplied by a temperature, after their projection."""
        return self.reading.rescaled

    @property
    def rows(self) -> int:
        """Rows of every head, including padding."""
        return self.batch * self.query_len

    @property
    def wiring_of_all(self) -> Wiring:
        """Wiring, including how the weights met the values."""
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
        """Origins of its queries, keys and values."""
        return replace(self.origins, value=self.origins.value or self.softmax.values)


@dataclass(frozen=True)
class Layer:
    """One attention of a watched model, over all its calls.

    Tensors have one value per query head; statistics, norms and gradients are on the model's device.
    """

    name: str
    kind: str  # what computed it: "sdpa", "eager", "flex", "fast path", "flash"
    heads: int
    kv_heads: int
    head_dim: int
    model_dims: tuple[int, ...]  # widths that a wrong √d may use: the projection's input, all heads together
    query_len: int  # in the longest call
    key_len: int
    causal: bool
    softcap: float | None
    stats: ScoreStats
    scales: Tensor  # multiplier that each head applied
    query_norm: Tensor  # root mean square of ‖q‖ after projection and normalisation
    key_norm: Tensor
    declared: Declared  # scale in the model's configuration
    wiring: Wiring = field(default_factory=Wiring)
    reading: Reading = field(default_factory=Reading)
    softmaxes: tuple[Softmax, ...] = field(default=(), repr=False)  # one per call
    calls: int = 1
    dtype: torch.dtype = torch.float32  # dtype of queries and keys
    query: Tensor | None = field(default=None, repr=False)  # from the longest call, with keep=True
    key: Tensor | None = field(default=None, repr=False)
    kept: tuple[SavedCall, ...] = field(default=(), repr=False)  # its calls, with keep=True
    tokens: Tensor | None = field(default=None, repr=False)  # token ids of the keys in the first sequence, if available
    origins: tuple[Origins, ...] = field(default=(), repr=False)  # one per call: the parameters that made q, k, v
    queries: int = 0  # total over all calls, including padding
    left_out: tuple[Tensor, ...] = field(default=(), repr=False)  # one per call, (batch, queries): True for padding
    highest_bias: float = 0.0  # largest value that a bias adds to a score; at least 0
    cosine: Tensor | None = field(default=None, repr=False)  # between queries and keys; None if scores have no bias
    sinks: Tensor | None = field(default=None, repr=False)  # largest sink score, which belongs to no key
    is_fallback: bool = False  # its module ran uncompiled under the tracer, while others had probes
    gradients: tuple[GradientLengths, ...] = field(default=(), repr=False)  # one per call with gradients
    measured: tuple[ScoreStats, ...] = field(default=(), repr=False)  # one per call; merged in `stats`

    @property
    def module(self) -> str:
        """Path of its module: the layer's name without number and depth."""
        return NUMBER_AND_DEPTH.sub("", self.name)

    @property
    def number(self) -> int:
        """Number of the attention within its module, starting at 1."""
        found = NUMBER_AND_DEPTH.search(self.name)
        return int(found[1][1:]) if found and found[1] else 1

    @property
    def scale_applied(self) -> float:
        """Slope of the softmax's input on q·k, averaged over heads."""
        return float(self.scales.double().mean())

    @property
    def scale_expected(self) -> float:
        """Multiplier required by the configuration, the module or theory; see `scale_source`."""
        scale = self.declared.scale
        return float(self.head_dim**-0.5) if scale is None or self.scale_source == "theory" else scale

    @property
    def scale_source(self) -> str:
        """Source of `scale_expected`: `config`, `module`, or `theory` (1/√d_k).

        An attribute of the module is not evidence if the module applied exactly this number: the number may be wrong.
        """
        declared, applied = self.declared, self.scale_applied
        if declared.scale is None or declared.scale_authority is Authority.CONFIGURED:
            return "theory" if declared.scale is None else "config"
        is_applied = any(math.isclose(applied, each, rel_tol=SAME_SCALE) for each in declared.scale_readings)
        return "theory" if is_applied or declared.scale_authority is not Authority.NAMED else "module"

    def weights(self, head: int) -> Tensor:
        """Return a head's weights in the first sequence of the longest call, (queries, keys).

        If each query has its own keys, return the weights of the first query.
        """
        if not self.kept or not 0 <= head < self.heads:
            needed = f"one of {self.heads} heads" if self.kept else "a layer that was watched with keep=True"
            raise SettingError(f"Expected {needed} to show weights, got head {head} of {self.name!r}.")
        return max(self.kept, key=lambda call: call.query.shape[-2]).weights(head)

    @property
    def padding(self) -> int:
        """Number of padding queries, which all statistics leave out: no query sees the key at the same position.

        Padding of cross-attention cannot be found this way: all of its queries count.
        """
        return sum(int(padding.sum()) for padding in self.left_out)

    @property
    def query_gradient(self) -> Tensor | None:
        """Norm of the gradient that reached the queries so far; None before a backward pass."""
        return norm_over(self.gradients, "query")

    @property
    def key_gradient(self) -> Tensor | None:
        """Norm of the gradient that reached the keys so far."""
        return norm_over(self.gradients, "key")

    @property
    def alignment(self) -> Tensor:
        """Root mean square of the cosine between queries and keys; without biases, spread / (scale · ‖q‖ · ‖k‖)."""
        if self.cosine is not None:
            return self.cosine
        spread = (self.stats.variance + self.stats.mean.square()).sqrt()
        scales = self.scales.double().abs().to(spread.device)
        return (spread / (scales * self.query_norm * self.key_norm).clamp(min=1e-300)).clamp(max=1.0)
