"""One sampled step of a Monitor: installs probes for the step and records each measured call in a Seen."""

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import numpy as np
import torch
from torch import Tensor

from attnscale.errors import InputError, NotFollowedWarning
from attnscale.measure.cuda.sampled import WrittenScores, probe, probe_scores
from attnscale.measure.lengths import add_lengths_
from attnscale.measure.sampling import design
from attnscale.numerics import constant_on, wide_dtype, without_autocast
from attnscale.probes.calls import NumbersBuffer, ProbedCall, finish
from attnscale.probes.intercept import MODIFICATIONS, AttentionCall
from attnscale.probes.placement import Fallback, LateModules, Placement
from attnscale.probes.stats import KIND, AddGradients, Slot, slot_of
from attnscale.torch_internals import called_module, dispatch_keys, in_backward, with_dispatch_keys
from attnscale.visibility import NEVER_A_SCORE, Visibility
from attnscale.watching.call import NORMED_ROWS, PROBED_ROWS
from attnscale.watching.kernels import KernelCall
from attnscale.watching.kernels.sdpa import modified_by
from attnscale.watching.plan import ModulePlan, PlannedCall
from attnscale.watching.rows import Rows, spread_positions
from attnscale.watching.sdpa_names import STATE
from attnscale.watching.seen import Seen
from attnscale.watching.watcher import Settings
from attnscale.watching.written_call import DISAGREEMENT, fit

DIFFERENT = "its attention differs from the trace"
LATE = "it did not run when the model was traced"
BEGAN = "it attends now, but did not when the model was traced"


@contextmanager
def probed_step(placement: Placement, settings: Settings) -> Iterator[Seen]:
    """Measure every attention of a model with a plan, like watch()."""
    step = _ProbedStep(placement, settings)
    late = LateModules(placement)
    STATE.observer = step.note_unplanned
    try:
        with step.fallback.installed(placement.fallbacks), placement.probed(KIND, step.slot):
            yield step.seen
    finally:
        STATE.observer = None
        late.close()
        for module in step.modules:
            module.end()
        for call in step.calls:
            call.is_over = True
    step.failures += (f"{path}: {LATE}" for path in sorted(late.ran()))
    step.conclude()


