"""Reporter: every attention call, measured as the settings say, and noted under the place where it happened."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from attnscale.measure.sampling import same_rows
from attnscale.tracing.following import are_outputs_of_one_projection
from attnscale.tracing.lineage import Node
from attnscale.tracing.operations.softmaxes import OF_SDPA, PLAIN
from attnscale.tracing.roles import Scores, Softmax
from attnscale.watching.call import SeenCall
from attnscale.watching.gradients import of_kernel
from attnscale.watching.kept import keep_values
from attnscale.watching.kernels import KernelCall
from attnscale.watching.plan import PlanRecorder
from attnscale.watching.running import Running
from attnscale.watching.seen import Seen
from attnscale.watching.settings import Settings
from attnscale.watching.shards import Shard
from attnscale.watching.written.axes import find_axes
from attnscale.watching.written.layout import factors_before, own_factors, written_plan
from attnscale.watching.written.operands import key_channels
from attnscale.watching.written.written_call import WrittenCall, written_call


class Sharded(Protocol):
    """A call that can be put together with calls on other keys."""

    def some(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys spread over their positions, and the last queries."""
        ...


class Reporter:
    """What a watcher hands on, a call at a time."""

    def __init__(self, settings: Settings, running: Running, seen: Seen, plan: PlanRecorder) -> None:
        self._settings, self._running, self._seen, self._plan = settings, running, seen, plan
        self.softmaxes = 0  # of anything
        self.unread: Counter[str] = Counter()  # those that were not followed to a product, by module

    def kernel(self, call: KernelCall) -> Softmax:
        """A kernel ran."""
        module = self._running.stack[-1]
        line, depth = self._running.line_within(module), self._running.depth(module)
        seen = self._measured(call, lambda: call.seen(self._settings.rows, self._settings.keep))
        if self._settings.training:
            self._note_run(module)
            self._plan.add_kernel(module, line, call, seen)
        if torch.is_grad_enabled():
            query, key = call.learning or (call.query, call.key)
            seen.gradients = of_kernel(query, key, seen.key_owners)
        self._seen.note(".".join(filter(None, (module, call.inside))), line, seen, depth)
        return seen.softmax

    def softmax(self, scores: Tensor, node: Node, axis: int, by: str = "") -> Softmax | None:
        """A softmax was written out; None where its input cannot be followed to a product."""
        self.softmaxes += 1
        axis %= max(scores.dim(), 1)
        product = node.role.of if isinstance(node.role, Scores) else None
        call = None if product is None else written_call(find_axes(product, node, axis), scores)
        if product is None or call is None:
            if product is not None:  # others, as of a loss, are told of where they mix values
                self._plan.give_up("a softmax of a product could not be followed")
            if not are_outputs_of_one_projection(node, axis):  # a loss, or a router
                self.unread[self._running.shown(self._running.stack[-1])] += 1
            return None
        path = _common(product.modules, self._running.stack)
        line, depth = self._running.line_within(path), self._running.depth(path)
        seen = self._measured(call, lambda: call.seen(self._settings.rows, self._settings.keep))
        seen.kind, own = ("sdpa", own_factors(product)) if by == OF_SDPA else (seen.kind, None)
        if own is not None and own.query < 0:
            seen.scales = -seen.scales
        if torch.is_grad_enabled():
            seen.gradients = call.gradients(1.0 if own is None else own.key)
        if self._settings.training:
            self._record(call, seen, path, by, tuple(scores.shape))
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

    def _record(self, call: WrittenCall, seen: SeenCall, path: str, by: str, shape: tuple[int, ...]) -> None:
        """Record a call in the plan: by SDPA, or where one operation took a softmax of scores of this shape."""
        planned = None
        if by == OF_SDPA:
            seen.factors = factors_before(call, seen, shape)
        elif by == PLAIN and not call.axes.product.learned_query:
            planned = written_plan(call, seen, shape)
            seen.factors = None if planned is None else tuple(way.factor.mean(1) for way in call.ways)
        if seen.factors is not None:
            seen.highest_bias = 0.0  # but for rounding
        self._note_run(path)
        self._plan.add_written(path, self._running.line_within(path), seen, planned)

    def _note_run(self, path: str) -> None:
        compiled = self._running.compiled()
        self._seen.is_compiled |= compiled.is_compiled
        self._plan.ran_as(path, *compiled, self._running.depth(path))

    def _measured(self, call: KernelCall | WrittenCall, measure: Callable[[], SeenCall]) -> SeenCall:
        if self._settings.training and not torch.is_grad_enabled():
            self._seen.without_gradients = True
        return measured(self._settings, call, measure)


def measured(settings: Settings, call: Sharded, measure: Callable[[], SeenCall]) -> SeenCall:
    """Measure a call; where ranks share out keys, on the same rows, with what puts its rows together again."""
    with nullcontext() if settings.seed is None else same_rows(settings.seed):
        seen = measure()
    if settings.seed is not None:
        seen.shard = Shard.of(seen, *call.some())
    return seen


def _common(first: tuple[str, ...], second: list[str]) -> str:
    """The innermost module that was running at both times."""
    return [a for a, b in zip(first, second, strict=False) if a == b][-1]
