"""Mean and variance of q·k for independent components of any distribution."""

import math

from attnscale.errors import SettingError


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
