"""One sampled step of a Monitor: probes are installed while it lasts, and each call they measure is noted in a Seen."""

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType

import torch
from torch import Tensor

from attnscale.errors import InputError, NotFollowedWarning
from attnscale.measure.cuda.probe import Probed, probe
from attnscale.measure.sampling import rows_are_shared
from attnscale.module_paths import root_name
from attnscale.numerics import without_autocast
from attnscale.probes.placement import Placement
from attnscale.probes.stats import KIND, Measurable, slot_of
from attnscale.probes.unprobed import Fallback, LateModules
from attnscale.probes.written import WrittenOperands
from attnscale.torch_internals import (
    backward_number,
    called_module,
    in_backward,
    node_in_backward,
    recorded_operations,
)
from attnscale.watching.call import SeenCall
from attnscale.watching.gradients import GradientLengths
from attnscale.watching.kernels import KernelCall
from attnscale.watching.kernels.kernel_call import Found, before, projected_norms
from attnscale.watching.plan import ModulePlan, PlannedCall
from attnscale.watching.sdpa_names import STATE
from attnscale.watching.seen import Seen
from attnscale.watching.settings import Settings
from attnscale.watching.watcher import measured

DIFFERENT = "it attended otherwise than in the trace"
LATE = "it did not run when the model was traced"
BEGAN = "it attends, and did not when the model was traced"


@contextmanager
def probed_step(placement: Placement, settings: Settings) -> Iterator[Seen]:
    """See every attention that runs in a model with a plan, as watch() does."""
    step = _ProbedStep(placement, settings)
    late = LateModules(placement)
    STATE.observer = step.note_unplanned
    try:
        with (
            step.fallback.installed(placement.fallbacks),
            placement.probed(KIND, lambda path: slot_of(step.module(path))),
        ):
            yield step.seen
    finally:
        STATE.observer = None
        late.close()
    step.failures += (f"{path}: {LATE}" for path in sorted(late.ran()))
    step.conclude()