class _ProbedStep:
    def __init__(self, placement: Placement, settings: Settings) -> None:
        model, root = placement.model, placement.root_name
        plan = self.plan = placement.plan
        self.settings = settings
        self.seen = Seen(
            lambda path: path or root, partial(plan.declared, model), lambda path: plan.unused_norms.get(path, ())
        )
        self.seen.is_probed = True
        self.seen.fallbacks = {path: placement.reason(path) for path in placement.fallbacks}
        self.fallback = Fallback(model, settings, self.seen)
        self.failures: list[str] = []
        self.calls: list[ProbedCall] = []
        self._placement = placement
        self.modules: list[ModuleProbe] = []
        self._own = threading.local()
        self._own.is_own_thread = True
        self._dispatch_keys = dispatch_keys()  # saved, because a compiled graph may change them
        for buffer in placement.buffers.values():
            buffer.begin()

    @property
    def is_own_thread(self) -> bool:
        """True on the thread that measures; an evaluation on another thread is not measured."""
        return getattr(self._own, "is_own_thread", False)

    def buffer(self, device: torch.device) -> NumbersBuffer:
        """Return the buffer on a device."""
        buffers = self._placement.buffers
        if device not in buffers:
            modules = self.plan.modules.values()
            heads = max(call.template.heads for module in modules for call in module.calls)
            calls = sum(len(module.calls) * module.depth for module in modules)
            buffers[device] = NumbersBuffer(device, calls, heads)
        return buffers[device]

    def measure(self, call: ProbedCall, inputs: AttentionCall) -> None:
        """Measure and record a call."""
        if inputs.modification is not None:
            with torch.no_grad(), without_autocast(inputs.query), with_dispatch_keys(self._dispatch_keys):
                _measure_flex(call, inputs, self.settings)
        elif inputs.is_written or not _measure_by_kernel(call, inputs, self.settings):
            measure = _measure_by_scores if inputs.is_written else _measure_by_rows
            with torch.no_grad(), without_autocast(inputs.query):
                measure(call, inputs, self.settings)
        self.calls.append(call)
        self.seen.note(call.planned.module, call.planned.line, call, call.depth)

    def note_unplanned(self) -> None:
        """Record a call of SDPA by a module of the model that has no probe."""
        paths = self._placement.paths
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path = paths.get(id(called_module(frame)))
            if path is not None:
                is_new = (
                    not in_backward() and path not in self.seen.fallbacks and f"{path}: {BEGAN}" not in self.failures
                )
                self.failures += [f"{path}: {BEGAN}"] * is_new
                return
            frame = frame.f_back

    def slot(self, path: str) -> Slot:
        """Return the tensors of the module at this path; every step reuses them."""
        if path not in self._placement.slots:
            module = ModuleProbe(path, self.plan.modules[path])
            self._placement.slots[path] = module, slot_of(module)
        module, slot = self._placement.slots[path]
        module.begin(self)
        self.modules.append(module)
        return slot

    def conclude(self) -> None:
        """Warn of missed attentions; raise InputError if none ran at all."""
        finish(self.calls, list(self._placement.buffers.values()))
        self.failures += self.fallback.failures
        if not self.seen.calls and not self.failures:
            raise InputError("Expected the model to run, but none of its attentions did.")
        self.failures += (f"{module.path}: {DIFFERENT}" for module in self.modules if not module.runs)
        self.seen.plan = None if self.failures else self.plan
        if self.failures:
            warnings.warn(
                f"{len(self.failures)} attentions could not be measured by probes; the whole model is traced at the "
                f"next sampled step. The first: {self.failures[0]}",
                NotFollowedWarning,
                stacklevel=4,
            )


class ModuleProbe:
    """Measures the calls of one module; every sampled step reuses it."""

    def __init__(self, path: str, plan: ModulePlan) -> None:
        self.path, self._plan = path, plan
        self.step: _ProbedStep | None = None  # the current step; None between sampled steps

        self.runs = 0  # runs of the module in this step
        self._waiting: list[ProbedCall] = []  # compiled calls before their backward pass
        self._without: list[ProbedCall] = []  # calls without gradients; a recomputation may still provide them

    def begin(self, step: _ProbedStep) -> None:
        """Start measuring for a step."""
        self.step, self.runs = step, 0

    def end(self) -> None:
        """Stop measuring, and release the calls of the step."""
        self.step = None
        self._waiting.clear()
        self._without.clear()

    def measure(self, number: int, inputs: AttentionCall, learns: bool, is_compiled: bool) -> AddGradients | None:
        """Measure call `number` of the module's run; return a function that adds the gradients of its operands."""
        step = self.step
        if step is None or not step.is_own_thread:
            return None
        self.runs += number == 0
        planned = self._plan.calls[number] if number < len(self._plan.calls) else None
        if not learns:
            step.seen.without_gradients |= not is_compiled and not torch.is_grad_enabled()
        try:
            call = None if planned is None else self._call(step, planned, inputs)
            if call is None:
                step.failures.append(f"{self.path}: {DIFFERENT}")
                return None
            step.measure(call, inputs)
        except Exception as error:  # a failed measurement must not stop the model
            step.failures.append(f"{self.path}: {type(error).__name__}: {error}")
            return None
        if not learns:
            self._without.append(call)
        elif is_compiled:
            self._waiting.append(call)
        return call.add_gradients if learns else None

    def _call(self, step: _ProbedStep, planned: PlannedCall, inputs: AttentionCall) -> ProbedCall | None:
        """Return a call with these sizes and a row of the buffer; None if it differs from the plan."""
        depth = (self.runs - 1) % self._plan.depth
        if inputs.is_written and inputs.scores is not None:
            written = planned.written
            if written is None or written.layout.code != inputs.layout:
                return None
            if not written.layout.fits(inputs.scores, inputs.query, inputs.key):
                return None
            batch, _, query_len, key_len = written.layout.scores_by_head(inputs.scores).shape
            key_heads = len(planned.factors[1])
        else:
            kind = "sdpa" if inputs.modification is None else "flex"
            if planned.template.kind != kind or not planned.fits_kernel(inputs.query, inputs.key):
                return None
            _, key_heads, key_len, _ = inputs.key.shape
            batch, _, query_len, _ = inputs.query.shape
        softcap = planned.template.softcap
        place, numbers = step.buffer(inputs.query.device).next(planned.template.heads)
        return ProbedCall(
            planned, depth, batch, query_len, key_len, inputs.query.dtype, key_heads, softcap, place, numbers
        )

    def add_compiled_gradients(self, first: Tensor, second: Tensor) -> None:
        """Add gradients to the last call without any, since a backward pass visits calls in reverse order.

        Gradients of a second backward pass through the same graph are ignored.
        """
        waiting = self._waiting or self._without
        if waiting:
            waiting.pop().add_gradients(first, second)


