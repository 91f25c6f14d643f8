"""How likely a difference of means is where nothing differs, and which of many such differences stand out."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STEPS, REACH = 2048, 60.0  # of the integral over the tail, and how many powers of e it goes towards its end


def tail(t: float, freedom: float) -> float:
    """The share of Student's distribution beyond ±t.

    >>> round(tail(4.303, 2), 3), round(tail(1.962, 1000), 3), tail(0.0, 7)
    (0.05, 0.05, 1.0)
    """
    if not math.isfinite(t):
        return 0.0
    # With t = √ν tan θ the density is cos(θ)^(ν−1) dθ; in ln(π/2 − θ) the far tail is resolved as well as the middle.
    return min(1.0, _integral(math.atan2(math.sqrt(freedom), abs(t)), freedom) / _integral(math.pi / 2, freedom))


def _integral(end: float, freedom: float) -> float:
    logarithms, step = np.linspace(math.log(end) - REACH / freedom, math.log(end), STEPS, retstep=True)
    left = np.exp(logarithms)
    heights = np.sin(left) ** (freedom - 1) * left
    return float((heights.sum() - (heights[0] + heights[-1]) / 2) * step)  # NumPy 1.26 has no trapezoid


def standing_out(chances: Sequence[float], level: float) -> NDArray[np.bool_]:
    """Which of many stand out, none by chance in a share 1 − level of all comparisons (Holm 1979).

    >>> standing_out([0.001, 0.03, 0.9], 0.05).tolist()
    [True, False, False]
    """
    given = np.asarray(chances, dtype=np.float64)
    order = np.argsort(given, kind="stable")
    passed = given[order] * (len(given) - np.arange(len(given))) <= level
    found = np.zeros(len(given), dtype=bool)
    found[order[: len(given) if passed.all() else int(np.argmin(passed))]] = True
    return found
