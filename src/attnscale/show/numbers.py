"""Numbers as a person reads them: short, and a dash where there is none."""

import math
from collections.abc import Mapping
from typing import Any

from attnscale.measure.statistics import Statistic

SMALL = 0.01  # below, a digit less keeps a column narrow
LARGE, HUGE = 1e3, 1e6  # between, 47,400 is narrower than 4.74e+04, and read at once
DIGITS = 4  # of a number in a table of results


def number(value: float, digits: int = 3) -> str:
    """A number for a narrow column; a dash where there is none."""
    if not math.isfinite(value):
        return "–"
    if LARGE <= abs(value) < HUGE:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) >= SMALL or value == 0 else f"{value:.{digits - 1}g}"


def share(value: float) -> str:
    """A number between 0 and 1."""
    return f"{value:.2f}" if math.isfinite(value) else "–"


def formatted(statistic: Statistic, value: float, error: float = math.nan) -> str:
    """A value of a statistic, in the format that the catalogue gives it, and its standard error where it has one."""
    return (share(value) if statistic.format == "share" else number(value)) + give_or_take(error)


def give_or_take(error: float) -> str:
    """A standard error behind its value; nothing where there is none.

    >>> give_or_take(0.0123), give_or_take(12.3), give_or_take(math.nan), give_or_take(math.inf)
    ('±0.01', '±12', '', '±?')
    """
    if math.isinf(error):
        return "±?"
    return "" if math.isnan(error) else f"±{error:.1g}" if error < 10 else f"±{error:,.0f}"


def shown(value: Any, digits: int = DIGITS) -> str:
    """A value of a table or a setting.

    >>> shown(0.30751), shown(4096), shown(None), shown(1.5e7), shown(True), shown({"torch": "2.13"})
    ('0.3075', '4,096', '–', '1.5e+07', 'yes', 'torch 2.13')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return number(value, digits)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {shown(entry)}" for name, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    return str(value)
