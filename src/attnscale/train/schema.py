"""What a line of a log must hold: its fields are read by their types and bounds, or the line is refused in words.

No library that checks such things is among the dependencies, and a log has a dozen fields; so Record.from_dict names
each field once, with the check that reads it, and nothing else reads a line.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, TypeVar

MOST = 2**53  # of a whole number: the last that every reader of JSON takes as it is
LARGEST = 1e300  # of a number: sums over any number of heads stay finite
LATEST = 2.5e11  # seconds since the epoch: the last years that calendars know
LONGEST_NAME = 128  # characters of the name of a run
LONGEST_TOLD = 40  # characters of a value that is refused
NUMBERS = {int, float, NoneType}  # and not bool, which is an int to isinstance
T = TypeVar("T")


class LineError(ValueError):
    """What is wrong with a line, in words."""


class Fields:
    """A mapping whose entries are taken by name and type."""

    def __init__(self, plain: Any, what: str) -> None:
        if not isinstance(plain, Mapping):
            raise LineError(f"expected {what} as an object, got {told(plain)}")
        self._plain, self._what = plain, what

    def __contains__(self, name: str) -> bool:
        return name in self._plain

    def only(self, names: Sequence[str]) -> None:
        """Refuse entries of other names."""
        for name in self._plain:
            if name not in names:
                raise self._error(name, "no such field")

    def optional(self, name: str, read: Callable[..., T], **bounds: Any) -> T | None:
        """An entry that may be missing or null."""
        return None if self._plain.get(name) is None else read(name, **bounds)

    def whole(self, name: str, least: int = 0, most: int = MOST) -> int:
        """A whole number; one that is written as 7.0 is none."""
        value = self._entry(name)
        if type(value) is not int or not least <= value <= most:
            raise self._error(name, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, least: float = -LARGEST, most: float = LARGEST) -> float:
        """A number that is finite."""
        value = self._entry(name)
        if type(value) not in (int, float) or not least <= value <= most:
            raise self._error(name, f"a number from {least:g} to {most:g}")
        return float(value)

    def number_or_nan(self, name: str) -> float:
        """A number, or NaN where it is null."""
        return math.nan if self._entry(name) is None else self.number(name)

    def numbers(self, name: str) -> list[float]:
        """A list of numbers, at least one; NaN for those that are null."""
        values = self._entry(name)
        kinds = set(map(type, values)) if type(values) is list else set()
        if not kinds or not kinds <= NUMBERS:
            raise self._error(name, "a list of numbers")
        known = values if NoneType not in kinds else [value for value in values if value is not None]
        if known and not -LARGEST <= min(known) <= max(known) <= LARGEST:  # a NaN is no JSON
            raise self._error(name, f"numbers of at most {LARGEST:g}")
        if kinds == {float}:
            return known
        return [math.nan if value is None else float(value) for value in values]

    def text(self, name: str, longest: int | None = None) -> str:
        """A text."""
        value = self._entry(name)
        if type(value) is not str or (longest is not None and not 0 < len(value) <= longest):
            raise self._error(name, "a text" if longest is None else f"a text of 1 to {longest} characters")
        return value

    def one_of(self, name: str, known: Sequence[str]) -> str:
        """One of the words that are known."""
        value = self._entry(name)
        if type(value) is not str or value not in known:
            raise self._error(name, f"one of {', '.join(known)}")
        return value

    def entries(self, name: str) -> Mapping[str, Any]:
        """A mapping."""
        value = self._entry(name)
        if type(value) is not dict:
            raise self._error(name, "an object")
        return value

    def items(self, name: str) -> list[Any]:
        """A list; an empty one where it is missing."""
        value = self._plain.get(name, [])
        if type(value) is not list:
            raise self._error(name, "a list")
        return value

    def _entry(self, name: str) -> Any:
        if name not in self._plain:
            raise LineError(f"expected '{name}' in {self._what}, and it is missing")
        return self._plain[name]

    def _error(self, name: str, expected: str) -> LineError:
        return LineError(f"expected '{name}' of {self._what} as {expected}, got {told(self._plain[name])}")


def told(value: Any) -> str:
    """A value in few words.

    >>> told([1, 2]), told("x" * 99), told(1e400)
    ('a list', "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…", 'inf')
    """
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    if type(value) is int and abs(value) > MOST:
        return "a whole number that is larger"
    shown = repr(value)
    return shown if len(shown) <= LONGEST_TOLD else f"{shown[:LONGEST_TOLD]}…"
