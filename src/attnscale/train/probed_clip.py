"""QK-Clip by probes: maxima in buffers, factors on the device, and reports after the numbers reach the host."""

from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property

import torch
from torch import Tensor

from attnscale.acting.clip import Clipper, ClipReport
from attnscale.acting.clip_state import WriteCheck
from attnscale.acting.parameters import Frozen
from attnscale.acting.replicas import Replicas, heads_of
from attnscale.plain import printable
from attnscale.probes.maxima import MaxBuffers
from attnscale.probes.placement import LateModules, Placement, Structure
from attnscale.watching.layer import Layer

MOST_EMPTY = 4  # initial steps without any attention before the probes are removed
# The numbers of a step are read this many steps later to check the effect of clips; equal on all ranks.
STEPS_UNTIL_OBSERVED = 8


class _StepNumbers:
    """Numbers of a step on their way to the host: maxima and factors of all slots, and counts of unplanned calls."""

    def __init__(self, maxima: Tensor, factors: Tensor, unplanned: Tensor) -> None:
        self.is_over: bool | None = None  # True if a head exceeds the threshold; None until it is reported
        self._sizes = [len(maxima), len(factors), len(unplanned)]
        self._packed = torch.cat([maxima, factors, unplanned])
        self._copied: torch.cuda.Event | None = None
        if self._packed.is_cuda:
            stream = torch.cuda.current_stream(self._packed.device)
            self._packed, self._copied = self._packed.to("cpu", non_blocking=True), torch.cuda.Event()
            self._copied.record(stream)

    @property
    def has_arrived(self) -> bool:
        return self._copied is None or self._copied.query()

    @cached_property
    def on_host(self) -> tuple[Tensor, Tensor, Tensor]:
        """Maxima, factors and counts; waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        maxima, factors, unplanned = self._packed.split(self._sizes)
        return maxima[None], factors, unplanned


class ProbedClip:
    """Clips a model through probes of its maxima, until it is closed."""

    def __init__(
        self,
        placement: Placement,
        layers: Mapping[str, Layer],
        threshold: float,
        replicas: Replicas,
        frozen: Frozen,
        check: WriteCheck,
    ) -> None:
        self._model, self._threshold, self.replicas, self._check = placement.model, threshold, replicas, check
        self._structure = Structure(placement.model)
        self._attends_more_often = False  # than in the trace
        self._was_written, self._empty = False, 0
        self._clipper = Clipper(placement.model, heads_of(layers), threshold, replicas, frozen, check)
        self._buffers = MaxBuffers(placement, layers, threshold, self._clipper.device)
        self._pending = deque[_StepNumbers]()
        self._late = LateModules(placement)
        self._installed = ExitStack()
        self._installed.callback(self._late.close)
        self._installed.enter_context(self._buffers.installed())

    def close(self) -> None:
        """Remove the probes."""
        self._installed.close()

    @property
    def is_current(self) -> bool:
        """True unless a module or parameter was replaced, moved or converted since the trace."""
        return self._clipper.scaler.is_current and self._structure.matches(self._model)

    def misses_calls(self) -> bool:
        """Return True if attentions of any rank run without a probe; False after probes have worked once."""
        if self._was_written:
            return False
        ran = self._buffers.calls()
        answers = self.replicas.gathered((any(ran), all(ran)))
        self._was_written = any(some for some, _ in answers)
        self._empty += not self._was_written
        return any(some and not every for some, every in answers) or self._empty == MOST_EMPTY

    def clip(self) -> list[ClipReport]:
        """Clip the heads that exceeded the threshold in this step; return the reports that have arrived."""
        own, unplanned = self._buffers.read()
        self._buffers.clear_()
        maxima = self.replicas.reduced_(own, "max")
        is_on_host = not maxima.is_cuda
        if is_on_host and not self._check.has_sample and bool((maxima <= self._threshold).all()):
            self._attends_more_often |= bool(unplanned.any())
            return []
        factors = self._clipper.clip_(maxima[None])
        self._pending.append(_StepNumbers(maxima, factors, unplanned))
        reports = self.reports(waits=False)
        while len(self._pending) > (0 if is_on_host or self._clipper.is_due else STEPS_UNTIL_OBSERVED):
            numbers = self._pending.popleft()
            reports += self._report(numbers)
            if numbers.is_over:
                maxima, factors, _ = numbers.on_host
                self._clipper.observe(maxima, factors.numpy())
        self._clipper.restore_if_due()
        return reports

    def unplanned(self) -> list[str]:
        """Return modules that attended for the first time since the last call, or more often than in the trace."""
        more_often = ["a module attends more often than in the trace"] if self._attends_more_often else []
        return sorted(self._late.ran()) + more_often

    def reports(self, waits: bool) -> list[ClipReport]:
        """Return the new reports of steps whose numbers are on the host; with `waits`, of all steps."""
        arrived = [each for each in self._pending if each.is_over is None and (waits or each.has_arrived)]
        return [report for numbers in arrived for report in self._report(numbers)]

    def _report(self, numbers: _StepNumbers) -> list[ClipReport]:
        if numbers.is_over is not None:
            return []
        maxima, factors, unplanned = numbers.on_host
        numbers.is_over = bool((maxima > self._threshold).any())
        self._attends_more_often |= bool(unplanned.any())
        if not numbers.is_over:
            return []
        report = self._clipper.report(maxima, factors.numpy())
        return [report] if report.heads or report.left else []


def why_not_probed(placement: Placement, layers: Mapping[str, Layer]) -> str:
    """Return why probes cannot measure the maxima; empty if they can."""
    reasons = [f"{path or 'the model itself'}: {placement.reason(path)}" for path in placement.fallbacks]
    biased = [name for name, layer in layers.items() if layer.highest_bias or layer.sinks is not None]
    reasons += [f"{name} has more than products of queries and keys in its scores" for name in biased]
    return placement.obstacle() or next(map(printable, reasons), "")
