"""Plain values, as JSON takes them, and plain text: the one place where what steers a terminal is escaped."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

# All but ordinary ASCII is looked at one by one, by str.isprintable(): it takes no control characters of either kind,
# no marks that turn the direction of text, no halves of characters, no separators of lines.
UNUSUAL = re.compile("[^ -~]")
THOUSAND, BILLION = 1e3, 1e9  # between them 47,400 is read at once, and 4.74e+04 is not


def printable(text: str) -> str:
    """The text with all that would steer a terminal as escapes: names and messages may come from anywhere.

    >>> print(printable("layer\\x1b[31m.0"), printable("\\x9b√\\u202e"))
    layer\\x1b[31m.0 \\x9b√\\u202e
    """
    return UNUSUAL.sub(lambda found: _escaped(found[0]), text)


def printable_lines(text: str) -> str:
    """The same for a text of several lines.

    >>> print(printable_lines("one\\ntwo\\r"))
    one
    two\\r
    """
    return "\n".join(map(printable, text.split("\n")))


def json_text(value: object) -> str:
    """A value as a readable block of JSON, with nothing in it that would steer a terminal.

    >>> print(json_text({"√": "\\u202e"}))
    {
     "√": "\\u202e"
    }
    """
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    return UNUSUAL.sub(
        lambda found: found[0] if found[0] in "\n" or found[0].isprintable() else _in_json(found[0]), text
    )


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def _in_json(character: str) -> str:
    return json.dumps(character)[1:-1]


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


def readable(value: float, digits: int = 3) -> str:
    """Return a number rounded to so many significant digits, without an exponent below a billion.

    >>> readable(379123.4), readable(0.12345), readable(2.51e12), readable(264.3, 1), readable(float("nan"))
    ('379,000', '0.123', '2.51e+12', '300', 'nan')
    """
    text = f"{value:.{digits}g}"
    is_large = "e" in text or abs(float(text)) >= THOUSAND
    return f"{float(text):,.0f}" if is_large and 1 <= abs(float(text)) < BILLION else text


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
