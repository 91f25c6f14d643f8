"""What a watched model did, kept to know its attentions again: the next time their kernels alone need be looked at.

Following every operation of a forward takes longer than a GPU takes to run it. What that finds out about a call of a
fused kernel stays the same from step to step: where its queries and keys come from, and which constants multiply them.
Only where all of a model's attention was such kernels is it known from outside; modules that were not seen before are
followed. Where autograd records a forward, its kernels are read from the graph, and measured as their gradient passes.
Attention written out is known inside the model's run alone, and so is SDPA where torch has no kernel for it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from torch import Tensor, nn

from attnscale.declared import Declared, declared
from attnscale.measure.pooled import Pooled
from attnscale.measure.stats import ScoreStats
from attnscale.tracing.lineage import Node
from attnscale.tracing.parameters import Origin, Origins, UntraceableError
from attnscale.tracing.roles import Softmax
from attnscale.watching.call import SeenCall
from attnscale.watching.kernels import KernelCall
from attnscale.watching.known.orders import Order
from attnscale.watching.known.traces import Signature, Trace
from attnscale.watching.known.waiting import WaitingCall, measured_again
from attnscale.watching.running import Line
from attnscale.watching.written.again import WrittenAgain
from attnscale.watching.written.layout import KnownWritten

Noted = TypeVar("Noted", SeenCall, Softmax)


def signature(kernel: KernelCall, path: str, line: Line) -> Signature:
    """By what a call is known: where it happens, and its heads. Scale, mask and soft-cap are its own to say."""
    query, key = kernel.query.shape, kernel.key.shape
    return (path, line, kernel.kind, query[1], key[1], query[-1])


@dataclass(frozen=True, eq=False)
class KnownModel:
    """A model that was followed once: the modules that ran, and each kernel call as it was seen."""

    called: frozenset[str]
    calls: dict[Signature, SeenCall]
    unused_norms: dict[str, tuple[str, ...]]
    traces: Mapping[str, Trace] = field(default_factory=dict)  # modules whose kernel the autograd graph tells
    orders: Mapping[str, Order] = field(default_factory=dict)  # modules that call the same kernels in every run
    written: Mapping[Signature, KnownWritten] = field(default_factory=dict)  # calls that are no kernels
    taken_apart: frozenset[Signature] = frozenset()  # of SDPA, which ran none: only the function can be seen

    unknown: frozenset[str] = frozenset()  # modules whose attention must be followed every time
    bound: frozenset[str] = frozenset()  # those that cannot run apart from what is around them
    softmaxes: frozenset[str] = frozenset()  # modules that take some, of anything
    lengths: Mapping[str, set[int]] = field(default_factory=dict)  # of the model's runs, in operations of autograd
    declarations: dict[tuple[str, int], Declared] = field(default_factory=dict)  # once they were asked for

    def declared(self, model: nn.Module, path: str, head_dim: int) -> Declared:
        """What the model says of its scale there: read once, since to look for it takes long."""
        if (path, head_dim) not in self.declarations:
            self.declarations[path, head_dim] = declared(model, path, head_dim)
        return self.declarations[path, head_dim]

    @property
    def from_outside(self) -> "KnownModel | None":
        """What a watcher of kernels may know the model by."""
        return None if self.written or self.taken_apart or self.unknown else self

    @cached_property
    def is_compiled(self) -> bool:
        """Whether any of it is called by what torch.compile made."""
        return any(order.is_compiled for order in self.orders.values())

    @cached_property
    def attending(self) -> frozenset[str]:
        """Paths of the modules that call kernels."""
        return frozenset(str(path) for path, *_ in self.calls)

    def told_by(self, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module] | None:
        """Those of a model's modules that tell all of it, where the graph tells of every attention; None: all do.

        The outermost, those that attend, and those that did not run when it was followed.
        """
        if self.is_compiled or self.bound or not self.lengths or not self.attending <= self.traces.keys():
            return None
        wanted = {*self.attending, *self.lengths, *(modules.keys() - self.called)}
        return {path: module for path, module in modules.items() if path in wanted}

    def fits(self, given: KernelCall | WrittenAgain, known_by: Signature) -> bool:
        """Whether a call has the heads that are known of it; in that of a kernel keys may be copied, heads filled up.

        A query head has a key head of its own there where several share one in the call, and a width of eights.
        """
        known, written = self.calls[known_by], self.written.get(known_by)
        if isinstance(given, WrittenAgain):
            is_alike = written is not None and written.layout == given.layout
            return is_alike and given.layout.fits(given.scores, given.left, given.right)
        return written is None and self._fits_kernel(given, known, known_by)

    @staticmethod
    def _fits_kernel(kernel: KernelCall, known: SeenCall, known_by: Signature) -> bool:
        (_, heads, _, width), keys = kernel.query.shape, kernel.key.shape[1]
        known_keys = 0 if known.factors is None else len(known.factors[1])
        of_eights = -(-width // 8) * 8
        alike = kernel.kind == known.kind and heads == known.heads and known_by[-1] in (width, of_eights)
        return alike and bool(known_keys) and (known_keys % keys == 0 or keys % known_keys == 0)

    def again(self, given: KernelCall | WrittenAgain, known_by: Signature, rows: int | None) -> SeenCall | None:
        """The same call on other tensors; None where it is not known."""
        known = self._again(known_by)
        if known is None:
            return None
        if isinstance(given, WrittenAgain):
            return given.seen(self.written[known_by], known, rows)
        return measured_again(known, given, rows)

    def operands(self, known_by: Signature, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, or their gradients, by head: a kernel has them so, a product as its layout says."""
        written = self.written.get(known_by)
        return (first, second) if written is None else written.layout.operands(first, second)

    def later(self, kernel: KernelCall, known_by: Signature, rows: int | None) -> WaitingCall | None:
        """The same call on other tensors, to be measured when there is time for it; None where it is not known."""
        known = self._again(known_by)
        return None if known is None else WaitingCall(known, kernel, rows)

    def unplaced(self, kernel: KernelCall, path: str) -> SeenCall:
        """A call that is not known, of a module that is, to be measured: what was applied before it is not known."""
        beside = next(known_by for known_by in self.calls if known_by[0] == path)
        again, heads, keys = self._again(beside), kernel.query.shape[1], kernel.key.shape[1]
        assert again is not None  # what has no factors is not kept
        return replace(
            again,
            kind=kernel.kind,
            heads=heads,
            kv_heads=keys,
            head_dim=kernel.query.shape[-1],
            key_owners=np.repeat(np.arange(keys), heads // max(keys, 1)),
            normalised=False,
            factors=(np.full(heads, np.nan), np.full(keys, np.nan)),
            origins=Origins(*(_unknown_origin(count) for count in (heads, keys, keys))),
        )

    def _again(self, known_by: Signature) -> SeenCall | None:
        known = self.calls.get(known_by)
        if known is None or known.factors is None:
            return None
        again = _twin(known)
        again.softmax = _twin(known.softmax)
        return again


def remembered(
    called: set[str],
    seen: dict[Signature, SeenCall],
    unused_norms: Callable[[str], tuple[str, ...]],
    traces: Mapping[str, Trace],
    orders: Mapping[str, Order],
    written: Mapping[Signature, KnownWritten],
) -> KnownModel:
    """What to know a model by."""
    calls = {
        place: replace(
            call,
            stats=_forgotten(call.heads),
            query=None,
            key=None,
            kept=None,
            gradients=None,
            shard=None,
            padding=None,
            softmax=forgotten(call.softmax),
        )
        for place, call in seen.items()
    }
    unused = {str(path): unused_norms(str(path)) for path, *_ in seen}
    return KnownModel(frozenset(called), calls, unused, traces, orders, written)


def forgotten(softmax: Softmax) -> Softmax:
    """What stays the same from step to step of what became of weights; nothing that holds on to a tensor."""
    return replace(softmax, attends=None, keep=None, keys_of=None, off_one=None, undefined=None)


def _twin(noted: Noted) -> Noted:
    """One with the same in it; copy.copy() asks each how it is pickled, which takes several times as long."""
    twin: Noted = object.__new__(type(noted))
    twin.__dict__.update(noted.__dict__)
    return twin


def _unknown_origin(heads: int) -> Origin:
    reason = UntraceableError("they were not followed when it attended where it did not before")
    return Origin(Node(()), np.zeros((0, 0), dtype=np.int64), heads, axis=0, features=1, known=reason)


def _forgotten(heads: int) -> ScoreStats:
    def pool() -> Pooled:
        raise AssertionError("the statistics of a step are not kept for the next")

    return ScoreStats(heads, exact=False, pool=pool)
