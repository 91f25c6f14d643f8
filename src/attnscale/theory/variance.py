"""Mean and variance of q·k for independent components of any distribution, and of q and k at initialisation.

For zero-mean inputs of variance v, q = W x + b has Var(q) = fan_in · Var(W) · v over tokens. A random bias adds a mean
to each component, with variance Var(b) over components.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from attnscale.errors import SettingError

TORCH_LINEAR_GAIN = math.sqrt(1 / 3)  # nn.Linear draws from U(±1/√fan_in), of variance 1/(3 fan_in)


def score_mean(head_dim: int, query_mean: float = 0.0, key_mean: float = 0.0) -> float:
    """Return E[q·k] = d μ_q μ_k."""
    return head_dim * query_mean * key_mean


def score_variance(
    head_dim: int,
    query_mean: float = 0.0,
    query_variance: float = 1.0,
    key_mean: float = 0.0,
    key_variance: float = 1.0,
) -> float:
    """Return Var[q·k] = d (σ_q²σ_k² + μ_q²σ_k² + σ_q²μ_k²), which is d for mean 0 and variance 1.

    >>> score_variance(64)
    64.0
    """
    across_keys = row_variance(head_dim, query_mean, query_variance, key_variance)
    return across_keys + head_dim * query_variance * key_mean**2


def row_variance(
    head_dim: int, query_mean: float = 0.0, query_variance: float = 1.0, key_variance: float = 1.0
) -> float:
    """Return the part of Var[q·k] that softmax responds to, d (σ_q²σ_k² + μ_q²σ_k²).

    The third term, σ_q²μ_k², shifts all scores of a row, which softmax ignores.
    """
    return head_dim * (query_variance + query_mean**2) * key_variance


def unit_variance_scale(variance: float) -> float:
    """Return the multiplier a with a² Var[q·k] = 1: 1/√d_k exactly if Var[q·k] = d_k."""
    if not 0 < variance < math.inf:
        raise SettingError(f"Expected a positive, finite variance to scale to one, got {variance}.")
    return 1 / math.sqrt(variance)


@dataclass(frozen=True)
class Initialisation:
    """A weight distribution: `weight_variance(fan_in, fan_out)`, `bias_variance(fan_in)`.

    >>> round(Initialisation.parse("normal:0.02").projected_variance(fan_in=768, fan_out=768), 4)
    0.3072
    """

    name: str
    gain: float

    @classmethod
    def parse(cls, text: str) -> "Initialisation":
        """Parse `name` or `name:number`: the standard deviation of `normal`, the gain of the others."""
        name, _, number = text.strip().lower().partition(":")
        name = name.replace("-", "_").removesuffix("_uniform").removesuffix("_normal") or name
        if name not in WEIGHT_VARIANCE:
            raise SettingError(
                f"Unknown initialisation {text!r}. Expected one of: {', '.join(sorted(WEIGHT_VARIANCE))}; "
                "a number may follow, as in 'normal:0.02' (standard deviation) or 'xavier:0.5' (gain)."
            )
        if name == "normal" and not number:
            raise SettingError("The initialisation 'normal' needs its standard deviation, as in 'normal:0.02'.")
        try:
            gain = float(number) if number else 1.0
        except ValueError:
            gain = math.nan
        if not 0 < gain < math.inf:
            raise SettingError(f"Expected a positive number after the colon of {text!r}, got {number!r}.")
        return cls(name, gain)

    def weight_variance(self, fan_in: int, fan_out: int) -> float:
        """Return the variance of one weight."""
        return self.gain * self.gain * WEIGHT_VARIANCE[self.name](fan_in, fan_out)

    def bias_variance(self, fan_in: int) -> float:
        """Return the variance of one bias: nn.Linear draws it like the weights, the other schemes set it to zero."""
        return self.weight_variance(fan_in, fan_in) if self.name == "torch" else 0.0

    def projected_variance(self, fan_in: int, fan_out: int, input_variance: float = 1.0) -> float:
        """Return Var(Wx) over tokens, for zero-mean inputs of the given variance."""
        return fan_in * self.weight_variance(fan_in, fan_out) * input_variance

    def __str__(self) -> str:
        return self.name if self.gain == 1.0 else f"{self.name}:{self.gain:g}"


WEIGHT_VARIANCE: dict[str, Callable[[int, int], float]] = {
    "xavier": lambda fan_in, fan_out: 2 / (fan_in + fan_out),  # Glorot & Bengio 2010
    "kaiming": lambda fan_in, fan_out: 2 / fan_in,  # He et al. 2015, gain √2 for ReLU
    "lecun": lambda fan_in, fan_out: 1 / fan_in,  # LeCun et al. 1998; muP's hidden weights
    "torch": lambda fan_in, fan_out: TORCH_LINEAR_GAIN**2 / fan_in,
    "normal": lambda fan_in, fan_out: 1.0,  # the gain is the standard deviation
    "orthogonal": lambda fan_in, fan_out: 1 / max(fan_in, fan_out),  # Saxe et al. 2014
}
