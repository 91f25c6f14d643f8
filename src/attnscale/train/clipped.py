"""Factors that QK-Clip took from a model between the forwards of two records."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from attnscale.acting.clip_state import taken_from
from attnscale.train.record import LayerRecord
from attnscale.watching.seen import LayerFacts

Logs = Mapping[tuple[str, int], float]  # of factors, by layer and head


@dataclass(frozen=True)
class Clipped:
    """Factors since the record before, with the logarithms of all that was taken until then; None: nobody clips."""

    before: Logs
    until: Logs | None

    def told_in(self, record: LayerRecord, name: str, layer: LayerFacts | None, part: int) -> LayerRecord:
        """Return a record with the factors of this rank's heads, the `part` of all; NaN for those of other ranks."""
        if layer is None:
            return record
        factors = None
        if self.until is not None:
            heads = len(record.numbers["max"])
            first = 0 if heads == layer.heads else part * layer.heads
            own = [
                self.until.get((name, head), 0.0) - self.before.get((name, head), 0.0) for head in range(layer.heads)
            ]
            factors = [math.nan] * heads
            factors[first : first + layer.heads] = [math.exp(log) for log in own]
        return replace(record, softcap=layer.softcap, clipped=factors, uncompiled=layer.is_fallback)


class Clips:
    """Remembers what had been taken when a sampled step began."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: Logs = taken_from(model) or {}
        self._until: Logs | None = None

    def begin(self) -> None:
        """Begin a sampled step: wait for factors on their way from a device."""
        self._until = taken_from(self._model)

    def since(self) -> Clipped:
        """Return the factors between the record before and this one."""
        found = Clipped(self._before, self._until)
        self._before = {} if self._until is None else self._until
        return found
