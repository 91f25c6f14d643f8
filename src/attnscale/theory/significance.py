"""Student's t distribution, and Holm's correction for multiple comparisons."""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

STEPS = 2048  # steps of the integral over the tail
REACH = 60.0  # the integral ends where the density has fallen by e to this power
BISECTIONS = 60  # halve the interval of ln t below the precision of a float
WIDEST = 700.0  # largest ln t; exp() of more overflows a float


def student_tail(t: float, freedom: float) -> float:
    """Return the probability that Student's t lies outside ±t.

    >>> round(student_tail(4.303, 2), 3), round(student_tail(1.962, 1000), 3), student_tail(0.0, 7)
    (0.05, 0.05, 1.0)
    """
    if not math.isfinite(t):
        return 0.0
    # With t = √ν tan θ the density is cos(θ)^(ν−1) dθ; integrating over ln(π/2 − θ) makes the far tail precise.
    return min(1.0, _integral(math.atan2(math.sqrt(freedom), abs(t)), freedom) / _integral(math.pi / 2, freedom))


@lru_cache
def student_quantile(freedom: float, level: float) -> float:
    """Return the t for which Student's t lies within ±t with probability `level`.

    >>> round(student_quantile(2, 0.95), 3), round(student_quantile(1000, 0.95), 3)
    (4.303, 1.962)
    """
    low, high = -WIDEST, WIDEST
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(math.exp(middle), freedom) > 1 - level else (low, middle)
    return math.exp(middle)


def holm(chances: Sequence[float], level: float) -> NDArray[np.bool_]:
    """Mark the significant p-values by Holm (1979): the probability of any false positive is at most `level`.

    >>> holm([0.001, 0.03, 0.9], 0.05).tolist()
    [True, False, False]
    """
    values = np.asarray(chances, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    passed = values[order] * (len(values) - np.arange(len(values))) <= level
    found = np.zeros(len(values), dtype=bool)
    found[order[: len(values) if passed.all() else int(np.argmin(passed))]] = True
    return found


def _integral(end: float, freedom: float) -> float:
    """Integrate the density from the far tail to `end`, by Simpson's rule."""
    reach = REACH / freedom + math.sqrt(2 * REACH / freedom)
    logarithms, step = np.linspace(math.log(end) - reach, math.log(end), STEPS + 1, retstep=True)
    left = np.exp(logarithms)
    heights = np.sin(left) ** (freedom - 1) * left
    return float((heights[0] + 4 * heights[1::2].sum() + 2 * heights[2:-1:2].sum() + heights[-1]) * step / 3)
