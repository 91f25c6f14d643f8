"""Line: one layer of the table."""

import math
from dataclasses import dataclass

from torch import Tensor

from attnscale.diagnose import Finding
from attnscale.diagnose.finding import severity_rank
from attnscale.diagnose.verdict import layer_verdict
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
    spread: float
    expected_spread: float  # were q and k of these norms independent, and multiplied by the expected scale
    scale: float
    expected_scale: float
    entropy_ratio: float
    top1: float
    saturated: float
    gradient_gain: float
    verdict: str
    severity: str | None  # of the worst finding about it
    code: str | None  # of that finding

    @property
    def judgement(self) -> str:
        """The code of a warning or an error about the layer, else the verdict from theory, excused."""
        if self.code and self.severity in ("warning", "error"):
            return self.code
        return EXCUSED.get(self.verdict, self.verdict)


def line_of(layer: Layer, findings: list[Finding]) -> Line:
    """The line of a layer; `findings` are those about it."""
    stats, verdict = layer.stats, layer_verdict(layer)
    worst = max(findings, key=lambda finding: severity_rank(finding.severity), default=None)
    return Line(
        name=layer.name,
        heads=layer.heads,
        head_dim=layer.head_dim,
        spread=_mean(stats.std),
        expected_spread=expected_spread(layer),
        scale=layer.scale_applied,
        expected_scale=layer.scale_expected,
        entropy_ratio=_mean(stats.entropy_ratio),
        top1=_mean(stats.top1),
        saturated=_mean(stats.saturated),
        gradient_gain=_mean(stats.gradient_gain),
        verdict=UNSEEN if verdict is None else verdict.verdict,
        severity=None if worst is None else worst.severity,
        code=None if worst is None else worst.code,
    )


def expected_spread(layer: Layer) -> float:
    """|a| ‖q‖ ‖k‖ / √d_k: what a·q·k spreads by for independent directions of these norms, a the expected scale."""
    norms = _mean(layer.query_norm.double() * layer.key_norm.double())
    return abs(layer.scale_expected) * norms / math.sqrt(layer.head_dim)


def _mean(values: Tensor) -> float:
    return float(values.double().nanmean())
