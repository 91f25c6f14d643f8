"""Inputs that a user gives: a text, token ids, or a file of examples, as sequences to run a model on."""

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

from attnscale.errors import SettingError

Sequence: TypeAlias = str | list[int]  # a text for the model's tokenizer, or token ids as they are
LEAST_PART = 64  # characters
MOST_LENGTH = 2**20  # tokens: beyond the longest contexts there are
MOST_SEQUENCES = 64  # of a file: a batch that fits wherever one sequence does, nearly


def require_length(length: int | None) -> None:
    """Refuse a number of tokens that nothing can be run on."""
    if length is not None and not 2 <= length <= MOST_LENGTH:
        raise SettingError(f"Expected --length from 2 to {MOST_LENGTH:,}, got {length}.")


def require_text(text: str | None) -> None:
    """Refuse a text of which no two tokens can be made."""
    if text is not None and len(text.encode("utf-8")) < 2:
        raise SettingError("Expected a text of at least two characters, and it is shorter.")


def read_tokens(text: str) -> tuple[Sequence, ...]:
    """Token ids as JSON, one list or a list of lists, or as numbers with blanks between them.

    >>> read_tokens("5 6 7"), read_tokens("[[1, 2], [3, 4]]")
    (([5, 6, 7],), ([1, 2], [3, 4]))
    """
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except (ValueError, RecursionError):
        raise SettingError("Expected --tokens as JSON, [1, 2, 3] or lists of such lists, or as numbers.") from None
    sequences = found if found and all(isinstance(each, list) for each in found) else [found]
    return tuple(_ids(each, "--tokens") for each in sequences[:MOST_SEQUENCES])


def read_examples(text: str) -> tuple[Sequence, ...]:
    """JSON lines, each an object with a "text" or with "input_ids"; the first MOST_SEQUENCES of them."""
    return tuple(_examples(text))


def cut(text: str, parts: int) -> tuple[Sequence, ...]:
    """A text in so many parts of one length, or in fewer that are long enough to tell anything.

    >>> cut("one text", 8), [len(part) for part in cut("a" * 1000, 2)]
    (('one text',), [500, 500])
    """
    number = max(1, min(parts, len(text) // LEAST_PART))
    length = len(text) // number if number > 1 else len(text)
    return tuple(text[start : start + length] for start in range(0, number * length, length))


def _examples(text: str) -> Iterator[Sequence]:
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise SettingError("Expected --data with an example a line, and it is empty.")
    for number, line in enumerate(lines[:MOST_SEQUENCES], 1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise SettingError(f"Expected --data as JSON lines, and line {number} is no JSON.") from None
        example = found if isinstance(found, dict) else {}
        if isinstance(example.get("text"), str):
            yield _text(example["text"], number)
        elif "input_ids" in example:
            yield _ids(example["input_ids"], f"line {number} of --data")
        else:
            raise SettingError(f'Expected an object with "text" or "input_ids" in line {number} of --data.')


def _text(text: str, number: int) -> str:
    """A text that bytes can be made of: JSON may hold half of a character."""
    if len(text.encode("utf-8", "ignore")) < 2 or text != text.encode("utf-8", "ignore").decode("utf-8"):
        raise SettingError(f"Expected a text of whole characters, two bytes or more, in line {number} of --data.")
    return text


def _ids(found: Any, where: str) -> list[int]:
    is_whole = isinstance(found, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in found)
    if not is_whole or len(found) < 2 or min(found) < 0:
        raise SettingError(f"Expected at least two token ids, whole numbers from 0 on, in {where}.")
    return list(found)
