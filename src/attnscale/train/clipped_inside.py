"""QK-Clip where a model attends: maxima on tapes, factors on the device, reports as the numbers reach the host."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnscale.acting.clip import ClipReport
from attnscale.acting.clipper import Clipper
from attnscale.acting.replicas import Axis, device_of
from attnscale.inside.places import Places
from attnscale.inside.structure import Structure
from attnscale.inside.tapes import Tapes
from attnscale.watching.layer import Layer

MOST_EMPTY = 4  # steps in which nobody attends, before a tape was ever written
MOST_WAITING = 64  # steps whose numbers may be on their way


@dataclass(frozen=True, eq=False)
class _Arriving:
    """The maxima and factors of a step, on their way to the host."""

    numbers: Tensor  # and behind them, how many calls were not known
    event: "torch.cuda.Event | None"

    @property
    def is_here(self) -> bool:
        return self.event is None or self.event.query()


class ClippedInside:
    """A model whose modules carry tapes, until it is left."""

    def __init__(
        self, model: nn.Module, places: Places, layers: Mapping[str, Layer], threshold: float, axes: Sequence[Axis]
    ) -> None:
        self._model, self._structure = model, Structure(model)
        self.axes, self._is_tried, self._empty = axes, False, 0
        self.exceeds = False  # some module attends more often in a run than it did when it was followed
        self._clipper = Clipper(model, layers, threshold, axes)
        self._tapes = Tapes(places, layers, threshold, device_of(model))
        self._arriving: list[_Arriving] = []
        self._stack = ExitStack()
        self._stack.enter_context(self._tapes.looked_at())

    def leave(self) -> None:
        """Take the tapes away."""
        self._stack.close()

    @property
    def is_current(self) -> bool:
        """Whether it is the model that was looked at, and lies where it lay: tapes and parameters are known by that."""
        return self._clipper.is_current and self._structure.is_that_of(self._model)

    def misses(self) -> bool:
        """Whether the model, or its part on another rank, attends where no tape is: asked until one did attend."""
        if self._is_tried:
            return False
        told = [(self._tapes.was_any_written(), self._tapes.were_all_written())]
        for axis in self.axes:
            told = [each for of_rank in axis.gathered(told) for each in of_rank]
        self._is_tried = any(some for some, _ in told)
        self._empty += not self._is_tried
        return any(some and not every for some, every in told) or self._empty == MOST_EMPTY

    def clip(self) -> list[ClipReport]:
        """Clip what passed the threshold since the last step; reports of what is known by now."""
        own, not_known = self._tapes.read()
        self._tapes.wipe_()
        maxima = self._clipper.slots.agreed(own)
        is_here = maxima.device.type == "cpu"
        if is_here and bool((maxima <= self._clipper.threshold).all()):
            self.exceeds |= bool(not_known)
            return []
        factors = self._clipper.factors(maxima)
        self._clipper.multiply_(factors)
        numbers = torch.cat([maxima.double(), factors, not_known.double()[None]]).to("cpu", non_blocking=not is_here)
        event = None if is_here or not maxima.is_cuda else torch.cuda.current_stream(maxima.device).record_event()
        self._arriving.append(_Arriving(numbers, event))
        return self.arrived(waits=len(self._arriving) > MOST_WAITING)

    def arrived(self, waits: bool) -> list[ClipReport]:
        """The reports of steps whose numbers have reached the host."""
        found = []
        while self._arriving and (waits or self._arriving[0].is_here):
            arriving = self._arriving.pop(0)
            if arriving.event is not None:
                arriving.event.synchronize()
            maxima, factors = arriving.numbers[:-1].view(2, -1).numpy()
            self.exceeds |= bool(arriving.numbers[-1])
            report = self._clipper.report(maxima, factors)
            if report is not None:
                found.append(report)
        return found
