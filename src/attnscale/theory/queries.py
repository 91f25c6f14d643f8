"""What softmax does to q·k in expectation, for queries and keys of Gaussian components: exact at every d_k.

Given its query, a row's scores over Gaussian keys are independent N(0, a² |q|²): a row of `expected_softmax`, with a
spread that follows the query's length. Over queries |q|² is χ² with d_k degrees of freedom, averaged in
its logarithm. What reaches the scores is ‖J‖² of J = diag(p) − ppᵀ, from 1/Zᵐ = ∫ tᵐ⁻¹ e^{−tZ} dt / (m−1)!:

    E[Σ p³]    = n ∫ t² |L‴(t)| L(t)ⁿ⁻¹ dt / 2
    E[(Σ p²)²] = ∫ t³ (n L⁗(t) L(t)ⁿ⁻¹ + n (n−1) L″(t)² L(t)ⁿ⁻²) dt / 6
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from attnscale.errors import SettingError
from attnscale.reference import Array
from attnscale.theory.gaussian import FROZEN, STEP, UNIFORM_BELOW, laplace, log_normaliser_and_gain

# The trapezoid rule in ln|q|² costs e^{−π²/h} for exp(−eʸ) and e^{−2π²w²/h²} for a bump of width w: 3e-9 at both.
LOG_STEP = 0.5
NEGLIGIBLE = 25.0  # e^{−25} is 1e-11


@dataclass(frozen=True)
class RowExpectation:
    """Expected entropy (nats), gradient gain 1 − Σp² and ‖diag(p) − ppᵀ‖² of a row."""

    entropy: float
    gradient_gain: float
    jacobian_norm2: float


def expected_row(spread: float, keys: int, head_dim: int | None = None) -> RowExpectation:
    """A row over `keys` Gaussian keys; of Gaussian queries with `head_dim` components, or all of the same length.

    `spread` is a · std(q·k) over queries and keys.

    >>> one_length, four_components = expected_row(4.0, 256), expected_row(4.0, 256, head_dim=4)
    >>> round(one_length.gradient_gain, 2), round(four_components.gradient_gain, 2)
    (0.64, 0.69)
    """
    if keys < 2 or not 0 <= spread < math.inf or (head_dim is not None and head_dim < 1):
        raise SettingError(
            "Expected at least 2 keys, a finite spread of 0 or more and a positive head_dim, "
            f"got {keys=}, {spread=}, {head_dim=}."
        )
    if head_dim is None:
        return _row(spread, keys)
    lengths, weights = _query_lengths(head_dim)
    rows = [_row(spread * float(length), keys) for length in lengths]
    means = {
        name: sum(float(weight) * getattr(row, name) for weight, row in zip(weights, rows, strict=True))
        for name in ("entropy", "gradient_gain", "jacobian_norm2")
    }
    return RowExpectation(**means)


@lru_cache(maxsize=65536)
def _row(spread: float, keys: int) -> RowExpectation:
    if spread < UNIFORM_BELOW:
        return RowExpectation(math.log(keys), 1 - 1 / keys, (1 - 1 / keys) / keys)
    if spread > FROZEN:
        frozen, shrink = _row(FROZEN, keys), FROZEN / spread
        return RowExpectation(frozen.entropy * shrink, frozen.gradient_gain * shrink, frozen.jacobian_norm2 * shrink)
    log_normaliser, gain = log_normaliser_and_gain(spread, keys)
    return RowExpectation(max(log_normaliser - spread**2 * gain, 0.0), gain, _jacobian_norm2(spread, keys, 1 - gain))


def _jacobian_norm2(spread: float, keys: int, square: float) -> float:
    found = laplace(spread, keys)
    others, but_two = np.exp((keys - 1) * found.log), np.exp((keys - 2) * found.log)
    cube = STEP * keys * float((found.third * others).sum()) / 2
    alone = keys * float((found.fourth * others).sum())
    pairs = keys * (keys - 1) * float((found.second**2 * but_two).sum())
    return max(square - 2 * cube + STEP * (alone + pairs) / 6, 0.0)


@lru_cache
def _query_lengths(head_dim: int) -> tuple[Array, Array]:
    """|q|/√d_k and its weights: |q|²/2 is Gamma(d_k/2), whose density in y = ln(|q|²/2) is exp(y d_k/2 − eʸ)."""
    shape = head_dim / 2
    width = 1 / math.sqrt(shape)
    step = min(LOG_STEP, width)
    left, right = -NEGLIGIBLE / shape - 10 * width, 10 * width + math.log1p(NEGLIGIBLE / shape)
    from_mode = np.arange(left, right, step)
    log_density = shape * (from_mode - np.expm1(from_mode))
    counts = log_density > -NEGLIGIBLE
    lengths, weights = np.exp(from_mode[counts] / 2), np.exp(log_density[counts])
    return lengths, weights / weights.sum()
