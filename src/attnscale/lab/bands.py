"""Band: a mean over seeds, and where the true one lies."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from attnscale.plain import readable

LEVEL = 0.95
LARGEST_LOG = 700.0  # e to more than that is no float


@dataclass(frozen=True)
class Band:
    """A mean over independent seeds, with its confidence interval by Student's t; infinite where there is one seed."""

    mean: float
    half: float
    seeds: int

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.mean + self.half

    def holds(self, value: float) -> bool:
        """Whether the interval contains a value."""
        return self.low <= value <= self.high

    def __format__(self, form: str) -> str:
        """The mean in this form, and its error; one seed has none."""
        form = form or ".3g"
        if math.isinf(self.half):
            return f"{self.mean:{form}} (one seed)"
        return f"{self.mean:{form}} ± {self.half:{'.1%' if form.endswith('%') else '.2g'}}"

    def __str__(self) -> str:
        return format(self, "")


@dataclass(frozen=True)
class Factors:
    """A geometric mean over independent seeds, with its interval: for numbers that differ by factors."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        interval = "one seed" if math.isnan(self.low) else f"{readable(self.low, 2)}–{readable(self.high, 2)}"
        return f"{readable(self.mean)} ({interval})"


def geometric_band(values: Iterable[float]) -> Factors:
    """The band of the logarithms, as factors.

    >>> print(geometric_band([10.0, 100.0, 1000.0]))
    100 (0.33–3e+04)
    """
    found = band(math.log(value) if value > 0 else math.nan for value in values)
    if math.isinf(found.half):
        return Factors(math.exp(found.mean), math.nan, math.nan)
    return Factors(*(math.exp(min(value, LARGEST_LOG)) for value in (found.mean, found.low, found.high)))


def band(values: Iterable[float], points: int = 1) -> Band:
    """The band of 95% of `points` means taken together: where many are compared with a curve, each is a bit wider.

    >>> print(band([1.0, 2.0, 3.0]))
    2 ± 2.5
    """
    sample = np.fromiter(values, dtype=np.float64)
    seeds = len(sample)
    if seeds == 0 or not np.isfinite(sample).all():
        return Band(math.nan, math.nan, seeds)
    if seeds == 1:
        return Band(float(sample[0]), math.inf, 1)
    error = float(sample.std(ddof=1)) / math.sqrt(seeds)
    return Band(float(sample.mean()), student_quantile(seeds - 1, 1 - (1 - LEVEL) / points) * error, seeds)


@lru_cache
def student_quantile(freedom: int, level: float = LEVEL) -> float:
    """The t within which a share `level` of Student's distribution lies.

    >>> round(student_quantile(2), 3), round(student_quantile(1000), 3)
    (4.303, 1.962)
    """
    # With t = √ν tan θ the density is cos(θ)^(ν−1) dθ. In ln(π/2 − θ) the far tail is resolved as well as the middle.
    left = np.exp(np.linspace(math.log(math.pi / 2), -60.0, 200_001))  # π/2 − θ
    tail = np.sin(left) ** (freedom - 1) * left
    log_left = np.log(left)
    inside = np.concatenate([[0.0], np.cumsum((tail[1:] + tail[:-1]) / 2 * -np.diff(log_left))])
    outside = 1 - inside / inside[-1]
    at = np.interp(-math.log(1 - level), -np.log(np.maximum(outside[:-1], 1e-300)), log_left[:-1])
    return math.sqrt(freedom) / math.tan(math.exp(float(at)))