class _ProbedStep:
    def __init__(self, placement: Placement, settings: Settings) -> None:
        model, root = placement.model, root_name(placement.model)
        plan = self.plan = placement.plan
        self.settings = settings
        self.seen = Seen(
            lambda path: path or root, partial(plan.declared, model), lambda path: plan.unused_norms.get(path, ())
        )
        self.seen.is_probed = True
        self.seen.fallbacks = {path: placement.reason(path) for path in placement.fallbacks}
        self.fallback = Fallback(model, settings, self.seen)
        self._paths = {id(module): path for path, module in placement.all_modules.items()}
        self.failures: list[str] = []
        self._modules: list[_ProbedModule] = []
        self._own = threading.local()
        self._own.is_here = True

    @property
    def is_here(self) -> bool:
        """True on the thread that measures; an evaluation on another thread runs unseen."""
        return getattr(self._own, "is_here", False)

    def note_unplanned(self) -> None:
        """Note a call of SDPA outside the probed modules, where a module of the model makes it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path = self._paths.get(id(called_module(frame)))
            if path is not None:
                is_new = (
                    not in_backward() and path not in self.seen.fallbacks and f"{path}: {BEGAN}" not in self.failures
                )
                self.failures += [f"{path}: {BEGAN}"] * is_new
                return
            frame = frame.f_back

    def module(self, path: str) -> "_ProbedModule":
        """Return what measures the calls of the module at this path."""
        self._modules.append(_ProbedModule(self, path, self.plan.modules[path]))
        return self._modules[-1]

    def conclude(self) -> None:
        """Warn of what was missed; where nothing was seen at all, refuse."""
        self.seen.settle()
        self.failures += self.fallback.failures
        if not self.seen.calls and not self.failures:
            raise InputError("Expected the model to run, but none of its attentions did.")
        self.failures += (f"{module.path}: {DIFFERENT}" for module in self._modules if not module.runs)
        self._modules.clear()  # which hold this
        self.seen.plan = None if self.failures else self.plan
        if self.failures:
            warnings.warn(
                f"{len(self.failures)} attentions could not be measured by probes; the whole model is traced at the "
                f"next sampled step. The first: {self.failures[0]}",
                NotFollowedWarning,
                stacklevel=4,
            )


@dataclass(eq=False)
class _WaitingCall:
    """A call in a compiled graph whose gradients are to come."""

    lengths: GradientLengths
    planned: PlannedCall | None
    node: int  # of autograd, for the graph that the call is in
    backward: int | None = None  # the one that brought gradients


class _ProbedModule:
    """Measures the calls of one module."""

    def __init__(self, step: _ProbedStep, path: str, plan: ModulePlan) -> None:
        self._step, self.path, self._plan = step, path, plan
        self.runs = 0
        self._waiting: list[_WaitingCall] = []
        self._backward = -1
        self._recomputed: list[tuple[SeenCall, PlannedCall]] = []  # whose gradients come from another run of the same

    def measure(self, number: int, call: Measurable, gradients: GradientLengths | None, is_compiled: bool) -> None:
        """Measure a call, this one in a run of the module; without gradients where no backward will come."""
        if not self._step.is_here:
            return
        self.runs += number == 0
        planned = self._planned(number)
        if gradients is None:
            self._step.seen.without_gradients |= not is_compiled and not torch.is_grad_enabled()
        elif is_compiled:
            node = recorded_operations() - 1  # that of the graph, which autograd makes before it runs
            self._waiting.append(_WaitingCall(gradients, planned, node))
        try:
            self._measure(planned, call, gradients)
        except Exception as error:  # a model that runs must go on running
            self._step.failures.append(f"{self.path}: {type(error).__name__}: {error}")

    def _planned(self, number: int) -> PlannedCall | None:
        return self._plan.calls[number] if number < len(self._plan.calls) else None

    def _measure(self, planned: PlannedCall | None, call: Measurable, gradients: GradientLengths | None) -> None:
        settings = self._step.settings
        if planned is None or not _fits(planned, call):
            self._step.failures.append(f"{self.path}: {DIFFERENT}")
            return
        with torch.no_grad(), without_autocast(call.left if isinstance(call, WrittenOperands) else call.query):
            if isinstance(call, WrittenOperands):
                seen = measured(settings, call, lambda: call.seen(planned, settings.rows))
            else:
                seen = measured(settings, call, lambda: _measure_kernel(planned, call, settings.rows))
        seen.gradients = gradients
        if gradients is None:
            self._recomputed.append((seen, planned))
        self._step.seen.note(self.path, planned.line, seen, (self.runs - 1) % self._plan.depth)

    def add_compiled_gradients(self, first: Tensor, second: Tensor) -> None:
        """Add gradients to the last compiled call that waits for them."""
        waiting = self._next_waiting()
        if waiting is not None:
            waiting.backward = self._backward
            _add_gradients(waiting.lengths, waiting.planned, first, second)
        elif self._recomputed:
            seen, planned = self._recomputed.pop()
            seen.gradients = GradientLengths()
            _add_gradients(seen.gradients, planned, first, second)

    def _next_waiting(self) -> _WaitingCall | None:
        """The last call of the graph whose backward runs that has no gradient of it; else one that never had any.

        A graph that is kept may have several backwards.
        """
        self._backward, node = backward_number(), node_in_backward()
        own = (each for each in reversed(self._waiting) if each.node == node and each.backward != self._backward)
        others = (each for each in reversed(self._waiting) if each.backward is None)
        return next(own, None) or next(others, None)

    def add_gradients(self, lengths: GradientLengths, number: int, first: Tensor, second: Tensor) -> None:
        """Add gradients to this call."""
        _add_gradients(lengths, self._planned(number), first, second)


def _fits(planned: PlannedCall, call: Measurable) -> bool:
    if isinstance(call, WrittenOperands):
        return planned.written is not None and call.fits(planned.written.layout)
    return call.kind == planned.template.kind and planned.fits_kernel(call.query, call.key)


def _add_gradients(lengths: GradientLengths, planned: PlannedCall | None, first: Tensor, second: Tensor) -> None:
    if planned is None:
        return
    if planned.written is not None:
        first, second = planned.written.layout.operands(first, second)
    lengths.add_both(first, second, planned.template.key_owners)


def _measure_kernel(planned: PlannedCall, kernel: KernelCall, rows: int | None) -> SeenCall:
    """Return the planned call with the numbers of this kernel."""
    seen = planned.seen()
    factors = planned.head_factors(kernel.key.shape[1])
    seen.batch, seen.query_len, seen.key_len = len(kernel.query), kernel.query.shape[-2], kernel.key.shape[-2]
    seen.dtype = kernel.query.dtype
    probed = _probe(seen, kernel, rows)
    if probed is not None:
        seen.scales = torch.from_numpy(kernel.scale * factors[0] * factors[1])
        seen.query_norm, seen.key_norm = map(before, probed.lengths.unbind(), factors)
        seen.stats = probed.stats
        return seen
    if seen.attends_itself:
        kernel = replace(kernel, attends_itself=True)
    if kernel.score_mod is not None:
        found = kernel.modified(kernel.score_mod, rows)
    else:  # that a mask is causal, and no bias, was found out by the trace: reading it here would wait for the device
        causal = kernel.is_causal if kernel.visibility.mask is None else seen.causal
        bias = seen.highest_bias if kernel.query.is_cuda else kernel.highest_bias()
        stats, hidden = kernel.stats(rows), kernel.hidden_keys
        found = Found(stats, kernel.scale, kernel.softcap, bias, causal, hidden, kernel.padding)
    seen.causal, seen.softcap, seen.highest_bias = found.causal, found.softcap, max(0.0, found.bias or 0.0)
    seen.stats, seen.padding = found.stats, found.padding
    seen.scales = torch.from_numpy(found.multiplier * factors[0] * factors[1])
    left_out = found.padding, found.hidden_keys
    norms = projected_norms(kernel.query, kernel.key, factors, left_out, rows is None)
    seen.query_norm, seen.key_norm = norms
    seen.cosine = kernel.cosine(found) if seen.biased else None
    return seen


def _probe(seen: SeenCall, kernel: KernelCall, rows: int | None) -> Probed | None:
    """Measure a kernel by the fast path of a GPU, and note its padding; None where that path does not take it."""
    if rows is None or not kernel.query.is_cuda or kernel.score_mod is not None or rows_are_shared():
        return None
    hidden, padding = kernel.hidden_keys, None
    if hidden is not None and seen.attends_itself and hidden.shape[-1] == seen.query_len:
        padding = hidden.expand(seen.batch, -1)
    mask, is_causal = kernel.visibility.mask, kernel.visibility.last is not None
    probed = probe(kernel.query, kernel.key, mask, padding, hidden, kernel.scale, is_causal, rows)
    if probed is not None:
        seen.padding = padding
        seen.causal = kernel.is_causal if mask is None else seen.causal
    return probed
