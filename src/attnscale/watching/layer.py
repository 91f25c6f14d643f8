"""Layer: everything seen of one attention of a model."""

import math
import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnscale.declared import Authority, Declared
from attnscale.errors import SettingError
from attnscale.measure.stats import ScoreStats
from attnscale.tracing.parameters import Origins
from attnscale.tracing.roles import Softmax
from attnscale.watching.call import Reading
from attnscale.watching.gradients import GradientLengths, norm_over
from attnscale.watching.saved_call import SavedCall

SAME_SCALE = 0.02  # relative: half precision rounds a slope by less
NUMBER_AND_DEPTH = re.compile(r"(#\d+)?(\[\d+\])?$")


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
