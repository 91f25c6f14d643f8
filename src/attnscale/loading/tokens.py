"""Token ids for a Hugging Face model: from its own tokenizer, or drawn at random where it has none."""

from pathlib import Path

import torch
from torch import Tensor

from attnscale.errors import ModelError
from attnscale.loading.telling import telling

CHARACTERS_A_TOKEN = 16  # at most, in any text worth the name: more of it is not read
VOCABULARIES = ("tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")
SEED = 0


def tokenize(folder: Path, text: str, length: int) -> Tensor | None:
    """The first `length` token ids of a text, (1, length), by the tokenizer in that folder; None without one."""
    text = text[: CHARACTERS_A_TOKEN * length]
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        with telling(f"read the tokenizer in {folder}"):
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            ids = tokenizer.encode(text).ids
    elif any((folder / name).is_file() for name in VOCABULARIES):
        from transformers import AutoTokenizer

        with telling(f"read the tokenizer in {folder}"):
            slow = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
            ids = slow(text)["input_ids"]
    else:
        return None
    if len(ids) < 2:
        raise ModelError("Expected a text of at least two tokens, and it is shorter.")
    return torch.tensor([ids[:length]])


def random_tokens(vocabulary: int, length: int) -> Tensor:
    """Token ids drawn alike from the whole vocabulary, the same every time, (1, length)."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(vocabulary, (1, length), generator=generator)
