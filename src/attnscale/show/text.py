"""Short text for numbers, for names of layers and for places of findings."""

import math
import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from attnscale.checking import Group
from attnscale.measure.statistics import Statistic

SMALL = 0.01  # numbers below this have one digit less, to keep columns narrow
LARGE, HUGE = 1e3, 1e6  # between these, 47,400 is easier to read than 4.74e+04
DIGITS = 4  # significant digits in a table of results
INDEX = re.compile(r"(?<![^.])\d+(?![^.#])")  # a path component that is a number, as in ModuleList


def number(value: float, digits: int = 3) -> str:
    """Return a number for a narrow column; a dash for NaN and infinity."""
    if not math.isfinite(value):
        return "–"
    if LARGE <= abs(value) < HUGE:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) >= SMALL or value == 0 else f"{value:.{digits - 1}g}"


def formatted(statistic: Statistic, value: float, error: float = math.nan) -> str:
    """Return a value in the format of its statistic, with its standard error if it has one."""
    decimals = {"share": 2, "percent": 0}.get(statistic.format) if math.isfinite(value) else None
    value, error = statistic.factor * value, statistic.factor * error
    return (number(value) if decimals is None else f"{value:.{decimals}f}") + with_error(error)


def with_error(error: float) -> str:
    """Return the text that follows a value to show its standard error; empty for NaN.

    >>> with_error(0.0123), with_error(12.3), with_error(math.nan), with_error(math.inf)
    ('±0.01', '±12', '', '±?')
    """
    if math.isinf(error):
        return "±?"
    return "" if math.isnan(error) else f"±{error:.1g}" if error < 10 else f"±{error:,.0f}"


def shown(value: Any, digits: int = DIGITS) -> str:
    """Return a table cell or the value of a setting as text.

    >>> shown(0.30751), shown(4096), shown(None), shown(1.5e7), shown(math.nan), shown(True), shown({"torch": "2.13"})
    ('0.3075', '4,096', '–', '1.5e+07', '–', 'yes', 'torch 2.13')
    """
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return number(value, digits)
        case Mapping():
            return ", ".join(f"{name} {shown(entry)}" for name, entry in value.items())
        case list() | tuple():
            return ", ".join(map(shown, value))
    return str(value)


def pattern(name: str) -> tuple[str, str]:
    """Return the path with its numbers replaced by *, and the numbers.

    >>> pattern("decoder.layers.3.cross.0"), pattern("attention")
    (('decoder.layers.*.cross.*', '3.0'), ('attention', ''))
    """
    return INDEX.sub("*", name), ".".join(INDEX.findall(name))


def by_pattern(names: Iterable[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Group names by pattern, each with its (number, name) pairs, in order of appearance.

    >>> by_pattern(["layers.0.self", "layers.0.cross", "layers.1.self"])
    [('layers.*.self', [('0', 'layers.0.self'), ('1', 'layers.1.self')]), ('layers.*.cross', [('0', 'layers.0.cross')])]
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        title, index = pattern(name)
        found.setdefault(title, []).append((index, name))
    return list(found.items())


def ranges(numbers: Iterable[str]) -> str:
    """Return numbers as a short list of ranges.

    >>> ranges(["0", "1", "2", "5", "7.1"])
    '0–2, 5, 7.1'
    """
    numbers = list(numbers)
    whole = sorted({int(each) for each in numbers if each.isdigit()})
    runs = (list(run) for _, run in groupby(enumerate(whole), key=lambda pair: pair[1] - pair[0]))
    spans = [f"{run[0][1]}–{run[-1][1]}" if len(run) > 1 else f"{run[0][1]}" for run in runs]
    return ", ".join([*spans, *(each for each in numbers if each and not each.isdigit())])


def at_dots(text: str, width: int) -> str:
    """Break each word longer than `width` after a dot, else after an underscore, else anywhere.

    >>> print(at_dots("in encoder.layer.0.linear", 16))
    in encoder.layer.0.
    linear
    """
    return " ".join("\n".join(_pieces(word, width)) for word in text.split(" "))


def _pieces(word: str, width: int) -> list[str]:
    pieces = []
    while len(word) > width > 0:
        end = max(word.rfind(".", 0, width), 0) or max(word.rfind("_", 0, width), 0) or width - 1
        pieces.append(word[: end + 1])
        word = word[end + 1 :]
    return [*pieces, word]


def place(group: Group) -> str:
    """Return the layers and heads of a group of findings, in one line."""
    if len(group.layers) == 1:
        return group.where(1)
    title, _ = pattern(group.first.layer)
    same = [pattern(layer)[1] for layer in group.layers if pattern(layer)[0] == title]
    if len(group.findings) == 1 or len(same) < len(group.layers) or not all(same):
        return f"{group.first.place}{', ' if group.others else ''}{group.others}"
    heads = sum(finding.head is not None for finding in group.findings)
    where = f"layers {ranges(same)}" if title == "*" else f"{title}, * = {ranges(same)}"
    return f"{where}{f' ({heads} heads)' if heads else ''}"
