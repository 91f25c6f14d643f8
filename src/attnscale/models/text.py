"""Text as bytes, tokens 0–255, and an English text that ships with Python."""

import importlib

import torch
from torch import Tensor

VOCABULARY = 256  # one token per byte of UTF-8


def encode(text: str) -> Tensor:
    """Return the bytes of a text as token ids, (length,).

    >>> encode("√d")
    tensor([226, 136, 154, 100])
    """
    return torch.tensor(list(text.encode("utf-8")), dtype=torch.int64)


def decode(tokens: Tensor) -> str:
    """Return the text of token ids; bytes that are not UTF-8 become �."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")


def default_text() -> str:
    """Return the help texts of Python's language reference, at least 450,000 characters of English."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n".join(topics[name] for name in sorted(topics))
