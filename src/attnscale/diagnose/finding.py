"""Finding: one thing that is wrong, or worth knowing, about an attention layer or one of its heads."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from attnscale.plain import printable

# From the least to the worst.
SEVERITIES = ("note", "warning", "error")

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
    "dropout_before_softmax": "scores are dropped, where weights should be",
    "dropout_in_evaluation": "weights are dropped at random, and the model is not in training",
    "undefined_rows": "every key of a row is hidden, and its weights are NaN",
    "attends_to_future": "a layer sees later keys in a stack that is causal elsewhere",
    "softcap_before_scale": "the soft-cap is applied before the scale, which makes it lower than it says",
    "heads_mispaired": "heads that share a key do not share its value",
    "no_gradient": "queries or keys are detached, and their projection does not learn",
    "qk_norm_freezes": "normalised queries and keys are multiplied past the freezing point from the start",
    "inert_qk_norm": "a QK-norm is configured or built, and never applied",
    "inert_softcap": "a soft-cap is configured or computed, and cannot bind",
    "inert_mask": "a mask sets scores to a number that hides nothing",
    "diluted": "the multiplier leaves the scores so close that all keys weigh the same",
    "saturated": "the scores of a row lie so far apart that a few keys take all the weight",
    "exploding": "the largest score is beyond what published runs have survived",
    "non_finite": "scores are NaN or infinite",
}


@dataclass(frozen=True)
class Finding:
    """What was found (`code`, one of CODES), where, how bad it is, the numbers, and what to do."""

    layer: str
    head: int | None  # None: the whole layer
    code: str
    severity: str
    message: str
    measured: float | None
    expected: float | None
    advice: str

    def to_dict(self) -> dict[str, Any]:
        """The finding as JSON takes it."""
        return asdict(self)

    def __str__(self) -> str:
        return printable(f"{self.severity}: {self.place}: {self.code}: {self.message} {self.advice}")

    @property
    def place(self) -> str:
        """The layer, and the head where it is about one."""
        return self.layer if self.head is None else f"{self.layer}, head {self.head}"


def severity_rank(severity: str) -> int:
    """0 for a note, 1 for a warning, 2 for an error."""
    return SEVERITIES.index(severity)


def worst(findings: Iterable[Finding]) -> str | None:
    """The worst severity among findings; None where there are none."""
    return max((finding.severity for finding in findings), key=severity_rank, default=None)
