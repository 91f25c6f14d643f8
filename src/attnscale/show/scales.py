"""Rules as tables, for a page that cannot run them: a scale is a product of factors of one setting each.

A rule is asked for its scale on tensors that have a shape and no memory. One that answers with the tensors untouched
and a positive number, and whose number factors, is tabulated; any other (learned, or normalising) is left out.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attnscale.errors import SettingError
from attnscale.rules import RULES
from attnscale.rules.calibrated import calibrated
from attnscale.rules.rule import Rule, about_rule
from attnscale.theory import score_variance, unit_variance_scale

Range: TypeAlias = tuple[float, float]
Setting: TypeAlias = Mapping[str, float]
Scale: TypeAlias = Callable[[Setting], float]  # of d, n, spread (of q times that of k) and number (of the rule)

STARTS = {"constant": 0.125, "temperature": 8.0, "yarn": 4.0}  # where a rule's number has no default
REACH = 100.0  # a rule's number can be moved this many times up and down
EVERY = 24  # integers up to here are all in a table
RATIO = 1.06  # from one line of a table to the next; a cubic between them is good to 1e-9
POWER_LAW = 1e-12  # a table this close to a line, in logarithms, is that line
AGREES = 1e-7  # what factors must reproduce of a rule


@dataclass(frozen=True)
class Parameter:
    """A rule's own number."""

    name: str
    low: float
    high: float
    start: float


class NotTabulatedError(Exception):
    """This rule's scale is no product of factors."""


def tabulated_rules(d: Range, n: Range, spread: Range) -> list[dict[str, Any]]:
    """Every rule of the catalogue that can be tabulated over these ranges, as JSON takes it."""
    rules = []
    for name, rule in RULES.items():
        try:
            rules.append(_tabulated(name, rule, {"d": d, "n": n, "spread": spread}))
        except NotTabulatedError:
            continue
    return rules


def _tabulated(name: str, rule: Rule | type, ranges: dict[str, Range]) -> dict[str, Any]:
    about, parameter = about_rule(rule), _parameter(name, rule)
    assert about is not None
    if parameter is not None:
        ranges = ranges | {"number": (parameter.low, parameter.high)}
    scale = _scale(rule, parameter)
    usual = {"d": 64.0, "n": 1024.0, "spread": 1.0, "number": parameter.start if parameter else 1.0}
    log_usual = math.log(scale(usual))
    factors = []
    for setting, (low, high) in ranges.items():
        lines = list(_lines(low, high, integer=setting in "dn"))
        logs = [math.log(scale(usual | {setting: line})) - log_usual for line in lines]
        at, logs = _shortened([math.log(line) for line in lines], logs)
        if any(logs):
            factors.append({"of": setting, "at": at, "log": logs})
    _require_product(scale, usual, ranges)
    return {
        "name": name,
        "formula": about.formula,
        "use": about.use,
        "source": about.source,
        "parameter": parameter and vars(parameter) | {"integer": False},
        "log_scale": log_usual,
        "factors": factors,
    }


def _parameter(name: str, rule: Rule | type) -> Parameter | None:
    make: Any = rule if isinstance(rule, type) else type(rule)
    first = next((field.name for field in fields(make)), None) if is_dataclass(make) else None
    if first is None:
        return None
    start = STARTS.get(name, 1.0) if isinstance(rule, type) else getattr(rule, first)
    if not (isinstance(start, int | float) and _accepts(make, start)):
        raise NotTabulatedError
    low = next((low for low in (start / REACH, 1.0) if _accepts(make, low)), start)
    return Parameter(first, float(low), float(start) * REACH, float(start))


def _accepts(make: Callable[[float], Rule], number: float) -> bool:
    try:
        make(number)
    except (SettingError, TypeError):
        return False
    return True


def _scale(rule: Rule | type, parameter: Parameter | None) -> Scale:
    """The scale as a function of the settings."""
    if rule is calibrated:  # by its theory: it measures what the settings say
        return lambda at: unit_variance_scale(score_variance(round(at["d"]), 0.0, at["spread"] ** 2))
    make: Any = rule if isinstance(rule, type) else type(rule)

    def scale(at: Setting) -> float:
        called: Any = rule if parameter is None else make(at["number"])
        query = torch.empty(1, round(at["d"]), device="meta")
        key = torch.empty(round(at["n"]), round(at["d"]), device="meta")
        if isinstance(called, type | torch.nn.Module):
            raise NotTabulatedError
        try:
            same_query, same_key, value = called(query, key)
        except RuntimeError:  # it looked at values, and there are none
            raise NotTabulatedError from None
        if same_query is not query or same_key is not key or isinstance(value, Tensor) or not 0 < value < math.inf:
            raise NotTabulatedError
        return float(value)

    return scale


def _lines(low: float, high: float, *, integer: bool) -> Iterator[float]:
    """Where to tabulate: in equal ratios, and at every small integer."""
    if integer:
        yield from range(int(low), EVERY)
        low = max(low, EVERY)
    count = math.ceil(math.log(high / low) / math.log(RATIO))
    points = [low * (high / low) ** (i / count) for i in range(count + 1)]
    yield from (dict.fromkeys(map(round, points)) if integer else points)


def _shortened(at: list[float], logs: list[float]) -> tuple[list[float], list[float]]:
    """The table, or its two ends where it is a power law."""
    slope = (logs[-1] - logs[0]) / (at[-1] - at[0])
    straight = all(abs(logs[0] + slope * (x - at[0]) - y) < POWER_LAW for x, y in zip(at, logs, strict=True))
    return ([at[0], at[-1]], [logs[0], logs[-1]]) if straight else (at, logs)


def _require_product(scale: Scale, usual: Setting, ranges: Mapping[str, Range]) -> None:
    """Refuse a scale that is not the product of what each setting does to it alone, at the corners and in between."""
    some = {
        name: (low, round(math.sqrt(low * high)) if name in "dn" else math.sqrt(low * high), high)
        for name, (low, high) in ranges.items()
    }
    for values in itertools.product(*some.values()):
        at = dict(zip(some, values, strict=True))
        product = scale(usual) * math.prod(scale({**usual, name: x}) / scale(usual) for name, x in at.items())
        if not math.isclose(scale({**usual, **at}), product, rel_tol=AGREES):
            raise NotTabulatedError
