"""What a watched model did, kept to know its attentions again: the next time their kernels alone need be looked at.

Following every operation of a forward takes longer than a GPU takes to run it. What that finds out about a call of a
fused kernel stays the same from step to step: where its queries and keys come from, and which constants multiply them.
Only where all of a model's attention was such kernels is it kept; modules that were not seen before are followed.
Where autograd records a forward, its kernels are read from the graph, and measured as their gradient passes.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from attnscale.measure.stats import Pooled, ScoreStats
from attnscale.numerics import without_autocast
from attnscale.tracing.place import Place
from attnscale.watching.call import Sighting
from attnscale.watching.kernels.kernel import Kernel, projected_norm
from attnscale.watching.known.traces import Signature, Trace

KINDS = ("sdpa", "flash")


def signature(kernel: Kernel, place: Place) -> Signature:
    """By what a call is known: where it happens, and its heads. Scale, mask and soft-cap are its own to say."""
    query, key = kernel.query.shape, kernel.key.shape
    return (place.modules[-1], place.line, kernel.kind, query[1], key[1], query[-1])


@dataclass(frozen=True, eq=False)
class Recognised:
    """A model that was followed once: the modules that ran, and each kernel call as it was seen."""

    called: frozenset[str]
    calls: dict[Signature, Sighting]
    unused_norms: dict[str, tuple[str, ...]]
    traces: Mapping[str, Trace] = field(default_factory=dict)  # modules whose kernel the autograd graph tells

    @cached_property
    def attending(self) -> frozenset[str]:
        """Paths of the modules that call kernels."""
        return frozenset(str(path) for path, *_ in self.calls)

    def sighting(self, kernel: Kernel, known_by: Signature, rows: int | None) -> Sighting | None:
        """The same call on other tensors; None where it is not known."""
        known = self._again(known_by)
        return None if known is None else _measured(known, kernel, rows)

    def later(self, kernel: Kernel, known_by: Signature, rows: int | None) -> "Unmeasured | None":
        """The same call on other tensors, to be measured when there is time for it; None where it is not known."""
        known = self._again(known_by)
        return None if known is None else Unmeasured(known, kernel, rows)

    def _again(self, known_by: Signature) -> Sighting | None:
        known = self.calls.get(known_by)
        return None if known is None or known.factors is None else copy(known)


class Unmeasured:
    """A call that is known and was not measured yet.

    That can wait until its gradient passes, since autograd holds query and key until then, and a GPU has work to do.
    """

    def __init__(self, sighting: Sighting, kernel: Kernel, rows: int | None) -> None:
        self.sighting, self._rows = sighting, rows
        self.failure: str | None = None
        query, key = kernel.query.detach(), kernel.key.detach()  # without their graph
        self._kernel: Kernel | None = replace(kernel, query=query, key=key)
        self._versions = _versions(self._kernel)
        stores = {store.data_ptr(): store.nbytes() for store in (query.untyped_storage(), key.untyped_storage())}
        self.held = sum(stores.values())  # bytes that wait with it

    def measure(self) -> None:
        """Measure it, once; what was written to since is told as a failure."""
        kernel, self._kernel, self.held = self._kernel, None, 0
        if kernel is None:
            return
        if self._versions != _versions(kernel):
            self.failure = "a query or key was written to after its attention, and is left out"
            return
        try:
            with torch.no_grad(), without_autocast(kernel.query):
                _measured(self.sighting, kernel, self._rows)
        except Exception as error:  # inside a backward pass, which must go on
            self.failure = f"{type(error).__name__}: {error}"


def _versions(kernel: Kernel) -> list[int]:
    return [tensor._version for tensor in (kernel.query, kernel.key, kernel.mask) if tensor is not None]


def _measured(call: Sighting, kernel: Kernel, rows: int | None) -> Sighting:
    """A call that was seen before, with the numbers of this time."""
    assert call.factors is not None
    query, key = call.factors
    group = kernel.query.shape[1] // max(kernel.key.shape[1], 1)
    key_norm = projected_norm(kernel.key, key)
    call.causal = kernel.is_causal if kernel.mask is None else call.causal  # to look at a mask is to wait for a GPU
    call.softcap, call.highest_bias = kernel.softcap, kernel.highest_bias()
    call.query_len, call.key_len = kernel.query.shape[-2], kernel.key.shape[-2]
    call.stats = kernel.stats(rows)
    call.scales = torch.from_numpy(kernel.scale * abs(query) * abs(key).repeat(group))
    call.query_norm = projected_norm(kernel.query, query)
    call.key_norm = key_norm if group == 1 else key_norm.repeat_interleave(group)
    return call


def remembered(
    called: set[str],
    seen: dict[Signature, Sighting],
    unused_norms: Callable[[str], tuple[str, ...]],
    traces: Mapping[str, Trace],
) -> Recognised | None:
    """What to know a model by; None where anything but its tensors may change from step to step."""
    if not all(call.kind in KINDS and call.factors is not None and not call.biased for call in seen.values()):
        return None
    calls = {
        place: replace(call, stats=_forgotten(call.heads), query=None, key=None, gradients=None, shard=None)
        for place, call in seen.items()
    }
    return Recognised(frozenset(called), calls, {str(path): unused_norms(str(path)) for path, *_ in seen}, traces)


def _forgotten(heads: int) -> ScoreStats:
    def pool() -> Pooled:
        raise AssertionError("the statistics of a step are not kept for the next")

    return ScoreStats(heads, exact=False, pool=pool)
