"""Token ids for a Hugging Face model: from its own tokenizer, or drawn at random where it has none."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnscale.errors import ModelError
from attnscale.loading.telling import telling

CHARACTERS_A_TOKEN = 16  # at most, in any text worth the name: more of it is not read
VOCABULARIES = ("tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")
SEED = 0


@dataclass(frozen=True)
class Batch:
    """Token ids, (sequences, length), and where they are none but padding."""

    ids: Tensor
    mask: Tensor | None = None  # 1 for a token, 0 for padding; None where there is none
    unknown: float = 0.0  # share of the tokens that the model has no word for


class Tokenizer:
    """The tokenizer in a model's folder, as ids, and which id stands for what it does not know."""

    def __init__(self, encode: Callable[[str], list[int]], unknown: int | None) -> None:
        self._encode, self._unknown = encode, unknown

    def ids(self, text: str, length: int) -> list[int]:
        """The first `length` token ids of a text."""
        found = self._encode(text[: CHARACTERS_A_TOKEN * length])
        if len(found) < 2:
            raise ModelError("Expected a text of at least two tokens, and it is shorter.")
        return found[:length]

    def unknown_share(self, ids: list[int]) -> float:
        """How much of it the model has no token for."""
        return 0.0 if self._unknown is None else ids.count(self._unknown) / len(ids)


def tokenizer_in(folder: Path) -> Tokenizer | None:
    """The tokenizer in that folder; None without one."""
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer as Fast

        with telling(f"read the tokenizer in {folder}"):
            fast = Fast.from_file(str(folder / "tokenizer.json"))
            fast.no_truncation()
            fast.no_padding()
            return Tokenizer(lambda text: list(fast.encode(text).ids), _unknown_of(fast))
    if any((folder / name).is_file() for name in VOCABULARIES):
        from transformers import AutoTokenizer

        with telling(f"read the tokenizer in {folder}"):
            slow = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
            return Tokenizer(lambda text: list(slow(text)["input_ids"]), slow.unk_token_id)
    return None


def _unknown_of(fast: Any) -> int | None:
    name, number = getattr(fast.model, "unk_token", None), getattr(fast.model, "unk_id", None)
    return number if name is None else fast.token_to_id(name)


def padded(sequences: list[list[int]], padding: int | None) -> Batch:
    """Sequences side by side, the shorter ones padded at their end.

    >>> padded([[5, 6, 7], [8, 9]], None).mask
    tensor([[1, 1, 1],
            [1, 1, 0]])
    """
    longest = max(map(len, sequences))
    ids = torch.tensor([each + [padding or 0] * (longest - len(each)) for each in sequences])
    lengths = torch.tensor([[len(each)] for each in sequences])
    mask = (torch.arange(longest) < lengths).long()
    return Batch(ids, None if mask.all() else mask)


def random_tokens(vocabulary: int, length: int, sequences: int = 1) -> Tensor:
    """Token ids drawn alike from the whole vocabulary, the same every time, (sequences, length)."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(vocabulary, (sequences, length), generator=generator)
