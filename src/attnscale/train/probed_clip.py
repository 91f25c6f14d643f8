"""QK-Clip by probes: maxima in buffers, factors on the device, and reports after the numbers reach the host."""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnscale.acting.clip import Clipper, ClipReport, heads_of
from attnscale.acting.clip_state import WriteCheck
from attnscale.acting.parameters import Frozen
from attnscale.acting.replicas import Axis, Floats, device_of
from attnscale.plain import printable
from attnscale.probes.maxima import MaxBuffers
from attnscale.probes.placement import Placement, Structure
from attnscale.watching.layer import Layer

MOST_EMPTY = 4  # initial steps without any attention before the probes are removed
MOST_PENDING = 64  # steps with numbers still on the GPU before a report waits for them
# The numbers of a step are read this many steps later to check the effect of clips; equal on all ranks.
STEPS_UNTIL_OBSERVED = 8


@dataclass(frozen=True, eq=False)
class _Pending:
    """Numbers of a step on their way to the host: maxima, factors, two votes, and the number of unplanned calls."""

    packed: Tensor
    event: "torch.cuda.Event | None"
    slots: int

    @classmethod
    def of(cls, numbers: Tensor, factors: Tensor, votes: Tensor, unplanned: Tensor) -> "_Pending":
        """Start to copy the numbers to the host."""
        packed = torch.cat([numbers[0], factors, votes.to(factors), unplanned.to(factors)[None]])
        if not packed.is_cuda:
            return cls(packed, None, numbers.shape[1])
        event, copied = torch.cuda.Event(), packed.to("cpu", non_blocking=True)
        event.record(torch.cuda.current_stream(packed.device))
        return cls(copied, event, numbers.shape[1])

    @property
    def has_arrived(self) -> bool:
        return self.event is None or self.event.query()

    @cached_property
    def _numbers(self) -> Floats:
        if self.event is not None:
            self.event.synchronize()
        return self.packed.numpy()

    @property
    def maxima(self) -> Floats:
        """Largest score of each slot above the threshold, (1, slots); waits for the copy."""
        return self._numbers[: self.slots][None]

    @property
    def factors(self) -> Floats:
        return self._numbers[self.slots : 2 * self.slots]

    @property
    def votes(self) -> list[float]:
        found: list[float] = self._numbers[2 * self.slots : -1].tolist()
        return found

    @property
    def has_unplanned(self) -> bool:
        return bool(self._numbers[-1])


class ProbedClip:
    """Clips a model through probes of its maxima, until it is closed."""

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
        self._structure, self.axes = Structure(model), axes
        self.has_unplanned = False  # True if a module attends more often per run than in the trace
        self._was_written, self._empty = False, 0
        self._clipper = Clipper(model, heads_of(layers), threshold, axes, frozen, check)
        self._buffers = MaxBuffers(placement, layers, threshold, device_of(model))
        self._unreported, self._unobserved = deque[_Pending](), deque[_Pending]()
        self._installed = ExitStack()
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
        answers = [(any(ran), all(ran))]
        for axis in self.axes:
            answers = [each for of_rank in axis.gathered(answers) for each in of_rank]
        self._was_written = any(some for some, _ in answers)
        self._empty += not self._was_written
        return any(some and not every for some, every in answers) or self._empty == MOST_EMPTY

    def clip(self) -> list[ClipReport]:
        """Clip the heads that exceeded the threshold in this step; return the reports that have arrived."""
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
        """Check the effect of clips for all steps except the `remaining` last ones."""
        while len(self._unobserved) > (0 if self._clipper.is_due else remaining):
            pending = self._unobserved.popleft()
            if not self._is_quiet(pending):
                self._clipper.observe(pending.maxima, pending.factors, pending.votes)
        self._clipper.settle()

    def _is_quiet(self, pending: _Pending) -> bool:
        """Return True if no head exceeded the threshold and no rank voted: there is nothing to observe or report."""
        return bool((pending.maxima <= self._clipper.threshold).all()) and not any(pending.votes)

    def arrived(self, waits: bool) -> list[ClipReport]:
        """Return the reports of the steps with numbers on the host; `waits` for all others too."""
        found = []
        while self._unreported and (waits or self._unreported[0].has_arrived):
            pending = self._unreported.popleft()
            self.has_unplanned |= pending.has_unplanned
            if not self._is_quiet(pending):
                report = self._clipper.report(pending.maxima, pending.factors)
                found += [report] if report.heads or report.left else []
        return found


def why_not_probed(placement: Placement, layers: Mapping[str, Layer]) -> str:
    """Return why probes cannot measure the maxima; empty if they can."""
    reasons = [f"{path or 'the model itself'}: {placement.reason(path)}" for path in placement.fallbacks]
    biased = [name for name, layer in layers.items() if layer.highest_bias or layer.sinks is not None]
    reasons += [f"{name} has more than products of queries and keys in its scores" for name in biased]
    return placement.obstacle() or next(map(printable, reasons), "")
