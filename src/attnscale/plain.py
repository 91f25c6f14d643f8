"""Convert values to plain JSON, and escape terminal control characters in text."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

# Characters outside printable ASCII are checked one by one with str.isprintable(), which is false for control
# characters, marks of text direction, halves of surrogate pairs and line separators.
UNUSUAL = re.compile("[^ -~]")
THOUSAND, BILLION = 1e3, 1e9  # numbers between them are written as 47,400


def printable(text: str) -> str:
    """Escape control characters in a text from an untrusted source, such as a name or a message.

    >>> print(printable("layer\\x1b[31m.0"), printable("\\x9b√\\u202e"))
    layer\\x1b[31m.0 \\x9b√\\u202e
    """
    return UNUSUAL.sub(_escaped, text)


def printable_lines(text: str) -> str:
    """Escape control characters in a text of several lines.

    >>> print(printable_lines("one\\ntwo\\r"))
    one
    two\\r
    """
    return "\n".join(map(printable, text.split("\n")))


def json_text(value: object) -> str:
    """Return a value as indented JSON without control characters.

    >>> print(json_text({"√": "\\u202e"}))
    {
     "√": "\\u202e"
    }
    """
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    return "\n".join(UNUSUAL.sub(_escaped_in_json, line) for line in text.split("\n"))


def _escaped(found: re.Match[str]) -> str:
    return found[0] if found[0].isprintable() else found[0].encode("unicode_escape").decode("ascii")


def _escaped_in_json(found: re.Match[str]) -> str:
    return found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1]


def finite(value: float) -> float | None:
    """Return the number, or None if it is NaN or infinite.

    >>> finite(0.5), finite(3), finite(float("nan"))
    (0.5, 3, None)
    """
    return value if math.isfinite(value) else None


def rounded(value: float, digits: int) -> float | None:
    """Return the number rounded to `digits` significant digits, or None if it is NaN or infinite.

    >>> rounded(123.456, 4), rounded(float("inf"), 4)
    (123.5, None)
    """
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def readable(value: float, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, without an exponent below a billion.

    >>> readable(379123.4), readable(0.12345), readable(2.51e12), readable(264.3, 1), readable(float("nan"))
    ('379,000', '0.123', '2.51e+12', '300', 'nan')
    """
    text = f"{value:.{digits}g}"
    is_large = "e" in text or abs(float(text)) >= THOUSAND
    return f"{float(text):,.0f}" if is_large and 1 <= abs(float(text)) < BILLION else text


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the singular or plural.

    >>> counted(1, "head"), counted(1200, "layer")
    ('1 head', '1,200 layers')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def plain(value: Any) -> Any:
    """Return the value with None for every NaN or infinite number, and lists for tuples.

    >>> plain({"spread": (1.0, float("-inf")), "name": "head"})
    {'spread': [1.0, None], 'name': 'head'}
    """
    if isinstance(value, Mapping):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return finite(value) if isinstance(value, float) else value
