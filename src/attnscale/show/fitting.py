"""What fits a narrow terminal: names broken at their dots, and the columns of a table that there is room for."""

from collections.abc import Collection, Sequence


def at_dots(text: str, width: int) -> str:
    """The text with words that are longer than a line broken behind a dot, or else behind an underscore.

    >>> print(at_dots("in encoder.layer.0.attention", 16))
    in encoder.layer.0.
    attention
    """
    return " ".join("\n".join(_pieces(word, width)) for word in text.split(" "))


def _pieces(word: str, width: int) -> list[str]:
    pieces = []
    while len(word) > width > 0:
        end = max(word.rfind(".", 0, width), 0) or max(word.rfind("_", 0, width), 0) or width - 1
        pieces.append(word[: end + 1])
        word = word[end + 1 :]
    return [*pieces, word]


def kept(widths: Sequence[int], room: int, dispensable: Collection[int]) -> list[int]:
    """The columns that stay, by position, one blank between them: dispensable ones go in their order until it fits.

    >>> kept([5, 7, 9], 16, [2, 0]), kept([5, 7, 9], 14, [0, 2]), kept([5, 7], 3, [])
    ([0, 1], [1], [0, 1])
    """
    staying = list(range(len(widths)))
    for position in dispensable:
        if sum(widths[each] + 1 for each in staying) <= room + 1:
            break
        staying.remove(position)
    return staying


def width_of(heading: str, *cells: str) -> int:
    """What a column takes whose cells and lines of the heading are not to be broken."""
    return max(map(len, (*heading.split("\n"), *cells)))
