"""Finding: one problem or note about an attention layer, one of its heads, or a run."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attnscale.plain import printable
from attnscale.watching.layer import Layer

# Severities in ascending order.
SEVERITIES = ("note", "warning", "error")
WHOLE_MODEL = "the whole model"

CODES = {
    "unscaled": "the scores reach the softmax as q·k, without a scale",
    "scaled_by_dim": "the scores are divided by d_k, or by √d_k twice",
    "scaled_by_model_dim": "the scores are divided by √d_model, the width before the split into heads",
    "unusual_scale": "the scores are multiplied by something that no rule explains",
    "config_mismatch": "the scale applied is not the one that the model's configuration sets",
    "scale_after_softmax": "the weights or the output are scaled, where the scores should be",
    "scale_depends_on_mode": "the scores are multiplied by one number in training and by another in evaluation",
    "softmax_wrong_axis": "the softmax does not run over the keys that the values are summed over",
    "weights_not_normalised": "the weights do not sum to one where they meet the values",
    "softmax_twice": "a softmax is taken of the weights of a softmax",
    "dropout_before_softmax": "dropout is applied to the scores, before the softmax",
    "dropout_in_evaluation": "dropout is applied in evaluation mode too",
    "undefined_rows": "every key of a row is hidden, and its weights are NaN",
    "attends_to_future": "a layer sees later keys in a stack that is causal elsewhere",
    "softcap_before_scale": "the soft-cap is applied before the scale, which makes it lower than it says",
    "heads_mispaired": "heads that share a key do not share its value",
    "no_gradient": "queries or keys are detached, and their projection does not learn",
    "qk_norm_freezes": "normalised queries and keys are multiplied past the critical spread from the start",
    "inert_qk_norm": "a QK-norm is configured or built, and never applied",
    "inert_softcap": "a soft-cap is configured or computed, and cannot bind",
    "inert_mask": "a mask sets scores to a number that hides nothing",
    "diluted": "the multiplier leaves the scores so close that all keys weigh the same",
    "sharp": "the scores of a row lie so far apart that a few keys take all the weight",
    "exploding": "the largest score is beyond what published runs have survived",
    "non_finite": "scores are NaN or infinite",
    "loss_diverges": "the loss diverges while the scores of all layers are in range",
}


@dataclass(frozen=True)
class Finding:
    """One problem or note: its code (one of CODES), place, severity, numbers and advice."""

    layer: str  # empty: the whole model
    head: int | None  # None: the whole layer
    code: str
    severity: str
    message: str
    measured: float | None
    expected: float | None
    advice: str

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return printable(f"{self.severity}: {self.place}: {self.code}: {self.message} {self.advice}")

    @property
    def place(self) -> str:
        """Layer, and head if the finding is about one head."""
        layer = self.layer or WHOLE_MODEL
        return layer if self.head is None else f"{layer}, head {self.head}"


def layer_finding(
    layer: Layer,
    code: str,
    message: str,
    advice: str,
    numbers: tuple[float | None, float | None] = (None, None),
    severity: str = "warning",
) -> Finding:
    """Return a finding about a whole layer; `numbers` are (measured, expected)."""
    return Finding(layer.name, None, code, severity, message, *numbers, advice)


def severity_rank(severity: str) -> int:
    """Return 0 for a note, 1 for a warning, 2 for an error."""
    return SEVERITIES.index(severity)


def worst(findings: Iterable[Finding]) -> str | None:
    """Return the worst severity among findings; None if there are none."""
    return max((finding.severity for finding in findings), key=severity_rank, default=None)


@dataclass(frozen=True)
class Group:
    """Findings of the same code and severity; the first is shown in full."""

    findings: tuple[Finding, ...]

    @property
    def first(self) -> Finding:
        """Finding that is shown."""
        return self.findings[0]

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers of all findings, without duplicates."""
        return tuple(dict.fromkeys(finding.layer for finding in self.findings))

    @property
    def others(self) -> str:
        """Number of the other findings, as in `and 3 more heads, in 2 layers`; empty for a single finding."""
        more = len(self.findings) - 1
        if more == 0:
            return ""
        by_head = any(finding.head is not None for finding in self.findings)
        what = f"{more} more {'head' if by_head else 'layer'}{'s' if more > 1 else ''}"
        return f"and {what}" if not by_head or len(self.layers) == 1 else f"and {what}, in {len(self.layers)} layers"

    def __str__(self) -> str:
        first = self.first
        place = f"{first.place}{f' {self.others}' if self.others else ''}"
        return printable(f"{first.severity}: {place}: {first.code}: {first.message} {first.advice}")

    def where(self, layers: int) -> str:
        """Return the layer and its heads for a single layer, else the number of layers."""
        if len(self.layers) > 1:
            return f"{len(self.layers)} of {layers} layers"
        heads = [str(finding.head) for finding in self.findings if finding.head is not None]
        which = f", {'head' if len(heads) == 1 else 'heads'} {', '.join(heads)}" if heads else ""
        return f"{self.layers[0] or WHOLE_MODEL}{which}"


def grouped(findings: Sequence[Finding]) -> tuple[Group, ...]:
    """Group findings by code and severity; sort by severity (worst first), then by number of layers."""
    found: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        found.setdefault((finding.code, finding.severity), []).append(finding)
    groups = [Group(tuple(same)) for same in found.values()]
    return tuple(sorted(groups, key=lambda group: (-severity_rank(group.first.severity), -len(group.layers))))
