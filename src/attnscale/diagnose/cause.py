"""Explain why scores are large or small: s = a ‖q‖ ‖k‖ cos θ, so the multiplier, the norms or the alignment.

Each factor is compared with its value for independent components of unit variance: a with 1/√d_k (or the scale that the
model declares), each norm with √d_k, the root mean square of the cosine with 1/√d_k. The logarithms of the factors add
up to that of the scores, so the factor with the largest logarithm is the main cause.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnscale.plain import readable
from attnscale.watching.layer import Layer

LEAST = 1e-300  # keeps the logarithm of a zero finite


@dataclass(frozen=True)
class Cause:
    """Ratio of each factor of the scores to its expected value, and a sentence about the main factor."""

    multiplier: float
    norms: float
    alignment: float
    factor: str  # the main factor: `multiplier`, `norms` or `alignment`
    sentence: str


@dataclass(frozen=True)
class Change:
    """Δ ln|s| between two checkpoints, split by factor; `total` is the sum."""

    multiplier: float
    query_norm: float
    key_norm: float
    alignment: float

    @property
    def total(self) -> float:
        """Δ ln of the root mean square score."""
        return self.multiplier + self.query_norm + self.key_norm + self.alignment

    def grown_factor(self, least: float = 0.0) -> str:
        """Return `multiplier`, `norms` or `alignment`, which grew most; empty if none grew by more than `least`."""
        grown = {"multiplier": self.multiplier, "norms": self.query_norm + self.key_norm, "alignment": self.alignment}
        candidates = {name: each for name, each in grown.items() if each > least}  # without NaN
        return max(candidates, key=lambda name: candidates[name], default="")

    def __str__(self) -> str:
        return (
            f"scores × {readable(math.exp(self.total))}: scale × {readable(math.exp(self.multiplier))}, "
            f"‖q‖ × {readable(math.exp(self.query_norm))}, ‖k‖ × {readable(math.exp(self.key_norm))}, "
            f"alignment × {readable(math.exp(self.alignment))}"
        )


def cause(layer: Layer, head: int | None = None) -> Cause:
    """Return the main reason why the spread of a head, or of the whole layer, is not one."""
    scale, expected = abs(_at(layer.scales, head)), layer.scale_expected
    query_norm, key_norm = _at(layer.query_norm, head), _at(layer.key_norm, head)
    alignment, unit = _at(layer.alignment, head), math.sqrt(layer.head_dim)
    ratios = {
        "multiplier": scale / max(abs(expected), LEAST),
        "norms": query_norm * key_norm / unit**2,
        "alignment": alignment * unit,
    }
    sentences = {
        "multiplier": f"The scale is {readable(scale)}, not {readable(expected)}.",
        "norms": f"The norms are {'large' if ratios['norms'] > 1 else 'small'}: ‖q‖ is {readable(query_norm)} and ‖k‖ "
        f"{readable(key_norm)}; components of unit variance give √d_k = {unit:.3g}.",
        "alignment": f"Queries and keys {'are aligned' if ratios['alignment'] > 1 else 'are nearly orthogonal'}: their "
        f"cosine is {alignment:.3g} (root mean square); independent ones have 1/√d_k = {1 / unit:.3g}.",
    }
    distances = {name: abs(math.log(max(ratio, LEAST))) for name, ratio in ratios.items() if math.isfinite(ratio)}
    factor = max(distances, key=lambda name: distances[name], default="norms")  # farthest from one, up or down
    return Cause(**ratios, factor=factor, sentence=sentences[factor])


def _at(values: Tensor, head: int | None) -> float:
    """Return the value of one head or the geometric mean over heads, so that logarithms of factors add up."""
    logs: Tensor = torch.as_tensor(values).double().abs().clamp(min=LEAST).log()
    return math.exp(float(logs.mean() if head is None else logs[head]))
