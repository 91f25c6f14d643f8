"""Ragged batches: sequences laid end to end, and the nested tensors that hold them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnscale.errors import InputError, ShapeError
from attnscale.torch_internals import known_longest, ragged_axis, unseen

Wrapping = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """Where each of some sequences begins, and where the last ends."""

    offsets: Tensor  # (sequences + 1,), on the device of the tokens
    known_longest: int | None = None  # where a caller has said it

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Layout":
        """Of sequences of these lengths."""
        ends = torch.tensor([0, *lengths]).cumsum(0)
        return cls(ends.to(device, non_blocking=True))

    @classmethod
    def even(cls, count: int, length: int, device: torch.device) -> "Layout":
        """Of so many sequences of one length."""
        return cls(torch.arange(count + 1, device=device) * length, length)

    @property
    def count(self) -> int:
        """How many sequences."""
        return self.offsets.shape[0] - 1  # of which len() would make a constant in a graph

    @property
    def sizes(self) -> Tensor:
        """The length of each sequence, on the device."""
        return self.offsets.diff()

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The same, known to the host: a GPU is waited for."""
        return tuple(self.sizes.tolist())

    @property
    def longest(self) -> int:
        """The length of the longest sequence."""
        return max(self.lengths, default=0) if self.known_longest is None else self.known_longest

    @property
    def is_at_hand(self) -> bool:
        """Whether looking at it costs nothing."""
        return self.offsets.device.type == "cpu" and not unseen(self.offsets)

    def check_starts(self, name: str) -> None:
        """Refuse what is no layout; a GPU is not waited for."""
        if self.is_at_hand and (int(self.offsets[0]) != 0 or bool((self.offsets.diff() < 0).any())):
            raise InputError(f"Expected {name} to begin with 0 and never to fall, got {self.offsets.tolist()}.")

    def check_end(self, name: str, row: Tensor) -> None:
        """Refuse another number of tokens than there are in a row (1, heads, total, width)."""
        total = row.shape[-2]
        if self.is_at_hand and int(self.offsets[-1]) != total:
            raise ShapeError(
                f"Expected the last sequence to end with the {name}'s {total} tokens, got {int(self.offsets[-1])}."
            )

    def sequence_of(self, tokens: int) -> Tensor:
        """The number of the sequence that each of so many tokens belongs to."""
        every = torch.arange(self.count, device=self.offsets.device)
        return every.repeat_interleave(self.sizes, output_size=tokens)

    def equals(self, other: "Layout") -> bool:
        """Whether sequences of one are known to begin where those of the other do."""
        if self is other or self.offsets is other.offsets:
            return True
        return not unseen(self.offsets) and torch.equal(self.offsets, other.offsets)

    def differs(self, other: "Layout") -> bool:
        """Whether some sequence is known to begin elsewhere."""
        return not unseen(self.offsets) and not self.equals(other)

    def with_one_more(self) -> "Layout":
        """Of sequences with one token more each."""
        return Layout(self.offsets + torch.arange(self.count + 1, device=self.offsets.device))


@dataclass(frozen=True)
class Sequences:
    """Tokens of sequences laid end to end, (1, heads, total, width): a batch of one row."""

    tokens: Tensor
    layout: Layout

    def with_another(self, token: Tensor) -> "Sequences":
        """The same with one more token, (1, heads, 1, width), behind every sequence."""
        total, longer = self.tokens.shape[-2], self.layout.with_one_more()
        behind = token.expand(-1, -1, self.layout.count, -1)
        at = torch.arange(total, device=self.tokens.device) + self.layout.sequence_of(total)
        places = torch.cat([at, longer.offsets[1:].long() - 1])
        return Sequences(torch.cat([self.tokens, behind], dim=-2)[:, :, places.argsort()], longer)

    def repeated(self, times: int) -> "Sequences":
        """A batch of one sequence, for so many that share it."""
        if times == self.layout.count:
            return self
        length = self.tokens.shape[-2]
        return Sequences(self.tokens.repeat(1, 1, times, 1), Layout.even(times, length, self.tokens.device))


def as_one_row(tokens: Tensor) -> Tensor:
    """(total, heads, width) as (1, heads, total, width)."""
    return tokens.transpose(0, 1).unsqueeze(0)


def as_tokens(row: Tensor) -> Tensor:
    """The other way round."""
    return row.squeeze(0).transpose(0, 1)


def unnested(tensor: Tensor, name: str) -> Sequences:
    """The sequences of a nested tensor (batch, heads, length, width) or (batch, length, width), or of a plain one."""
    if not tensor.is_nested:
        return _even(tensor, name)
    if tensor.dim() not in (3, 4):
        raise ShapeError(
            f"Expected {name} nested as (batch, heads, length, head_dim), got {tensor.dim()} dimensions; "
            "a ragged batch has one dimension of sequences."
        )
    if tensor.layout is torch.jagged and jagged(tensor).lengths() is None:
        if ragged_axis(tensor) != tensor.dim() - 2:
            raise ShapeError(
                f"Expected {name} with ragged lengths, (batch, heads, length, head_dim), got a ragged dimension "
                f"{ragged_axis(tensor)}; put heads before the length with transpose(1, 2)."
            )
        row, offsets = jagged(tensor).values(), jagged(tensor).offsets()  # every operator of a nested tensor costs
        row = row.unsqueeze(0) if row.dim() == 3 else row[None, None]
        return Sequences(row, Layout(offsets, None if unseen(offsets) else known_longest(tensor)))
    parts = [part if part.dim() == 3 else part.unsqueeze(0) for part in tensor.unbind()]
    lengths = [part.shape[-2] for part in parts]
    return Sequences(torch.cat(parts, dim=-2).unsqueeze(0), Layout.of(lengths, tensor.device))


def jagged(tensor: Tensor) -> Any:
    """The tensor with the methods that only jagged ones have."""
    return tensor


def _even(tensor: Tensor, name: str) -> Sequences:
    """A plain tensor beside nested ones: sequences of one length."""
    if tensor.dim() != 4:
        raise ShapeError(
            f"Expected {name} nested too, or (batch, heads, length, head_dim), beside nested tensors, "
            f"got shape {tuple(tensor.shape)}."
        )
    batch, _, length, _ = tensor.shape
    row = tensor.transpose(0, 1).flatten(1, 2).unsqueeze(0)
    return Sequences(row, Layout.even(batch, length, tensor.device))


def wrapping(query: Tensor, like: Tensor, layout: Layout) -> Wrapping:
    """What makes a row of results (1, heads, total, width) a nested tensor, as `like` is one."""
    flat = query.dim() == 3

    def as_jagged(row: Tensor) -> Tensor:
        known = (min(layout.lengths), max(layout.lengths)) if _is_known(layout) else (None, None)
        made = torch.nested.nested_tensor_from_jagged(as_tokens(row), layout.offsets, None, None, *known)
        return made.squeeze(2) if flat else made.transpose(1, 2)

    def strided(row: Tensor) -> Tensor:
        parts = row.squeeze(0).split(layout.lengths, dim=-2)
        return torch.nested.as_nested_tensor([part.squeeze(0) if flat else part for part in parts])

    return as_jagged if like.layout is torch.jagged else strided


def _is_known(layout: Layout) -> bool:
    return layout.count > 0 and (layout.is_at_hand or "lengths" in vars(layout)) and not unseen(layout.offsets)
