"""Sampling: what a monitor keeps of a model between sampled steps: its plan for probes, and what QK-Clip took."""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from torch import nn

from attnscale.acting.clip_state import clip_logs
from attnscale.errors import AttnscaleWarning, NotInsideWarning, NotRecordedWarning
from attnscale.probes.placement import Placement, Structure
from attnscale.probes.step import probed_step
from attnscale.train.record import LayerRecord
from attnscale.watching import Seen
from attnscale.watching.plan import Plan
from attnscale.watching.seen import LayerFacts
from attnscale.watching.watch import watched
from attnscale.watching.watcher import Settings

MOST_MISSED = 2  # probed steps that may miss attentions; after that every sampled step is traced
LASTING = 32  # complete probed steps, one after the other, that end the count of those which missed attentions


class Sampling:
    """Remembers the plan of a model between its sampled steps."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._plan: Plan | None = None
        self._placement: Placement | None = None  # of the plan
        self._missed = 0  # probed steps that missed some attention
        self._complete = 0  # probed steps since then
        self._structure: Structure | None = None  # of the model, when it was last measured
        self._obstacle = ""  # why the last traced step could not have had probes

    def watched(self, settings: Settings) -> AbstractContextManager[Seen]:
        """Return the context of a sampled step: with probes where there is a plan, and traced elsewhere."""
        if self._structure is None or not self._structure.matches(self._model):
            self._plan, self._structure, self._missed = None, Structure(self._model), 0
        if self._plan is not None and self._missed < MOST_MISSED:
            if self._placement is None or self._placement.plan is not self._plan:
                self._placement = Placement(self._model, self._plan)
            self._obstacle = self._placement.obstacle()
            if not self._obstacle:
                return probed_step(self._placement, settings)
        return watched(self._model, settings)

    def begin_conclusion(self) -> None:
        """Forget the plan until the step has been seen to its end."""
        self._plan = None

    def note_nothing_seen(self, seen: Seen) -> None:
        """Note a step in which no attention was seen."""
        self._missed += seen.is_probed

    def note(self, seen: Seen) -> None:
        """Note a step that was seen to its end."""
        if seen.is_probed and seen.plan is None:
            self._missed, self._complete = self._missed + 1, 0
        elif seen.is_probed:
            self._complete += 1
            self._missed = 0 if self._complete == LASTING else self._missed
        self._plan = seen.plan

    def notices(self, seen: Seen) -> Iterator[AttnscaleWarning]:
        """Yield what the user should know about how a step was measured, before note()."""
        if seen.without_gradients:
            yield NotRecordedWarning(
                "Attention ran with gradients off, as reentrant activation checkpointing runs it, so the gradients "
                "that reach its queries and keys are not seen; checkpoint(…, use_reentrant=False) shows them."
            )
        if seen.is_probed and seen.fallbacks:
            which = "; ".join(f"{path}: {reason}" for path, reason in seen.fallbacks.items())
            yield NotInsideWarning(
                "At sampled steps some modules run uncompiled under the tracer, because no probe can be placed in "
                f"them: {which}."
            )
        if not seen.is_probed and (seen.plan is None or self._obstacle or self._missed >= MOST_MISSED):
            why = self._obstacle or (seen.obstacle if seen.plan is None else "they missed attentions twice")
            yield NotInsideWarning(
                f"At sampled steps the whole model is traced{', uncompiled' if seen.is_compiled else ''}, because no "
                f"probes can be placed in it: {why}."
            )


Logs = Mapping[tuple[str, int], float]  # of factors, by layer and head


@dataclass(frozen=True)
class Clipped:
    """Logarithms of QK-Clip's factors, until the record before and until this one; None without a clip."""

    before: Logs
    until: Logs | None

    def with_factors(self, record: LayerRecord, name: str, layer: LayerFacts | None, part: int) -> LayerRecord:
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
    """The factors of QK-Clip when a sampled step began."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: Logs = clip_logs(model) or {}
        self._until: Logs | None = None

    def begin(self) -> None:
        """Begin a sampled step: wait for factors from a GPU."""
        self._until = clip_logs(self._model)

    def since(self) -> Clipped:
        """Return the factors between the record before and this one."""
        found = Clipped(self._before, self._until)
        self._before = {} if self._until is None else self._until
        return found
