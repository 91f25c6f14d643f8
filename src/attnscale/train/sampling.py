"""State of a monitor between sampled steps: the plan for probes, and the factors of QK-Clip."""

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
LASTING = 32  # successive complete probed steps that reset the count of incomplete ones


class Sampling:
    """Keeps the plan of a model between its sampled steps."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._plan: Plan | None = None
        self._placement: Placement | None = None  # placement of the plan's probes
        self._missed = 0  # probed steps that missed some attention
        self._complete = 0  # complete probed steps since then
        self._structure: Structure | None = None  # structure of the model when last measured
        self._obstacle = ""  # reason why the last step was traced despite a plan

    def watched(self, settings: Settings) -> AbstractContextManager[Seen]:
        """Return the context of a sampled step: probed if there is a plan, otherwise traced."""
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
        """Drop the plan until the step has ended without an error."""
        self._plan = None

    def note_nothing_seen(self, seen: Seen) -> None:
        """Record a step in which no attention ran."""
        self._missed += seen.is_probed

    def note(self, seen: Seen) -> None:
        """Record a step that ended without an error."""
        if seen.is_probed and seen.plan is None:
            self._missed, self._complete = self._missed + 1, 0
        elif seen.is_probed:
            self._complete += 1
            self._missed = 0 if self._complete == LASTING else self._missed
        self._plan = seen.plan

    def notices(self, seen: Seen) -> Iterator[AttnscaleWarning]:
        """Yield warnings about how a step was measured; call it before note()."""
        if seen.without_gradients:
            yield NotRecordedWarning(
                "Attention ran with gradients off, as in reentrant activation checkpointing, so the gradients of its "
                "queries and keys are not recorded. To record them, use checkpoint(…, use_reentrant=False)."
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


Logs = Mapping[tuple[str, int], float]  # logarithms of factors, by layer and head


@dataclass(frozen=True)
class Clipped:
    """Logarithms of QK-Clip's total factors at the previous record and at this one; None without a clip."""

    before: Logs
    until: Logs | None

    def with_factors(self, record: LayerRecord, name: str, layer: LayerFacts | None, part: int) -> LayerRecord:
        """Return the record with the clip factors of this rank's part of the heads; NaN for heads of other ranks."""
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
    """Total factors of QK-Clip at the beginning of sampled steps."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: Logs = clip_logs(model) or {}
        self._until: Logs | None = None

    def begin(self) -> None:
        """Begin a sampled step; waits for factors from a GPU."""
        self._until = clip_logs(self._model)

    def since(self) -> Clipped:
        """Return the factors since the previous record."""
        found = Clipped(self._before, self._until)
        self._before = {} if self._until is None else self._until
        return found
