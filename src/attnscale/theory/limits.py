"""Limits of softmax: the critical spread, the lowest entropy, and the score at which it saturates."""

import math

from attnscale.errors import SettingError

SATURATED_TOP1 = 0.99  # p(1 − p), the gradient of the weight to its own score, is then below 0.01
# At this spread H ≈ ln n − σ²/2 is within 0.02 nats of uniform weights.
DILUTED_SPREAD = 0.2
# Above this share of the critical spread, few keys get most of the weight: σ = 2.98 at n = 1024, expected top-1 0.27.
CRITICAL_MARGIN = 0.8


def critical_spread(keys: int) -> float:
    """Return the critical spread √(2 ln n): above it, a few of n Gaussian scores get nearly all the weight."""
    if keys < 1:
        raise SettingError(f"Expected at least one key, got {keys}.")
    return math.sqrt(2 * math.log(keys))


def regime(spread: float, keys: int) -> str:
    """Return `diluted`, `healthy` or `sharp` for a spread over this many keys."""
    if spread < DILUTED_SPREAD:
        return "diluted"
    return "healthy" if spread < CRITICAL_MARGIN * critical_spread(keys) else "sharp"


def entropy_floor(spectral_bound: float, keys: int) -> float:
    """Return the lowest entropy of softmax over scores with ‖QKᵀ‖ ≤ σ: σReparam, Theorem 3.1 (Zhai et al. 2023).

    ln(1 + (T−1)β) + σ√(T(T−1)) β / (1 + (T−1)β), with β = exp(−σ√(T/(T−1))).
    """
    if keys < 2:
        return 0.0
    others = keys - 1
    beta = math.exp(-spectral_bound * math.sqrt(keys / others))
    return math.log1p(others * beta) + spectral_bound * math.sqrt(keys * others) * beta / (1 + others * beta)


def saturation_point(keys: int, weight: float = SATURATED_TOP1) -> float:
    """Return the x at which softmax([x, 0, …, 0]) over n keys gives its first key this weight: ln(w (n−1) / (1−w)).

    >>> round(saturation_point(4), 2)
    5.69
    """
    if keys < 2 or not 0 < weight < 1:
        raise SettingError(f"Expected at least 2 keys and a weight between 0 and 1, got keys={keys}, weight={weight}.")
    return math.log(weight * (keys - 1) / (1 - weight))
