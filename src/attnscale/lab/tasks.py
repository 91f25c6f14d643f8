"""Tasks: what a model of the lab learns, drawn from a generator."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnscale.models.bundled import split
from attnscale.models.text import VOCABULARY, default_text

NOT_ASKED = -100  # what cross_entropy leaves out
HELD_OUT_SEED = 2**40  # of no run


@dataclass(frozen=True)
class Batch:
    """Tokens and what should follow each of them, (batch, length) both; NOT_ASKED where anything may."""

    tokens: Tensor
    targets: Tensor

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on a device."""
        return Batch(self.tokens.to(device), self.targets.to(device))

    def loss(self, model: nn.Module) -> Tensor:
        """Mean cross-entropy of the model's logits over what is asked, in nats."""
        return F.cross_entropy(model(self.tokens).flatten(0, 1), self.targets.flatten())


class Task(Protocol):
    """Batches to train on, a fixed one that training does not see, and the loss of a model that knows nothing."""

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        ...

    @property
    def chance(self) -> float:
        """The loss of guessing evenly among what could be an answer, in nats."""
        ...

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """A batch, as the generator has it."""
        ...

    def held_out(self, size: int) -> Batch:
        """The same examples in every run, none of them trained on."""
        ...


@dataclass(frozen=True)
class Characters:
    """The next byte of Python's help texts; 256 tokens, the last twentieth of the text held out.

    >>> Characters(length=5).batch(2, torch.Generator().manual_seed(0)).tokens.shape
    torch.Size([2, 5])
    """

    length: int = 64

    vocabulary = VOCABULARY
    chance = math.log(VOCABULARY)

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Windows from anywhere in the text."""
        text = _text()[0]
        return self._windows(text, torch.randint(len(text) - self.length, (size,), generator=generator))

    def held_out(self, size: int) -> Batch:
        """Windows evenly over the text held out."""
        text = _text()[1]
        return self._windows(text, torch.linspace(0, len(text) - self.length - 1, size).long())

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        window = text[starts[:, None] + torch.arange(self.length + 1)]
        return Batch(window[:, :-1], window[:, 1:])


@dataclass(frozen=True)
class Recall:
    """Which value goes with this key? Each sequence pairs keys with values of its own, and repeats all pairs.

    A round tells every pair, key then value, in an order of its own; from the second round on the value is asked for.
    Nothing but attention to an earlier place in the same sequence can answer, so guessing stays at ln(values).

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
        """Keys come first, values after them."""
        return self.keys + self.values

    @property
    def chance(self) -> float:
        """The loss of guessing any value."""
        return math.log(self.values)

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Sequences of 2 · pairs · rounds − 1 tokens; the last value is a target alone."""
        keys = _orders(size, self.keys, generator)[:, : self.pairs]
        values = torch.randint(self.values, (size, self.pairs), generator=generator) + self.keys
        orders = torch.cat([_orders(size, self.pairs, generator) for _ in range(self.rounds)], dim=1)
        told = torch.stack([keys.gather(1, orders), values.gather(1, orders)], dim=-1).flatten(1)
        targets = torch.full_like(told, NOT_ASKED)
        asked = slice(2 * self.pairs, None, 2)  # the keys of all rounds but the first
        targets[:, asked] = told[:, 1:][:, asked]
        return Batch(told[:, :-1], targets[:, :-1])

    def held_out(self, size: int) -> Batch:
        """Sequences of a seed of their own."""
        return self.batch(size, torch.Generator().manual_seed(HELD_OUT_SEED))


def _orders(size: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.rand(size, length, generator=generator).argsort(dim=1)


@lru_cache(maxsize=1)
def _text() -> tuple[Tensor, Tensor]:
    """The tokens to train on, and those held out; each paragraph once, for many stand in several help texts."""
    paragraphs = dict.fromkeys(default_text().split("\n\n"))
    return split("\n\n".join(paragraphs))


TASKS: dict[str, Task] = {
    "characters": Characters(length=32),
    "recall": Recall(pairs=4),
    "easy recall": Recall(pairs=3, rounds=3, keys=8, values=8),  # begins to be learned within a second
}
