"""What a watched model did, kept to know its attentions again: the next time their kernels alone need be looked at.

Following every operation of a forward takes longer than a GPU takes to run it. What that finds out about a call of a
fused kernel stays the same from step to step: where its queries and keys come from, and which constants multiply them.
Only where all of a model's attention was such kernels is it kept; modules that were not seen before are followed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attnscale.measure.stats import Pooled, ScoreStats
from attnscale.watching.kernels import Kernel, projected_norm
from attnscale.watching.sighting import Sighting

if TYPE_CHECKING:
    from attnscale.watching.names import Place

Signature = tuple[object, ...]
KINDS = ("sdpa", "flash")


def signature(kernel: Kernel, place: "Place") -> Signature:
    """By what a call is known: where it happens, and its heads. Scale, mask and soft-cap are its own to say."""
    query, key = kernel.query.shape, kernel.key.shape
    return (place.modules[-1], place.line, kernel.kind, query[1], key[1], query[-1])


@dataclass(frozen=True, eq=False)
class Recognised:
    """A model that was followed once: the modules that ran, and each kernel call as it was seen."""

    called: frozenset[str]
    calls: dict[Signature, Sighting]
    unused_norms: dict[str, tuple[str, ...]]

    @property
    def attending(self) -> frozenset[str]:
        """Paths of the modules that call kernels."""
        return frozenset(str(path) for path, *_ in self.calls)

    def sighting(self, kernel: Kernel, place: "Place", rows: int | None) -> Sighting | None:
        """The same call on other tensors; None where it is not known."""
        known = self.calls.get(signature(kernel, place))
        if known is None or known.factors is None:
            return None
        query, key = known.factors
        group = kernel.query.shape[1] // max(kernel.key.shape[1], 1)
        key_norm = projected_norm(kernel.key, key)
        return replace(
            known,
            causal=kernel.is_causal if kernel.mask is None else known.causal,  # to look at a mask is to wait for a GPU
            softcap=kernel.softcap,
            highest_bias=kernel.highest_bias(),
            query_len=kernel.query.shape[-2],
            key_len=kernel.key.shape[-2],
            stats=kernel.stats(rows),
            scales=torch.from_numpy(kernel.scale * abs(query) * abs(key).repeat(group)),
            query_norm=projected_norm(kernel.query, query),
            key_norm=key_norm if group == 1 else key_norm.repeat_interleave(group),
        )


def remembered(
    called: set[str], seen: dict[Signature, Sighting], unused_norms: Callable[[str], tuple[str, ...]]
) -> Recognised | None:
    """What to know a model by; None where anything but its tensors may change from step to step."""
    if not all(call.kind in KINDS and call.factors is not None and not call.biased for call in seen.values()):
        return None
    calls = {
        place: replace(call, stats=_forgotten(call.heads), query=None, key=None, gradients=None, shard=None)
        for place, call in seen.items()
    }
    return Recognised(frozenset(called), calls, {str(path): unused_norms(str(path)) for path, *_ in seen})


def _forgotten(heads: int) -> ScoreStats:
    def pool() -> Pooled:
        raise AssertionError("the statistics of a step are not kept for the next")

    return ScoreStats(heads, exact=False, pool=pool)