def _measure_by_kernel(call: ProbedCall, inputs: AttentionCall, settings: Settings) -> bool:
    """Measure a call by a GPU kernel that writes to the buffer; return False if the kernel does not support it."""
    if not inputs.query.is_cuda or settings.rows is None:
        return False
    hidden = inputs.hidden_keys
    leaves_rows_out = inputs.attends_itself and hidden is not None and hidden.shape[-1] == call.query_len
    call.probed = probe(
        inputs.query, inputs.key, inputs.mask, hidden, leaves_rows_out, inputs.is_causal, inputs.scale, settings.rows,
        call.buffer.table, call.buffer.lengths,
    )  # fmt: skip
    if call.probed is None:
        return False
    call.padding = hidden.expand(call.batch, -1) if leaves_rows_out and hidden is not None else None
    call.multiplier = inputs.scale
    return True


def _measure_by_rows(call: ProbedCall, inputs: AttentionCall, settings: Settings) -> None:
    """Measure a call of SDPA by its rows, like a trace."""
    seen = Visibility.of(inputs.mask, inputs.is_causal)
    kernel = KernelCall(
        "sdpa", inputs.query, inputs.key, inputs.scale, visibility=seen, hidden=inputs.hidden_keys,
        attends_itself=inputs.attends_itself,
    )  # fmt: skip
    call.stats, call.padding, call.multiplier = kernel.stats(settings.rows), kernel.padding, inputs.scale
    _add_lengths(call, inputs.query, inputs.key, kernel.padding, kernel.hidden_keys, settings)


def _measure_flex(call: ProbedCall, inputs: AttentionCall, settings: Settings) -> None:
    """Measure a call of FlexAttention by its rows: apply score_mod and mask_mod to the scores of the rows."""
    assert inputs.modification is not None  # otherwise it is a call of SDPA
    functions, buffers = inputs.modification
    score_mod, mask_mod, own = MODIFICATIONS[functions]
    modify = modified_by(score_mod, mask_mod, buffers[:own], buffers[own:])
    kernel = KernelCall("flex", inputs.query, inputs.key, inputs.scale, attends_itself=inputs.attends_itself)
    found = kernel.modified(modify, settings.rows)
    call.stats, call.padding, call.multiplier = found.stats, found.padding, float(found.multiplier)
    _add_lengths(call, inputs.query, inputs.key, found.padding, found.hidden_keys, settings)


