"""The probe of Monitor: statistics of sampled rows at each planned call, and the gradients that reach its operands.

Each probed module carries the number of its StatsProbe, in the host's memory, so that one graph serves all modules of a
class, and a count that the op writes to, which keeps the op in the graph. In a backward pass an op is kept for its
result: a zero, which is added to a gradient. The backward takes nothing but the number, since whatever else it took
would have to stay as it is until then, and a checkpoint would recompute it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attnscale.probes.functions import MODIFICATIONS, AttentionCall, Modification
from attnscale.probes.intercept import KINDS, ProbeKind, WrittenScores
from attnscale.probes.ops import define_op, no_result
from attnscale.probes.written import WrittenOperands
from attnscale.torch_internals import in_backward
from attnscale.visibility import Visibility
from attnscale.watching.gradients import GradientLengths
from attnscale.watching.kernels import KernelCall
from attnscale.watching.kernels.flex import modification
from attnscale.watching.written.layout import layout_from

KIND = "stats"

Slot = tuple[Tensor, Tensor]  # the number of a StatsProbe, and how often its op ran
Measurable = KernelCall | WrittenOperands


class StatsProbe(Protocol):
    """Measures the calls of one module."""

    def measure(self, number: int, call: Measurable, gradients: GradientLengths | None, is_compiled: bool) -> None:
        """Measure a call, this one in a run of the module; without gradients where no backward will come."""
        ...

    def add_gradients(self, lengths: GradientLengths, number: int, first: Tensor, second: Tensor) -> None:
        """Add the gradients of queries and keys, or of a product's operands, of this call."""
        ...

    def add_compiled_gradients(self, first: Tensor, second: Tensor) -> None:
        """Add those of the last compiled call that waits for them."""
        ...


_PROBES: WeakValueDictionary[int, StatsProbe] = WeakValueDictionary()
_NUMBERS = count()


def slot_of(probe: StatsProbe) -> Slot:
    """Return what a module carries for a probe."""
    number = next(_NUMBERS)
    _PROBES[number] = probe
    return torch.tensor([number]), torch.tensor([0])


def _probe_kernel(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    hidden_keys: Tensor | None,
    slot: Tensor,
    runs: Tensor,
    scale: float,
    is_causal: bool,
    number: int,
    learns: bool,
) -> None:
    _measure(slot, runs, number, learns, lambda: _kernel(query, key, mask, hidden_keys, is_causal, scale, None))


def _probe_flex(
    query: Tensor,
    key: Tensor,
    buffers: list[Tensor],
    slot: Tensor,
    runs: Tensor,
    scale: float,
    functions: int,
    score_buffers: int,
    number: int,
    learns: bool,
) -> None:
    """Of the buffers the first belong to score_mod. An op of its own: Inductor loses a list inside a checkpoint."""
    modified = Modification(functions, tuple(buffers[:score_buffers]), tuple(buffers[score_buffers:]))
    _measure(slot, runs, number, learns, lambda: _kernel(query, key, None, None, False, scale, modified))


def _probe_scores(
    scores: Tensor, left: Tensor, right: Tensor, slot: Tensor, runs: Tensor, layout: str, number: int, learns: bool
) -> None:
    _measure(slot, runs, number, learns, lambda: WrittenOperands(scores, left, right, layout_from(layout)))


def _measure(slot: Tensor, runs: Tensor, number: int, learns: bool, call: Callable[[], Measurable]) -> None:
    runs.add_(1)
    probe = None if in_backward() else _PROBES.get(int(slot))
    if probe is not None:
        probe.measure(number, call(), GradientLengths() if learns else None, is_compiled=True)


def _probe_gradient(first: Tensor, second: Tensor, slot: Tensor) -> Tensor:
    probe = _PROBES.get(int(slot))
    if probe is not None:
        probe.add_compiled_gradients(first, second)
    return first.new_zeros(())


def _zero(first: Tensor, *_: Any) -> Tensor:
    return first.new_empty(())


