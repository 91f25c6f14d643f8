"""Request for a model, its input and its device. This module does not import torch, so bad input fails fast."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from attnscale.errors import SettingError

Sequence: TypeAlias = str | list[int]  # a text for the model's tokenizer, or token ids
MAX_LENGTH = 2**20  # tokens; limit of --length
MAX_SEQUENCES = 64  # sequences read from a file, run as one batch
MIN_PART = 64  # characters; shorter parts of a text are too short for statistics


@dataclass(frozen=True)
class Request:
    """Model to load, with its input and device."""

    model: str | None = None  # None: the model that ships with the package
    text: str | None = None  # without text and sequences, English text from Python's help is used
    length: int | None = None  # tokens; None: 256, or the model's context if that is shorter
    device: str = "cpu"
    random_init: bool = False
    sequences: tuple[Sequence, ...] = ()  # texts or token ids, run as one batch
    report: Callable[[str], None] = field(default=lambda stage: None, repr=False)  # called with each stage
    model_type: str | None = None  # for a config.json without one
    base: str | None = None  # base model of an adapter; None: the base that the adapter names
    download: bool = False  # fetch a model by its name first
    samples: int = 1  # number of sequences to split a text into, or to draw

    def __post_init__(self) -> None:
        if self.length is not None and not 2 <= self.length <= MAX_LENGTH:
            raise SettingError(f"Expected --length from 2 to {MAX_LENGTH:,}, got {self.length}.")
        if self.text is not None and len(self.text.encode("utf-8")) < 2:
            raise SettingError("Expected a text of at least two characters, got a shorter one.")

    @property
    def user_sequences(self) -> tuple[Sequence, ...]:
        """Sequences from the user; empty if there are none."""
        return split_text(self.text, self.samples) if self.text is not None else self.sequences

    @property
    def source(self) -> str:
        """Description of the source of the tokens."""
        if self.text is not None:
            return "the text"
        number = len(self.sequences)
        return {0: "English text", 1: "the sequence given"}.get(number, f"the {number} sequences given")


def split_text(text: str, parts: int) -> tuple[str, ...]:
    """Split a text into parts of equal length; use fewer parts for a short text.

    >>> split_text("one text", 8), [len(part) for part in split_text("a" * 1000, 2)]
    (('one text',), [500, 500])
    """
    number = max(1, min(parts, len(text) // MIN_PART))
    length = len(text) // number
    return tuple(text[start : start + length] for start in range(0, number * length, length))


def read_examples(text: str) -> tuple[Sequence, ...]:
    """Parse JSON lines with a "text" or "input_ids" each; ignore lines after the first MAX_SEQUENCES."""
    found = tuple(_examples(text))
    if not found:
        raise SettingError("Expected --data with one example per line, got an empty file.")
    return found


def _examples(text: str) -> Iterator[Sequence]:
    lines = [line for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines[:MAX_SEQUENCES], 1):
        try:
            example = json.loads(line)
        except (ValueError, RecursionError):
            raise SettingError(f"Expected --data as JSON lines, but line {number} is not JSON.") from None
        if not isinstance(example, dict) or not ("input_ids" in example or isinstance(example.get("text"), str)):
            raise SettingError(f'Expected an object with "text" or "input_ids" in line {number} of --data.')
        if "text" not in example:
            yield _token_ids(example["input_ids"], number)
            continue
        words = example["text"]
        encoded = words.encode("utf-8", "ignore") if isinstance(words, str) else b""
        if len(encoded) < 2 or encoded.decode("utf-8") != words:  # JSON may contain half of a surrogate pair
            raise SettingError(f"Expected a text of at least two whole characters in line {number} of --data.")
        yield words


def _token_ids(found: Any, line: int) -> list[int]:
    are_numbers = isinstance(found, list) and all(type(each) is int for each in found)
    if not are_numbers or len(found) < 2 or min(found) < 0:
        raise SettingError(f"Expected at least two token ids, whole numbers from 0 on, in line {line} of --data.")
    return list(found)
