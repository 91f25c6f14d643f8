"""Layer names for narrow tables: encoder.layer.3.attention is row 3 of encoder.layer.*.attention."""

import re
from collections.abc import Iterable
from itertools import groupby

NUMBER = re.compile(r"(?<![^.])\d+(?![^.#])")  # a whole part of the path, as ModuleList names its entries


def pattern(name: str) -> tuple[str, str]:
    """The path with * for its numbers, and the numbers.

    >>> pattern("decoder.layers.3.cross.0")
    ('decoder.layers.*.cross.*', '3.0')
    >>> pattern("attention")
    ('attention', '')
    """
    return NUMBER.sub("*", name), ".".join(NUMBER.findall(name))


def by_pattern(names: Iterable[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Patterns, each with its (number, name) pairs, as they first appear.

    >>> by_pattern(["layers.0.self", "layers.0.cross", "layers.1.self"])
    [('layers.*.self', [('0', 'layers.0.self'), ('1', 'layers.1.self')]), ('layers.*.cross', [('0', 'layers.0.cross')])]
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        title, number = pattern(name)
        found.setdefault(title, []).append((number, name))
    return list(found.items())


def ranges(numbers: Iterable[str]) -> str:
    """Numbers as a person writes them.

    >>> ranges(["0", "1", "2", "5", "7.1"])
    '0–2, 5, 7.1'
    """
    given = list(numbers)
    whole = sorted({int(number) for number in given if number.isdigit()})
    runs = (list(run) for _, run in groupby(enumerate(whole), key=lambda pair: pair[1] - pair[0]))
    spans = [f"{run[0][1]}–{run[-1][1]}" if len(run) > 1 else f"{run[0][1]}" for run in runs]
    return ", ".join([*spans, *(number for number in given if number and not number.isdigit())])
