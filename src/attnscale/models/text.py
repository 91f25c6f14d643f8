"""Text as bytes: every string is a sequence of tokens 0–255, and English comes with every Python."""

import importlib

import torch
from torch import Tensor

VOCABULARY = 256  # one token a byte of UTF-8


def encode(text: str) -> Tensor:
    """The bytes of a text as token ids, (length,).

    >>> encode("√d")
    tensor([226, 136, 154, 100])
    """
    return torch.tensor(list(text.encode("utf-8")), dtype=torch.int64)


def decode(tokens: Tensor) -> str:
    """The text of token ids; bytes that are no UTF-8 show as �."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")


def default_text() -> str:
    """The help texts of Python's own language reference, 450,000 characters of English or more."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n".join(topics[name] for name in sorted(topics))
