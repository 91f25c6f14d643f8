"""Line: one layer of the table."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from attnscale.diagnose import Finding
from attnscale.diagnose.finding import severity_rank
from attnscale.diagnose.verdict import head_verdicts, verdict_word
from attnscale.measure.statistics import Place, in_place
from attnscale.watching import Layer

MEANINGS = {
    "saturated": "near or past the freezing point, where a few keys take most of the weight",
    "diluted": "the weights hardly differ, as small initial projections leave them",
    "uncertain": "within its standard error of a limit, or of an unknown error; looking at more rows would tell",
}


@dataclass(frozen=True)
class Line:
    """One layer, as the mean of its heads; NaN where nothing finite was seen."""

    name: str
    heads: int
    head_dim: int
    statistics: Mapping[str, float]  # those of Place.CHECK
    errors: Mapping[str, float]  # their standard errors, where only some rows were looked at
    expected_spread: float  # were q and k of these norms independent, and multiplied by the expected scale
    scale: float
    expected_scale: float
    verdict: str  # the code of the worst warning or error about it, else what its heads are
    heads_by_verdict: Mapping[str, int]
    severity: str | None  # of the worst finding about it
    code: str | None  # of that finding

    @property
    def spread(self) -> float:
        """The one statistic that a layer is known by."""
        return self.statistics["spread"]

    @property
    def judgement(self) -> str:
        """The verdict, and of how many heads where not of all."""
        number = self.heads_by_verdict.get(self.verdict, self.heads)
        return self.verdict if number == self.heads else f"{self.verdict} ({number} of {self.heads} heads)"

    def to_dict(self) -> dict[str, Any]:
        """The line as one flat table of plain values."""
        flat = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "statistics"}
        flat |= {"errors": dict(self.errors), "heads_by_verdict": dict(self.heads_by_verdict)}
        return flat | dict(self.statistics)


def line_of(layer: Layer, findings: list[Finding]) -> Line:
    """The line of a layer; `findings` are those about it."""
    worst = max(findings, key=lambda finding: severity_rank(finding.severity), default=None)
    return Line(
        name=layer.name,
        heads=layer.heads,
        head_dim=layer.head_dim,
        statistics={entry.name: entry.whole(layer.stats) for entry in in_place(Place.CHECK)},
        errors={
            entry.name: error for entry in in_place(Place.CHECK) if not math.isnan(error := entry.error(layer.stats))
        },
        expected_spread=expected_spread(layer),
        scale=layer.scale_applied,
        expected_scale=layer.scale_expected,
        verdict=verdict_word(layer, findings),
        heads_by_verdict=Counter(head.verdict for head in head_verdicts(layer)),
        severity=None if worst is None else worst.severity,
        code=None if worst is None else worst.code,
    )


def expected_spread(layer: Layer) -> float:
    """|a| ‖q‖ ‖k‖ / √d_k: what a·q·k spreads by for independent directions of these norms, a the expected scale."""
    norms = float((layer.query_norm.double() * layer.key_norm.double()).nanmean())
    return abs(layer.scale_expected) * norms / math.sqrt(layer.head_dim)
