"""The probe of Monitor: statistics of sampled rows at each planned call, and the gradients that reach its operands.

Each probed module carries the number of its ModuleProbe, in the host's memory, so that one graph serves all modules of
a class, and a count that the op writes to, which keeps the op in the graph. In a backward pass an op is kept for its
result: a zero, which is added to a gradient. The backward takes nothing but the number, since whatever else it took
would have to stay as it is until then, and a checkpoint would recompute it.
"""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attnscale.probes.install import define_op, no_result
from attnscale.probes.intercept import KINDS, AttentionCall, Modification, ProbeKind, WrittenScores
from attnscale.torch_internals import in_backward
from attnscale.watching.layout import layout_from

KIND = "stats"

Slot = tuple[Tensor, Tensor]  # the number of a ModuleProbe, and how often its op ran
AddGradients = Callable[[Tensor, Tensor], None]
UNSAFE = [torch.Tag.cudagraph_unsafe]  # Python code that runs at every call


_PROBES: WeakValueDictionary[int, Any] = WeakValueDictionary()  # of modules: step.ModuleProbe
_NUMBERS = count()


def slot_of(probe: object) -> Slot:
    """Return what a module carries for a probe."""
    number = next(_NUMBERS)
    _PROBES[number] = probe
    return torch.tensor([number]), torch.tensor([0])


def _measure(
    slot: Tensor, number: int, call: AttentionCall | WrittenScores, learns: bool, is_compiled: bool = True
) -> AddGradients | None:
    probe = None if in_backward() else _PROBES.get(int(slot))
    return None if probe is None else probe.measure(number, call, learns, is_compiled)


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
    runs.add_(1)
    _measure(slot, number, AttentionCall(query, key, mask, hidden_keys, is_causal, scale), learns)


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
    """Measure FlexAttention, by an op of its own: Inductor loses a list inside a checkpoint."""
    runs.add_(1)
    modified = Modification(functions, tuple(buffers[:score_buffers]), tuple(buffers[score_buffers:]))
    _measure(slot, number, AttentionCall(query, key, None, None, False, scale, modification=modified), learns)


def _probe_scores(
    scores: Tensor, left: Tensor, right: Tensor, slot: Tensor, runs: Tensor, layout: str, number: int, learns: bool
) -> None:
    runs.add_(1)
    _measure(slot, number, WrittenScores(scores, left, right, layout_from(layout)), learns)


def _probe_gradient(first: Tensor, second: Tensor, slot: Tensor) -> Tensor:
    probe = _PROBES.get(int(slot))
    if probe is not None:
        probe.add_compiled_gradients(first, second)
    return first.new_zeros(())


def _zero(first: Tensor, *_: Any) -> Tensor:
    return first.new_empty(())


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


class _Stats(ProbeKind):
    def at_function(self, call: AttentionCall, carried: Any, number: int, is_traced: bool) -> AttentionCall:
        slot, runs = carried
        learns = torch.is_grad_enabled() and call.query.requires_grad and call.key.requires_grad
        measured = call._replace(query=call.query.detach(), key=call.key.detach())
        if not is_traced or type(slot) is Tensor:
            add = _measure(slot, number, measured, learns, is_compiled=False)
            if add is not None:
                _follow((call.query, call.key), add)
            return call
        query, key, mask, hidden_keys, is_causal, scale, _, modified, _ = measured
        if modified is None:
            probe_kernel(query, key, mask, hidden_keys, slot, runs, scale, is_causal, number, learns)
        else:
            buffers = [buffer.detach() for buffer in (*modified.score_buffers, *modified.mask_buffers)]
            own = len(modified.score_buffers)
            probe_flex(query, key, buffers, slot, runs, scale, modified.functions, own, number, learns)
        if learns:
            _follow((call.query, call.key), lambda query, key: probe_gradient(query, key, slot))
        return call

    def at_softmax(self, written: WrittenScores, carried: Any, number: int, is_traced: bool) -> None:
        (slot, runs), operands = carried, (written.left, written.right)
        tensors = written.scores.detach(), written.left.detach(), written.right.detach()
        learns = torch.is_grad_enabled() and all(operand.requires_grad for operand in operands)
        if not is_traced or type(slot) is Tensor:
            add = _measure(slot, number, WrittenScores(*tensors, written.layout), learns, is_compiled=False)
            if add is not None:
                _follow(operands, add)
            return
        probe_scores(*tensors, slot, runs, written.layout.code, number, learns)
        if learns:
            _follow(operands, lambda left, right: probe_gradient(left, right, slot))


KINDS[KIND] = _Stats()


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
