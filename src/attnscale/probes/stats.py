"""The probe of Monitor: statistics of sampled rows at each planned call, and the gradients that reach its operands.

Each probed module stores two tensors. The number of its ModuleProbe, in host memory, lets one graph serve all modules
of a class. The op writes to a counter, which keeps the op in the graph. In a backward pass, an op stays in the graph
because its result, a zero, is added to a gradient. The number is the only saved input of the backward op: other inputs
would have to stay unchanged until the backward pass, and a checkpoint would recompute them.
"""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attnscale.probes.install import define_op, no_result
from attnscale.probes.intercept import KINDS, AttentionCall, Modification, ProbeKind
from attnscale.torch_internals import in_backward

KIND = "stats"

Slot = tuple[Tensor, Tensor]  # the number of a ModuleProbe, and a count of the runs of its op
AddGradients = Callable[[Tensor, Tensor], None]
UNSAFE = [torch.Tag.cudagraph_unsafe]  # Python code that runs at every call


_PROBES: WeakValueDictionary[int, Any] = WeakValueDictionary()  # each a step.ModuleProbe, by number
_NUMBERS = count()


def slot_of(probe: object) -> Slot:
    """Return the tensors that a module stores for a probe."""
    number = next(_NUMBERS)
    _PROBES[number] = probe
    return torch.tensor([number]), torch.tensor([0])


def _measure(
    call: AttentionCall, slot: Tensor, number: int, learns: bool, is_compiled: bool = True
) -> AddGradients | None:
    probe = None if in_backward() else _PROBES.get(int(slot))
    return None if probe is None else probe.measure(number, call, learns, is_compiled)


def _probe_stats(
    query: Tensor,
    key: Tensor,
    scores: Tensor | None,
    mask: Tensor | None,
    hidden_keys: Tensor | None,
    slot: Tensor,
    runs: Tensor,
    layout: str,
    attends_itself: bool,
    is_causal: bool,
    scale: float,
    number: int,
    learns: bool,
) -> None:
    runs.add_(1)
    call = AttentionCall(query, key, scores, mask, hidden_keys, layout, attends_itself, is_causal, scale)
    _measure(call, slot, number, learns)


def _probe_flex(
    query: Tensor,
    key: Tensor,
    buffers: list[Tensor],
    slot: Tensor,
    runs: Tensor,
    functions: int,
    attends_itself: bool,
    scale: float,
    number: int,
    learns: bool,
) -> None:
    """Measure FlexAttention. A separate op is needed, because Inductor loses a list inside a checkpoint."""
    runs.add_(1)
    modification = Modification(functions, buffers)
    call = AttentionCall(query, key, attends_itself=attends_itself, scale=scale, modification=modification)
    _measure(call, slot, number, learns)


def _probe_gradient(first: Tensor, second: Tensor, slot: Tensor) -> Tensor:
    probe = _PROBES.get(int(slot))
    if probe is not None:
        probe.add_compiled_gradients(first, second)
    return first.new_zeros(())


def _zero(first: Tensor, *_: Any) -> Tensor:
    return first.new_empty(())


probe_stats = define_op(
    "probe_stats(Tensor query, Tensor key, Tensor? scores, Tensor? mask, Tensor? hidden_keys, Tensor slot,"
    " Tensor(a!) runs, str layout, bool attends_itself, bool is_causal, float scale, int number, bool learns) -> ()",
    _probe_stats,
    no_result,
    UNSAFE,
)
probe_flex = define_op(
    "probe_stats_of_flex(Tensor query, Tensor key, Tensor[] buffers, Tensor slot, Tensor(a!) runs, int functions,"
    " bool attends_itself, float scale, int number, bool learns) -> ()",
    _probe_flex,
    no_result,
    UNSAFE,
)
probe_gradient = define_op(
    "probe_gradient(Tensor first, Tensor second, Tensor slot) -> Tensor", _probe_gradient, _zero, UNSAFE
)


class _Stats(ProbeKind):
    def at_call(self, call: AttentionCall, tensors: Any, number: int) -> None:
        (slot, runs), operands = tensors, (call.query, call.key)
        learns = torch.is_grad_enabled() and all(operand.requires_grad for operand in operands)
        if type(slot) is Tensor:
            add: Callable[..., Any] | None = _measure(call, slot, number, learns, is_compiled=False)
        elif call.modification is not None:
            functions, buffers = call.modification
            call = call.detached()
            constants = functions, call.attends_itself, call.scale
            probe_flex(call.query, call.key, buffers, slot, runs, *constants, number, learns)
            add = partial(_probe_gradient_of, slot) if learns else None
        else:
            call = call.detached()
            probe_stats(*call.tensors, slot, runs, *call.constants, number, learns)
            add = partial(_probe_gradient_of, slot) if learns else None
        if add is not None:
            _follow(operands, add)


def _probe_gradient_of(slot: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return probe_gradient(first, second, slot)  # type: ignore[no-any-return]


KINDS[KIND] = _Stats()


def _follow(tensors: tuple[Tensor, Tensor], add: Callable[[Tensor, Tensor], Tensor | None]) -> None:
    """Call `add` once both gradients have arrived; if it returns a zero, add the zero to the later gradient."""
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
