"""The loss and the learning rate of a step, from the training loop, and the mean loss of all ranks."""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Given = float | Tensor | None
Learned = tuple[float | None, float | None]  # loss and learning rate, None where not given
PACKED = struct.Struct("<dq")


class Arriving:
    """A number on its way to the host: one on a GPU is copied in stream order, without waiting."""

    def __init__(self, given: float | Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if isinstance(given, Tensor):
            mean = given.detach().float().mean()  # a new tensor: the loop may write to its own
            given = mean.to("cpu", non_blocking=mean.is_cuda)
            self._event = torch.cuda.current_stream(mean.device).record_event() if mean.is_cuda else None
        self._number = given if isinstance(given, Tensor) else float(given)

    @property
    def is_here(self) -> bool:
        """True if value() would not wait."""
        return self._event is None or self._event.query()

    def value(self) -> float:
        """Wait for the number and return it."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._number)


@dataclass(frozen=True)
class Learning:
    """Loss and learning rate of a step."""

    loss: Arriving | None = None
    lr: Arriving | None = None

    def given(self, loss: Given, lr: Given) -> "Learning":
        """Return these numbers, replaced by those that are not None."""
        return Learning(
            self.loss if loss is None else Arriving(loss),
            self.lr if lr is None else Arriving(lr),
        )

    @property
    def is_here(self) -> bool:
        """True if values() would not wait."""
        return all(number is None or number.is_here for number in (self.loss, self.lr))

    def values(self) -> Learned:
        """Return the loss and the learning rate, None where not given."""
        loss, lr = (None if number is None else number.value() for number in (self.loss, self.lr))
        return loss, lr


@dataclass(frozen=True)
class Losses:
    """Sum of the losses of ranks, and their number."""

    total: float = 0.0
    ranks: int = 0  # with a loss

    @classmethod
    def of(cls, loss: float | None) -> "Losses":
        """Return the loss of one rank."""
        return cls() if loss is None else cls(loss, 1)

    @property
    def mean(self) -> float | None:
        """Mean loss, as data-parallel training averages it; None where no rank has one.

        >>> Losses(6.0, 2).mean, Losses().mean
        (3.0, None)
        """
        return self.total / self.ranks if self.ranks else None

    def before(self, payload: bytes) -> bytes:
        """Return a message between ranks with these losses in front."""
        return PACKED.pack(self.total, self.ranks) + payload

    @classmethod
    def and_rest(cls, payload: bytes) -> tuple["Losses", bytes]:
        """Split what before() put together.

        >>> Losses.and_rest(Losses(6.0, 2).before(b"tallies"))
        (Losses(total=6.0, ranks=2), b'tallies')
        """
        return cls(*PACKED.unpack(payload[: PACKED.size])), payload[PACKED.size :]


def merged(losses: Iterable[Losses]) -> Losses:
    """Return the losses of all ranks."""
    seen = list(losses)
    return Losses(sum(one.total for one in seen), sum(one.ranks for one in seen))


def rate_of(optimizer: Any) -> Given:
    """Return the learning rate of the first group of an optimiser; None where it has none."""
    groups = getattr(optimizer, "param_groups", None)
    return groups[0].get("lr") if groups else None
