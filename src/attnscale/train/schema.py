"""Fields of a JSON object, read by name with a check of type and bounds: a wrong one is refused in one sentence."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, TypeVar

MOST = 2**53  # of a whole number: every reader of JSON keeps integers exact up to here
LARGEST = 1e300  # of a number: sums over any number of heads stay finite
LONGEST_SHOWN = 40  # characters of a refused value in a message
NUMBERS = {int, float, NoneType}  # not bool, which isinstance takes for an int
T = TypeVar("T")


class LineError(ValueError):
    """A line of a log, or an object in a file, that cannot be read; the message says why."""


class Fields:
    """The entries of a JSON object, each read with a check; `noun` names the object in messages."""

    def __init__(self, entries: Any, noun: str) -> None:
        if not isinstance(entries, Mapping):
            raise LineError(f"expected {noun} as an object, got {shown(entries)}")
        self._entries, self._noun = entries, noun

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def optional(self, name: str, read: Callable[..., T], **bounds: Any) -> T | None:
        """Read an entry that may be missing or null."""
        return None if self._entries.get(name) is None else read(name, **bounds)

    def whole(self, name: str, least: int = 0, most: int = MOST) -> int:
        """Read a whole number; 7.0 is refused."""
        value = self._entry(name)
        if type(value) is not int or not least <= value <= most:
            raise self._error(name, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, least: float = -LARGEST, most: float = LARGEST) -> float:
        """Read a finite number."""
        value = self._entry(name)
        if type(value) not in (int, float) or not least <= value <= most:
            raise self._error(name, f"a number from {least:g} to {most:g}")
        return float(value)

    def number_or_nan(self, name: str) -> float:
        """Read a number; null is NaN."""
        return math.nan if self._entry(name) is None else self.number(name)

    def numbers(self, name: str) -> list[float]:
        """Read a list of at least one number; null is NaN."""
        values = self._entry(name)
        if type(values) is not list or not values or not NUMBERS.issuperset(map(type, values)):
            raise self._error(name, "a list of numbers")
        if any(value is not None and abs(value) > LARGEST for value in values):
            raise self._error(name, f"numbers of at most {LARGEST:g}")
        return [math.nan if value is None else float(value) for value in values]

    def text(self, name: str, longest: int | None = None) -> str:
        """Read a text, of 1 to `longest` characters where a limit is given."""
        value = self._entry(name)
        if type(value) is not str or (longest is not None and not 0 < len(value) <= longest):
            raise self._error(name, "a text" if longest is None else f"a text of 1 to {longest} characters")
        return value

    def one_of(self, name: str, known: Sequence[str]) -> str:
        """Read one of the known words."""
        value = self._entry(name)
        if type(value) is not str or value not in known:
            raise self._error(name, f"one of {', '.join(known)}")
        return value

    def entries(self, name: str) -> Mapping[str, Any]:
        """Read an object."""
        value = self._entry(name)
        if type(value) is not dict:
            raise self._error(name, "an object")
        return value

    def items(self, name: str) -> list[Any]:
        """Read a list; a missing one is empty."""
        value = self._entries.get(name, [])
        if type(value) is not list:
            raise self._error(name, "a list")
        return value

    def _entry(self, name: str) -> Any:
        if name not in self._entries:
            raise LineError(f"expected '{name}' in {self._noun}, and it is missing")
        return self._entries[name]

    def _error(self, name: str, expected: str) -> LineError:
        return LineError(f"expected '{name}' of {self._noun} as {expected}, got {shown(self._entries[name])}")


def shown(value: Any) -> str:
    """Return a value in few words.

    >>> shown([1, 2]), shown("x" * 99), shown(1e400)
    ('a list', "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…", 'inf')
    """
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    if type(value) is int and abs(value) > MOST:
        return "a whole number that is larger"
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
