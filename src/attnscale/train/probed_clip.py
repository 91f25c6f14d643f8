"""QK-Clip by probes: maxima in buffers, factors on the device, reports as the numbers reach the host."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attnscale.acting.clip import ClipReport, clip_qk_
from attnscale.acting.clip_history import note_taken
from attnscale.acting.clipper import Clipper
from attnscale.acting.folding import Folding
from attnscale.acting.replicas import Axis, device_of
from attnscale.plain import printable
from attnscale.probes.maxima import MaxBuffers
from attnscale.probes.placement import Fallback, Placement, Structure
from attnscale.watching.layer import Layer
from attnscale.watching.seen import Seen
from attnscale.watching.settings import Settings

MOST_EMPTY = 4  # steps in which no attention runs, before any buffer was written
MOST_PENDING = 64  # steps whose numbers may be on their way


@dataclass(frozen=True)
class TracedLayers:
    """The layers of a traced step, as clip_qk_ takes them."""

    layers: Mapping[str, Layer]


@dataclass(frozen=True, eq=False)
class _Pending:
    """The maxima and factors of a step on their way to the host, and behind them how many calls were not planned."""

    numbers: Tensor
    event: "torch.cuda.Event | None"

    @property
    def has_arrived(self) -> bool:
        return self.event is None or self.event.query()


class ProbedClip:
    """A model with probes of its maxima, and with its fallback modules under the tracer, until it is closed."""

    def __init__(
        self, placement: Placement, layers: Mapping[str, Layer], threshold: float, axes: Sequence[Axis]
    ) -> None:
        model = self._model = placement.model
        self._placement, self._structure, self.axes = placement, Structure(model), axes
        self.has_unplanned = False  # some module attends more often in a run than it did in the trace
        self._was_written, self._empty = False, 0
        probed = {name: layer for name, layer in layers.items() if layer.module not in placement.fallbacks}
        self._clipper = Clipper(model, probed, threshold, axes)
        self._buffers = MaxBuffers(placement, probed, threshold, device_of(model))
        self._pending: list[_Pending] = []
        self._probes, self._traced = ExitStack(), ExitStack()
        self._probes.enter_context(self._buffers.installed())
        self._trace_fallbacks()

    def _trace_fallbacks(self) -> None:
        if not self._placement.fallbacks:
            return
        root = type(self._model).__name__
        declare = partial(self._placement.plan.declared, self._model)
        self._seen = Seen(lambda path: path or root, declare, lambda _: ())
        fallback = Fallback(self._model, Settings(None, training=True, may_be_empty=True), self._seen)
        self._traced.enter_context(fallback.installed(self._placement.fallbacks))

    def close(self) -> None:
        """Remove the probes."""
        self._traced.close()
        self._probes.close()

    @property
    def is_current(self) -> bool:
        """True if the modules and parameters are those that were traced, where they were."""
        return self._clipper.is_current and self._structure.matches(self._model)

    def misses_calls(self) -> bool:
        """Return True if the model, or its part on another rank, attends where no probe is; asked until one ran."""
        if self._was_written:
            return False
        ran = self._buffers.calls()
        told = [(any(ran), all(ran))]
        for axis in self.axes:
            told = [each for of_rank in axis.gathered(told) for each in of_rank]
        self._was_written = any(some for some, _ in told)
        self._empty += not self._was_written
        return any(some and not every for some, every in told) or self._empty == MOST_EMPTY

    def clip(self) -> list[ClipReport]:
        """Clip what passed the threshold since the last step; return the reports that are known by now."""
        found = self._clip_probed()
        if self._placement.fallbacks:
            self._traced.close()
            report = clip_qk_(self._model, TracedLayers(dict(self._seen.layers)), self._clipper.threshold)
            self._trace_fallbacks()
            if report.heads or report.left:
                found = [*found[:-1], _joined(found[-1], report) if found else report]
        return found

    def _clip_probed(self) -> list[ClipReport]:
        own, unplanned = self._buffers.read()
        self._buffers.clear_()
        maxima = self._clipper.slots.agreed(own)
        is_on_host = maxima.device.type == "cpu"
        if is_on_host and bool((maxima <= self._clipper.threshold).all()):
            self.has_unplanned |= bool(unplanned)
            return []
        factors = self._clipper.factors(maxima)
        self._clipper.multiply_(factors)
        numbers = torch.cat([maxima.double(), factors, unplanned.double()[None]])
        event = None if not maxima.is_cuda else torch.cuda.Event()
        numbers = numbers.to("cpu", non_blocking=not is_on_host)
        if event is not None:
            event.record(torch.cuda.current_stream(maxima.device))
        self._pending.append(_Pending(numbers, event))
        return self.arrived(waits=len(self._pending) > MOST_PENDING)

    def arrived(self, waits: bool) -> list[ClipReport]:
        """Return the reports of steps whose numbers have reached the host."""
        found = []
        while self._pending and (waits or self._pending[0].has_arrived):
            pending = self._pending.pop(0)
            if pending.event is not None:
                pending.event.synchronize()
            maxima, factors = pending.numbers[:-1].view(2, -1).numpy()
            self.has_unplanned |= bool(pending.numbers[-1])
            report = self._clipper.report(maxima, factors)
            if report is not None:
                note_taken(self._model, report.factors)
                found.append(report)
        return found


def why_not_probed(placement: Placement, layers: Mapping[str, Layer], axes: Sequence[Axis]) -> str:
    """Return why maxima cannot be taken by probes; empty where they can."""
    obstacle = placement.obstacle()
    if obstacle:
        return obstacle
    for name, layer in layers.items():
        if layer.module not in placement.fallbacks and (layer.highest_bias or layer.sinks is not None):
            return f"{printable(name)} has more than products of queries and keys in its scores"
    return _why_not_alone(placement, layers, axes) if placement.fallbacks else ""


def _why_not_alone(placement: Placement, layers: Mapping[str, Layer], axes: Sequence[Axis]) -> str:
    """Return why fallback modules cannot be clipped apart from the others."""
    names = ", ".join(map(printable, placement.fallbacks))
    if axes:
        return f"every rank would have to trace {names}"
    parameters = []
    for is_fallback in (True, False):
        own = {name: layer for name, layer in layers.items() if (layer.module in placement.fallbacks) == is_fallback}
        blocks = Folding(placement.model, own).blocks()
        parameters.append({id(placement.model.get_parameter(block.name)) for block, _ in blocks})
    return f"{names} must be traced, and shares parameters with other layers" if parameters[0] & parameters[1] else ""


def _joined(first: ClipReport, second: ClipReport) -> ClipReport:
    return ClipReport(first.threshold, first.heads + second.heads, first.left + second.left)


class Coverage:
    """Which modules attended at any traced step, and whether one trace can show all of them."""

    MOST_TRACED = 4  # steps, none of which shows all that attends

    def __init__(self) -> None:
        self.known: set[str] = set()  # late modules that were traced since
        self._awaited: set[str] = set()  # those that ran and were not traced since
        self._attended: frozenset[str] = frozenset()
        self._incomplete = 0  # traced steps that did not show all
        self._times_exceeded = 0

    def begin(self) -> None:
        """Note that probes were installed."""
        self._incomplete = 0

    def await_(self, modules: set[str]) -> None:
        """Note late modules that ran untraced."""
        self._awaited |= modules

    def is_incomplete(self, late: set[str], attending: frozenset[str]) -> bool:
        """Return True if a traced step, in which these late modules ran, does not show all that attends."""
        self.known |= late
        self._awaited -= late
        self._attended |= attending
        found = bool(self._awaited) or not self._attended <= attending
        self._incomplete += found
        return found

    def exceeds_again(self) -> bool:
        """Note that a module attended more often in a run than in the trace; return True if it did so before."""
        self._times_exceeded += 1
        return self._times_exceeded > 1

    @property
    def why_not_probed(self) -> str:
        """Why no trace shows all that attends; empty while one may."""
        return "some of its attentions run at some steps only" if self._incomplete >= self.MOST_TRACED else ""
