"""Line: one layer of the table."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from attnscale.diagnose import Finding
from attnscale.diagnose.finding import severity_rank
from attnscale.diagnose.verdict import layer_verdict
from attnscale.measure.statistics import Place, in_place
from attnscale.watching import Layer

UNSEEN = "no keys"  # a layer that ran, and of which no row saw a key
# A verdict that nothing was found to be wrong with.
EXCUSED = {"saturated": "sharp", "diluted": "flat"}
MEANINGS = {
    "sharp": "near or past the freezing point, while gradients pass: trained heads may be so on purpose",
    "flat": "weights nearly uniform, as small initial projections leave them; the scale is not to blame",
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
    verdict: str
    severity: str | None  # of the worst finding about it
    code: str | None  # of that finding

    @property
    def spread(self) -> float:
        """The one statistic that a layer is known by."""
        return self.statistics["spread"]

    @property
    def judgement(self) -> str:
        """The code of a warning or an error about the layer, else the verdict from theory, excused."""
        if self.code and self.severity in ("warning", "error"):
            return self.code
        return EXCUSED.get(self.verdict, self.verdict)

    def to_dict(self) -> dict[str, Any]:
        """The line as one flat table of plain values."""
        flat = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "statistics"}
        return flat | {"errors": dict(self.errors)} | dict(self.statistics)


def line_of(layer: Layer, findings: list[Finding]) -> Line:
    """The line of a layer; `findings` are those about it."""
    verdict = layer_verdict(layer)
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
        verdict=UNSEEN if verdict is None else verdict.verdict,
        severity=None if worst is None else worst.severity,
        code=None if worst is None else worst.code,
    )


def expected_spread(layer: Layer) -> float:
    """|a| ‖q‖ ‖k‖ / √d_k: what a·q·k spreads by for independent directions of these norms, a the expected scale."""
    norms = float((layer.query_norm.double() * layer.key_norm.double()).nanmean())
    return abs(layer.scale_expected) * norms / math.sqrt(layer.head_dim)
