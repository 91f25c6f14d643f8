"""QK-Clip by probes: maxima in buffers, factors on the device, reports as the numbers reach the host."""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attnscale.acting.clip import Clipper, ClipReport, clip_layers, heads_of
from attnscale.acting.clip_state import WriteCheck
from attnscale.acting.head_rows import HeadRows
from attnscale.acting.parameters import Frozen
from attnscale.acting.replicas import Axis, Floats, device_of
from attnscale.plain import printable
from attnscale.probes.maxima import MaxBuffers
from attnscale.probes.placement import Fallback, Placement, Structure
from attnscale.watching.layer import Layer
from attnscale.watching.seen import Seen
from attnscale.watching.watcher import Settings

MOST_EMPTY = 4  # steps in which no attention runs, before any buffer was written
MOST_PENDING = 64  # steps whose numbers may be on their way
# Steps after which a GPU's numbers are looked at to see whether clips have an effect; on all ranks after as many.
STEPS_UNTIL_OBSERVED = 8


@dataclass(frozen=True, eq=False)
class _Pending:
    """The maxima and factors of a step on their way to the host, then two votes and how many calls were not planned."""

    packed: Tensor
    event: "torch.cuda.Event | None"

    @classmethod
    def of(cls, numbers: Tensor, factors: Tensor, votes: Tensor, unplanned: Tensor) -> "_Pending":
        """Begin to copy what is on the device."""
        packed = torch.cat([numbers[0], factors, votes.to(factors), unplanned.to(factors)[None]])
        if not packed.is_cuda:
            return cls(packed, None)
        event, copied = torch.cuda.Event(), packed.to("cpu", non_blocking=True)
        event.record(torch.cuda.current_stream(packed.device))
        return cls(copied, event)

    @property
    def has_arrived(self) -> bool:
        return self.event is None or self.event.query()

    @property
    def unplanned(self) -> bool:
        return bool(self.packed[-1])

    def unpack(self) -> tuple[Floats, Floats, list[float]]:
        """Wait for maxima (1, slots), factors and votes."""
        if self.event is not None:
            self.event.synchronize()
        found = self.packed[:-3].view(2, -1).numpy()
        return found[:1], found[1], self.packed[-3:-1].tolist()


class ProbedClip:
    """A model with probes of its maxima, and with its fallback modules under the tracer, until it is closed."""

    def __init__(
        self,
        placement: Placement,
        layers: Mapping[str, Layer],
        threshold: float,
        axes: Sequence[Axis],
        frozen: Frozen,
        check: WriteCheck,
    ) -> None:
        model = self._model = placement.model
        self._placement, self._structure, self.axes, self._frozen = placement, Structure(model), axes, frozen
        self.has_unplanned = False  # some module attends more often in a run than it did in the trace
        self._was_written, self._empty = False, 0
        probed = {name: layer for name, layer in layers.items() if layer.module not in placement.fallbacks}
        self._clipper = Clipper(model, heads_of(probed), threshold, axes, frozen, check)
        self._buffers = MaxBuffers(placement, probed, threshold, device_of(model))
        self._unreported, self._unobserved = deque[_Pending](), deque[_Pending]()
        self._probes, self._traced = ExitStack(), ExitStack()
        self._probes.enter_context(self._buffers.installed())
        self._trace_fallbacks()

    def _trace_fallbacks(self) -> None:
        if not self._placement.fallbacks:
            return
        root = self._placement.root_name
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
        return self._clipper.scaler.is_current and self._structure.matches(self._model)

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
            report = clip_layers(self._model, dict(self._seen.layers), self._clipper.threshold, (), self._frozen)
            self._trace_fallbacks()
            if report.heads or report.left:
                found = [*found[:-1], _joined(found[-1], report) if found else report]
        return found

    def _clip_probed(self) -> list[ClipReport]:
        own, unplanned = self._buffers.read()
        self._buffers.clear_()
        numbers, votes = self._clipper.agreed(own[None])
        is_on_host = numbers.device.type == "cpu"
        if is_on_host and bool((numbers <= self._clipper.threshold).all()) and not votes.any():
            self.has_unplanned |= bool(unplanned)
            return []
        pending = _Pending.of(numbers, self._clipper.clip_(numbers), votes, unplanned)
        self._unreported.append(pending)
        self._unobserved.append(pending)
        self._observe(0 if is_on_host else STEPS_UNTIL_OBSERVED)
        return self.arrived(waits=len(self._unreported) > MOST_PENDING)

    def _observe(self, remaining: int) -> None:
        while len(self._unobserved) > remaining:
            self._clipper.observe(*self._unobserved.popleft().unpack())
        if self._clipper.is_due:
            while self._unobserved:
                self._clipper.observe(*self._unobserved.popleft().unpack())
            self._clipper.settle()

    def arrived(self, waits: bool) -> list[ClipReport]:
        """Return the reports of steps whose numbers have reached the host."""
        found = []
        while self._unreported and (waits or self._unreported[0].has_arrived):
            pending = self._unreported.popleft()
            numbers, factors, _ = pending.unpack()
            self.has_unplanned |= pending.unplanned
            report = self._clipper.report(numbers, factors)
            if report.heads or report.left:
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
        blocks = HeadRows(placement.model, heads_of(own), "write").blocks()
        parameters.append({id(placement.model.get_parameter(block.name)) for block, _ in blocks})
    return f"{names} must be traced, and shares parameters with other layers" if parameters[0] & parameters[1] else ""


def _joined(first: ClipReport, second: ClipReport) -> ClipReport:
    return ClipReport(first.threshold, first.heads + second.heads, first.left + second.left)
