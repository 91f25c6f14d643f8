"""Plain values, as JSON takes them: None for a number that it has no word for."""

import math
from collections.abc import Mapping
from typing import Any


def finite(value: float) -> float | None:
    """The number, or None where it is NaN or infinite.

    >>> finite(0.5), finite(3), finite(float("nan"))
    (0.5, 3, None)
    """
    return value if math.isfinite(value) else None


def rounded(value: float, digits: int) -> float | None:
    """The number to so many significant digits, or None where it is NaN or infinite.

    >>> rounded(123.456, 4), rounded(float("inf"), 4)
    (123.5, None)
    """
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def plain(value: Any) -> Any:
    """The same with None for every number that is NaN or infinite, and lists for tuples.

    >>> plain({"spread": (1.0, float("-inf")), "name": "head"})
    {'spread': [1.0, None], 'name': 'head'}
    """
    if isinstance(value, Mapping):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return finite(value) if isinstance(value, float) else value
