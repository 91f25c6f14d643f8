"""Attention as in a textbook: NumPy, float64, the full matrix. Tests use it as the reference."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def softmax(x: ArrayLike, axis: int = -1) -> Array:
    """Return e^x / Σ e^x, with the maximum subtracted first; a row of −∞ alone (no visible key) gives zeros."""
    x = np.asarray(x, dtype=np.float64)
    highest = x.max(axis=axis, keepdims=True, initial=-np.inf)
    exponentials = np.exp(x - np.where(np.isneginf(highest), 0.0, highest))
    total = exponentials.sum(axis=axis, keepdims=True)
    return np.asarray(exponentials / np.where(total == 0.0, 1.0, total))


stable_softmax = softmax  # the name that a textbook gives it


def softmax_jacobian(p: ArrayLike) -> Array:
    """Return ∂p_i/∂x_j = p_i (δ_ij − p_j), from the probabilities p."""
    p = np.asarray(p, dtype=np.float64)
    return np.asarray(p[..., :, None] * np.eye(p.shape[-1]) - p[..., :, None] * p[..., None, :])


def attention_scores(
    Q: ArrayLike,
    K: ArrayLike,
    scale: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    softcap: float | None = None,
) -> Array:
    """Return softcap · tanh(scale · QKᵀ / softcap) + mask; a boolean mask is True where a key is visible."""
    Q, K = np.asarray(Q, dtype=np.float64), np.asarray(K, dtype=np.float64)
    scale = Q.shape[-1] ** -0.5 if scale is None else np.asarray(scale, dtype=np.float64)
    scores = scale * (Q @ np.swapaxes(K, -1, -2))
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    if mask is None:
        return np.asarray(scores)
    mask = np.asarray(mask)
    return np.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else np.asarray(scores + mask)


def scaled_dot_product_attention(
    Q: ArrayLike,
    K: ArrayLike,
    V: ArrayLike,
    scale: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    softcap: float | None = None,
) -> tuple[Array, Array]:
    """Return softmax(scale · QKᵀ) V and the weights; the default scale is 1/√d_k.

    >>> output, weights = scaled_dot_product_attention(np.eye(2), np.eye(2), np.eye(2))
    >>> weights.round(3)
    array([[0.67, 0.33],
           [0.33, 0.67]])
    """
    weights = softmax(attention_scores(Q, K, scale, mask, softcap))
    return np.asarray(weights @ np.asarray(V, dtype=np.float64)), weights


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of the softmax of each row; NaN if a row sees too few keys."""

    visible: Array  # n_i, number of visible keys
    max: Array
    lse: Array  # ln Σ e^s
    top1: Array  # the largest weight
    entropy: Array  # H = −Σ p ln p, nats
    entropy_ratio: Array  # H / ln n_i
    participation: Array  # Σ p²
    effective_keys: Array  # 1 / Σ p²
    jacobian_trace: Array  # 1 − Σ p², the trace of the softmax Jacobian
    jacobian_norm2: Array  # ‖diag(p) − p pᵀ‖²_F


def row_statistics(scores: ArrayLike) -> RowStatistics:
    """Return the statistics of the softmax of each row of scores; −∞ hides a key."""
    scores = np.asarray(scores, dtype=np.float64)
    p = softmax(scores)
    visible = np.isfinite(scores).sum(-1).astype(np.float64)
    sees_keys = np.where(visible > 0, 1.0, np.nan)
    highest = scores.max(-1, initial=-np.inf)
    top1 = p.max(-1, initial=0.0) * sees_keys
    entropy = -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1) * sees_keys
    square, cube = (p**2).sum(-1) * sees_keys, (p**3).sum(-1)
    return RowStatistics(
        visible=visible,
        max=highest,
        lse=highest - np.log(top1),
        top1=top1,
        entropy=entropy,
        entropy_ratio=entropy / np.log(np.where(visible > 1, visible, np.nan)),
        participation=square,
        effective_keys=1.0 / square,
        jacobian_trace=1.0 - square,
        jacobian_norm2=square - 2 * cube + square**2,
    )


def score_moments(scores: ArrayLike) -> tuple[int, float, float]:
    """Return count, mean and variance of the visible scores."""
    scores = np.asarray(scores, dtype=np.float64)
    shown = scores[np.isfinite(scores)]
    return shown.size, float(shown.mean()), float(shown.var())