def _measure_by_scores(call: ProbedCall, inputs: AttentionCall, settings: Settings) -> None:
    """Measure a hand-written attention from its scores, without a synchronisation."""
    planned, rows = call.planned.written, settings.rows
    assert planned is not None  # calls of SDPA have no scores
    assert inputs.scores is not None
    scores = planned.layout.scores_by_head(inputs.scores)
    query, key = planned.layout.operands(inputs.query, inputs.key)
    by_key = scores.amax(-2)  # reads all scores once
    hidden = by_key.amax(1) <= NEVER_A_SCORE
    padding = hidden if inputs.attends_itself and call.key_len == call.query_len else None

    def rows_at(positions: Tensor) -> tuple[Tensor, Tensor]:
        chosen = scores.index_select(-2, positions.to(scores.device, non_blocking=True))
        chosen = chosen.to(wide_dtype(chosen))
        return chosen, chosen > NEVER_A_SCORE

    highest, is_uneven = by_key.amax((0, 2)), planned.is_uneven or padding is not None
    call.padding = padding
    chosen = None if rows is None else design(rows, call.query_len, call.batch, is_uneven)
    if chosen is not None:
        written = WrittenScores(scores, query, key, hidden)
        scale = _scale_arguments(call.planned, scores)
        numbers = call.buffer.table, call.buffer.lengths, call.buffer.scales
        call.probed = probe_scores(written, padding is not None, highest.float(), scale, chosen, *numbers)
    if call.probed is None:
        by_row = Rows(len(scores), call.heads, call.query_len, call.key_len, is_uneven, rows_at).without(padding)
        call.stats = by_row.measure(rows, highest.double)
        call.buffer.scales.copy_(_scales(call.planned, scores, query, key))
        _add_lengths(call, query, key, padding, hidden, settings)


def _add_lengths(
    call: ProbedCall, query: Tensor, key: Tensor, padding: Tensor | None, hidden: Tensor | None, settings: Settings
) -> None:
    """Add the norms of all queries and keys, or of evenly spaced ones if rows are sampled."""
    sides = []
    for vectors, left_out in ((query, padding), (key, hidden)):
        step = 1 if settings.rows is None else max(1, vectors.shape[-2] // NORMED_ROWS)
        sides.append((vectors.detach()[:, :, ::step], None if left_out is None else left_out[:, ::step]))
    (query, padding), (key, hidden) = sides
    add_lengths_(call.buffer.lengths, query, key, padding, hidden)


def _scale_arguments(planned: PlannedCall, scores: Tensor) -> tuple[Tensor, Tensor, Tensor, float | None, float]:
    """Return the arguments from which a scale is measured.

    They are: positions of rows, the planned multiplier of q·k, the scale that corresponds to it, the soft-cap, and the
    smallest relative difference from the plan that is not ignored.
    """
    written = planned.written
    assert written is not None
    factors = np.abs(planned.factors[0]) * np.abs(planned.factors[1])
    device, positions = scores.device, spread_positions(scores.shape[-2], PROBED_ROWS).numpy()
    constants = (constant_on(device, each) for each in (positions, written.multiplier, written.multiplier * factors))
    rows, multiplier, stated = constants
    return rows, multiplier, stated, planned.template.softcap, DISAGREEMENT if written.is_constant else 0.0


def _scales(planned: PlannedCall, scores: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the planned scale, or the measured slope of the scores over q·k if the two disagree."""
    rows, multiplier, stated, softcap, disagreement = _scale_arguments(planned, scores)
    of_product = _wide(query[0, :, rows]) @ _wide(key[0]).mT
    of_product = of_product * multiplier.to(of_product.dtype)[:, None, None]
    found = _wide(scores[0, :, rows])
    shown = found > NEVER_A_SCORE
    if softcap is not None:
        found = softcap * torch.atanh((found / softcap).clamp(-1, 1))
        shown = shown & torch.isfinite(found)
        found = found.masked_fill(~shown, 0.0)
    slope, _ = fit(of_product, found, shown)
    return torch.where((slope - 1).abs() > disagreement, stated * slope, stated)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(wide_dtype(tensor))
