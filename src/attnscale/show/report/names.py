"""Layers by short names that tell them apart, for axes and legends."""

from collections.abc import Iterable

from attnscale.show.naming import by_pattern


def ticks(names: Iterable[str]) -> tuple[str, ...]:
    """The number of each layer where those differ, else its name."""
    given = tuple(names)
    numbers = {name: number for _, members in by_pattern(given) for number, name in members}
    told_apart = all(numbers.values()) and len(set(numbers.values())) == len(given)
    return tuple(numbers[name] for name in given) if told_apart else given


def legend(names: Iterable[str]) -> dict[str, str]:
    """What a curve is called: `layer 3` where a number tells, else its name."""
    given = tuple(names)
    told = zip(given, ticks(given), strict=True)
    return {name: name if tick == name else f"layer {tick}" for name, tick in told}