UNSAFE = [torch.Tag.cudagraph_unsafe]  # Python code that runs at every call
probe_kernel = define_op(
    "probe_stats(Tensor query, Tensor key, Tensor? mask, Tensor? hidden_keys, Tensor slot, Tensor(a!) runs,"
    " float scale, bool is_causal, int number, bool learns) -> ()",
    _probe_kernel,
    no_result,
    UNSAFE,
)
probe_flex = define_op(
    "probe_stats_of_flex(Tensor query, Tensor key, Tensor[] buffers, Tensor slot, Tensor(a!) runs, float scale,"
    " int functions, int score_buffers, int number, bool learns) -> ()",
    _probe_flex,
    no_result,
    UNSAFE,
)
probe_scores = define_op(
    "probe_stats_of_scores(Tensor scores, Tensor left, Tensor right, Tensor slot, Tensor(a!) runs, str layout,"
    " int number, bool learns) -> ()",
    _probe_scores,
    no_result,
    UNSAFE,
)
probe_gradient = define_op(
    "probe_gradient(Tensor first, Tensor second, Tensor slot) -> Tensor", _probe_gradient, _zero, UNSAFE
)


class _WithGradientProbe(torch.autograd.Function):
    """Queries and keys as they are; their gradients are measured as they pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        ctx.slot = slot
        return query.view_as(query), key.view_as(key)

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, None]:
        return query + probe_gradient(query, key, ctx.slot), key, None


class _Stats(ProbeKind):
    def at_function(self, call: AttentionCall, carried: Any, number: int, is_traced: bool) -> AttentionCall:
        (slot, runs), query, key = carried, call.query.detach(), call.key.detach()
        learns = torch.is_grad_enabled() and call.query.requires_grad and call.key.requires_grad
        if not is_traced or type(slot) is Tensor:
            kernel = _kernel(query, key, call.mask, call.hidden_keys, call.is_causal, call.scale, call.modification)
            _measure_eagerly(kernel, slot, number, (call.query, call.key) if learns else None)
            return call
        if call.modification is None:
            known = call.mask, call.hidden_keys
            probe_kernel(query, key, *known, slot, runs, call.scale, call.is_causal, number, learns)
        else:
            own = call.modification.score_buffers
            buffers = [buffer.detach() for buffer in (*own, *call.modification.mask_buffers)]
            functions = call.modification.functions
            probe_flex(query, key, buffers, slot, runs, call.scale, functions, len(own), number, learns)
        if learns:
            query, key = _WithGradientProbe.apply(call.query, call.key, slot)  # type: ignore[no-untyped-call]
            return replace(call, query=query, key=key)
        return call

    def at_softmax(self, written: WrittenScores, carried: Any, number: int, is_traced: bool) -> None:
        slot, runs = carried
        tensors = written.scores.detach(), written.left.detach(), written.right.detach()
        operands = written.left, written.right
        learns = torch.is_grad_enabled() and all(operand.requires_grad for operand in operands)
        if not is_traced or type(slot) is Tensor:
            found = WrittenOperands(*tensors, layout_from(written.layout))
            _measure_eagerly(found, slot, number, operands if learns else None)
            return
        probe_scores(*tensors, slot, runs, written.layout, number, learns)
        if learns:
            _follow(operands, lambda left, right: probe_gradient(left, right, slot))


KINDS[KIND] = _Stats()


def _measure_eagerly(call: Measurable, slot: Tensor, number: int, learning: tuple[Tensor, Tensor] | None) -> None:
    probe = None if in_backward() else _PROBES.get(int(slot))
    if probe is None:
        return
    lengths = None if learning is None else GradientLengths()
    probe.measure(number, call, lengths, is_compiled=False)
    if learning is not None and lengths is not None:
        _follow(learning, partial(probe.add_gradients, lengths, number))


def _follow(tensors: tuple[Tensor, Tensor], add: Callable[[Tensor, Tensor], Tensor | None]) -> None:
    """Add both gradients when they have passed; a zero that comes back is added to the second."""
    passed: dict[int, Tensor] = {}

    def note(side: int, gradient: Tensor) -> Tensor | None:
        passed[side] = gradient.detach()
        if len(passed) < len(tensors):
            return None
        with torch.no_grad():
            zero = add(passed.pop(0), passed.pop(1))
        return None if zero is None else gradient + zero

    for side, tensor in enumerate(tensors):
        tensor.register_hook(partial(note, side))


def _kernel(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    hidden_keys: Tensor | None,
    is_causal: bool,
    scale: float,
    modified: Modification | None,
) -> KernelCall:
    if modified is None:
        visibility = Visibility.of(mask, is_causal)
        return KernelCall("sdpa", query, key, scale, visibility=visibility, hidden=hidden_keys)
    buffers = modified.score_buffers, modified.mask_buffers
    modify = modification(*MODIFICATIONS[modified.functions], *buffers, is_traced=True)
    return KernelCall("flex", query, key, scale, score_mod=modify)
