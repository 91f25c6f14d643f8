"""Tasks for the models of the lab, drawn from a generator."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnscale.models.bundled import split
from attnscale.models.text import VOCABULARY, default_text

NOT_ASKED = -100  # ignored by cross_entropy
HELD_OUT_SEED = 2**40  # not the seed of any run


@dataclass(frozen=True)
class Batch:
    """Tokens and their targets, (batch, length) both; NOT_ASKED where there is no target."""

    tokens: Tensor
    targets: Tensor

    def loss(self, model: nn.Module) -> Tensor:
        """Return the mean cross-entropy over all targets, in nats, on the model's device."""
        device = next(model.parameters()).device
        return F.cross_entropy(model(self.tokens.to(device)).flatten(0, 1), self.targets.to(device).flatten())


@dataclass(frozen=True)
class Characters:
    """Predict the next byte of Python's help texts; the last twentieth of the text is held out.

    >>> Characters(length=5).batch(2, torch.Generator().manual_seed(0)).tokens.shape
    torch.Size([2, 5])
    """

    length: int = 64

    vocabulary = VOCABULARY
    chance = math.log(VOCABULARY)

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Return random windows of the text."""
        text = _text()[0]
        return self._windows(text, torch.randint(len(text) - self.length, (size,), generator=generator))

    def name_of(self, token: int) -> str:
        """Return a token as readable text."""
        return repr(chr(token))[1:-1].replace(" ", "␣")

    def held_out(self, size: int) -> Batch:
        """Return evenly spaced windows of the held-out text."""
        text = _text()[1]
        return self._windows(text, torch.linspace(0, len(text) - self.length - 1, size).long())

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        window = text[starts[:, None] + torch.arange(self.length + 1)]
        return Batch(window[:, :-1], window[:, 1:])


@dataclass(frozen=True)
class Recall:
    """Recall the value of a key; every sequence has new pairs of keys and values.

    A round lists every pair, key then value, in random order. From the second round on, the value is the target of its
    key. Only attention to an earlier position can answer; without it the loss stays at ln(values).

    >>> batch = Recall(pairs=2, rounds=2, keys=3, values=5).batch(1, torch.Generator().manual_seed(0))
    >>> batch.tokens.tolist(), batch.targets.tolist()
    ([[0, 6, 2, 3, 0, 6, 2]], [[-100, -100, -100, -100, 6, -100, 3]])
    """

    pairs: int = 8
    rounds: int = 4
    keys: int = 16
    values: int = 16

    @property
    def vocabulary(self) -> int:
        """Number of tokens: keys first, then values."""
        return self.keys + self.values

    @property
    def chance(self) -> float:
        """Loss of guessing any value."""
        return math.log(self.values)

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Return sequences of 2 · pairs · rounds − 1 tokens; the last value is only a target."""
        keys = _orders(size, self.keys, generator)[:, : self.pairs]
        values = torch.randint(self.values, (size, self.pairs), generator=generator) + self.keys
        orders = torch.cat([_orders(size, self.pairs, generator) for _ in range(self.rounds)], dim=1)
        pairs = torch.stack([keys.gather(1, orders), values.gather(1, orders)], dim=-1).flatten(1)
        targets = torch.full_like(pairs, NOT_ASKED)
        asked = slice(2 * self.pairs, None, 2)  # the keys of all rounds but the first
        targets[:, asked] = pairs[:, 1:][:, asked]
        return Batch(pairs[:, :-1], targets[:, :-1])

    def name_of(self, token: int) -> str:
        """Return a token as readable text: k for keys, v for values."""
        return f"k{token}" if token < self.keys else f"v{token - self.keys}"

    def held_out(self, size: int) -> Batch:
        """Return sequences from HELD_OUT_SEED."""
        return self.batch(size, torch.Generator().manual_seed(HELD_OUT_SEED))


def _orders(size: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.rand(size, length, generator=generator).argsort(dim=1)


@lru_cache(maxsize=1)
def _text() -> tuple[Tensor, Tensor]:
    """Return the tokens to train on and those held out; paragraphs that several help texts share occur once."""
    paragraphs = dict.fromkeys(default_text().split("\n\n"))
    return split("\n\n".join(paragraphs))


Task = Characters | Recall
TASKS: dict[str, Task] = {
    "characters": Characters(length=32),
    "recall": Recall(pairs=4),
    "easy recall": Recall(pairs=3, rounds=3, keys=8, values=8),  # training makes progress within a second
}
