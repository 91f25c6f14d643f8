"""Where in a model an operation happened."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """The modules that were running, outermost first, and the line that called torch."""

    modules: tuple[str, ...]
    line: tuple[str, int]


def within(first: Place, second: Place) -> str:
    """The innermost module that was running at both places."""
    common = [a for a, b in zip(first.modules, second.modules, strict=False) if a == b]
    return common[-1]
