"""Reporter: every attention call, measured as the settings say, and noted under the place where it happened."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from attnscale.measure.sampling import same_rows
from attnscale.tracing.lineage import Node
from attnscale.tracing.operations.softmaxes import OF_SDPA, PLAIN
from attnscale.tracing.roles import Scores, Softmax
from attnscale.watching.call import SeenCall
from attnscale.watching.gradients import of_kernel
from attnscale.watching.kept import keep_values
from attnscale.watching.kernels import KernelCall
from attnscale.watching.known.known_model import signature
from attnscale.watching.known.recognition import Recognition, Runs
from attnscale.watching.running import Running
from attnscale.watching.seen import Seen
from attnscale.watching.settings import Settings
from attnscale.watching.shards import Shard
from attnscale.watching.written.again import WrittenAgain
from attnscale.watching.written.axes import find_axes
from attnscale.watching.written.layout import known_written
from attnscale.watching.written.operands import key_channels
from attnscale.watching.written.sdpa import factors_before, own_factors
from attnscale.watching.written.written_call import WrittenCall, written_call


class Reporter:
    """What a watcher hands on, a call at a time."""

    def __init__(self, settings: Settings, running: Running, seen: Seen, recognition: Recognition) -> None:
        self._settings, self._running, self._seen, self._recognition = settings, running, seen, recognition
        self.softmaxes = 0  # of anything
        self.unread: Counter[str] = Counter()  # those that were not followed to a product, by module

    def kernel(self, call: KernelCall) -> Softmax:
        """A kernel ran."""
        path = ".".join(filter(None, (self._running.stack[-1], call.inside)))
        line, depth = self._running.line_within(self._running.stack[-1]), self._running.depth(self._running.stack[-1])
        known_by = signature(call, self._running.stack[-1], line)
        self._recognition.looks_at_kernel()
        if self._recognition.only_known:
            self._seen.is_compiled |= self._recognition.is_compiled
            seen = self._measured(call, lambda: self._recognition.again(call, known_by))
        else:
            seen = self._measured(call, lambda: call.seen(self._settings.rows, self._settings.keep))
            if self._settings.learns:
                self._recognition.saw(known_by, call, seen, self._runs(self._running.stack[-1]))
        assert seen is not None
        if torch.is_grad_enabled():
            query, key = call.learning or (call.query, call.key)
            seen.gradients = of_kernel(query, key, seen.key_owners)
        self._seen.note(path, line, seen, depth)
        return seen.softmax

    def softmax(self, scores: Tensor, node: Node, axis: int, by: str = "") -> Softmax | None:
        """A softmax was written out; None where its input cannot be followed to a product."""
        self.softmaxes += 1
        self._recognition.takes_softmax(self._running.stack[-1])
        axis %= max(scores.dim(), 1)
        product = node.role.of if isinstance(node.role, Scores) else None
        call = None if product is None else written_call(find_axes(product, node, axis), scores)
        if product is None or call is None:
            if product is not None:  # others, as of a loss, are told of where they mix values
                self._recognition.give_up()
            self.unread[self._running.shown(self._running.stack[-1])] += 1
            return None
        path = _common(product.modules, self._running.stack)
        line, depth = self._running.line_within(path), self._running.depth(path)
        seen = self._measured(call, lambda: call.seen(self._settings.rows, self._settings.keep))
        assert seen is not None
        seen.kind, own = ("sdpa", own_factors(product)) if by == OF_SDPA else (seen.kind, None)
        if own is not None and own.query < 0:
            seen.scales = -seen.scales
        if torch.is_grad_enabled():
            seen.gradients = call.gradients(1.0 if own is None else own.key)
        if self._settings.learns:
            self._learn(call, seen, path, by, tuple(scores.shape))
        seen.softmax = Softmax(
            axis,
            lambda: self._seen.note(path, line, seen, depth),
            waits=product.learned_query,
            keys_of=(lambda points: key_channels(product, node, points)) if call.shares_keys else None,
        )
        if seen.kept is not None:
            seen.softmax.keep = partial(keep_values, call.axes, seen.kept)
        product.has_softmax = True
        return seen.softmax

    def _learn(self, call: WrittenCall, seen: SeenCall, path: str, by: str, shape: tuple[int, ...]) -> None:
        """Whether a call can be known again: by SDPA, or where one operation took a softmax of scores of this shape."""
        known = None
        if by == OF_SDPA and self._settings.training:
            seen.factors = factors_before(call, seen, shape)
        elif by == PLAIN and self._settings.training and not call.axes.product.learned_query:
            known = known_written(call, seen, shape)
            seen.factors = None if known is None else tuple(way.factor.mean(1) for way in call.ways)
        if seen.factors is not None:
            seen.highest_bias = 0.0  # but for rounding
        line = self._running.line_within(path)
        known_by = (path, line, seen.kind, seen.heads, seen.kv_heads, seen.head_dim)
        self._recognition.wrote(known_by, known, seen, self._runs(path))

    def _runs(self, path: str) -> Runs:
        compiled = self._running.compiled()
        self._seen.is_compiled |= compiled.is_compiled
        return Runs(*compiled, self._running.depth(path))

    def _measured(self, call: KernelCall | WrittenCall, measure: Callable[[], SeenCall | None]) -> SeenCall | None:
        if self._settings.training and not torch.is_grad_enabled():
            self._seen.without_gradients = True
        return measured(self._settings, call, measure)


def measured(
    settings: Settings, call: KernelCall | WrittenCall | WrittenAgain, measure: Callable[[], SeenCall | None]
) -> SeenCall | None:
    """A call as it is measured where ranks share out keys, and anywhere else."""
    with nullcontext() if settings.seed is None else same_rows(settings.seed):
        seen = measure()
    if settings.seed is not None and seen is not None:
        seen.shard = Shard.of(seen, *call.some())
    return seen


def _common(first: tuple[str, ...], second: list[str]) -> str:
    """The innermost module that was running at both times."""
    return [a for a, b in zip(first, second, strict=False) if a == b][-1]
