"""A softmax whose input was scores, followed on to the values that its weights mix."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from attnscale.tracing.lineage import Node, follow
from attnscale.tracing.parameters import Origin, Origins


class Sighting(Protocol):
    """What is noted of an attention after its softmax."""

    mixes_along_softmax: bool
    factor_after_softmax: float
    origins: Origins


@dataclass(eq=False)
class Softmax:
    """What is known of a softmax once it ran; `axis` is the one it normalises."""

    sighting: Any  # a Sighting
    axis: int
    report: Callable[[Any], None] | None = None
    waits: bool = False  # it is attention only if its weights go on to mix values
    mixed: bool = False  # they did; pieces of them may do so several times, multiplied by the same constant

    def ran(self) -> None:
        """Its weights exist."""
        if not self.waits:
            self._report()

    def mixes(self, weights: Node, axis: int, values: Origin | None = None) -> None:
        """Values are summed along `axis` of these weights: note whether that is the axis which sums to one."""
        self._report()
        self.sighting.origins.value = values
        if weights.shape[axis] < 2:
            return
        points = np.zeros((2, len(weights.shape)), dtype=np.int64)
        points[1, axis] = 1
        for trail in follow(weights, points):
            if len(trail.points) == 2 and trail.node.weights is self:
                moved = (trail.points[0] != trail.points[1]).nonzero()[0]
                self.sighting.mixes_along_softmax &= bool((moved == self.axis).any())
                self.sighting.factor_after_softmax *= 1.0 if self.mixed else float(trail.factor[0])
                self.mixed = True

    def _report(self) -> None:
        if self.report is not None:
            self.report(self.sighting)
            self.report = None

    def scaled(self, factor: float) -> None:
        """The mixed values were multiplied by a constant."""
        self.sighting.factor_after_softmax *= factor
