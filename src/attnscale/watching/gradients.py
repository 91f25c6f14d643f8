"""The gradient that reaches queries and keys: squared lengths a head, added up by hooks while the backward runs.

A hook sees ∂loss/∂q of one call as autograd computed it, a loss scale included. Nothing is kept but the sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from attnscale.numerics import wide_dtype
from attnscale.tracing.coordinates import Indices


@dataclass(eq=False)
class GradientSquares:
    """Σ‖∂loss/∂q‖² and Σ‖∂loss/∂k‖² of one call, a value a query head; None until a backward passed."""

    query: Tensor | None = field(default=None, repr=False)
    key: Tensor | None = field(default=None, repr=False)

    def add(self, name: str, squares: Tensor) -> None:
        """A gradient has passed, with these squares a head."""
        before = getattr(self, name)
        setattr(self, name, squares if before is None else before + squares)

    def follow(
        self,
        name: str,
        tensor: Tensor,
        by_head: Callable[[Tensor], Tensor],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Add up what reaches this tensor: `by_head` turns squares of the gradient into a value a head."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return

        def add(gradient: Tensor) -> None:
            with torch.no_grad():
                self.add(name, by_head(gradient.detach()))
            if meanwhile is not None:
                meanwhile()

        tensor.register_hook(add)


def of_kernel(query: Tensor, key: Tensor, meanwhile: Callable[[], None] | None = None) -> GradientSquares:
    """Follow (batch, heads, length, features); the heads of a group share what reaches their key.

    `meanwhile` is called whenever a gradient passes.
    """
    squares, group = GradientSquares(), query.shape[1] // max(key.shape[1], 1)
    squares.follow("query", query, by_query_head, meanwhile)

    def of_key(gradient: Tensor) -> Tensor:
        return by_query_head(gradient, group)

    squares.follow("key", key, of_key, meanwhile)
    return squares


def of_product(query: Tensor, key: Tensor, entries: Indices) -> GradientSquares:
    """Follow operands (entries, …, …) of a product, of which `entries` (batch, heads) says whose they are."""
    squares = GradientSquares()
    if query.dim() != 3 or key.dim() != 3 or len(set(entries.ravel().tolist())) < entries.size:
        return squares  # several heads in one entry cannot be told apart by it
    at = torch.from_numpy(entries)

    def by_entry(gradient: Tensor) -> Tensor:
        wide = gradient.to(wide_dtype(gradient))
        return wide.square().sum((1, 2), dtype=torch.float64)[at.to(gradient.device)].sum(0)

    squares.follow("query", query, by_entry)
    squares.follow("key", key, by_entry)
    return squares


def by_query_head(gradient: Tensor, group: int = 1) -> Tensor:
    """Σ‖∂loss‖² of each head of (batch, heads, length, features), once for each query head that shares it."""
    lengths: Tensor = torch.linalg.vector_norm(gradient, dim=(-2, -1), dtype=wide_dtype(gradient))
    squares = lengths.square().sum(0, dtype=torch.float64)
    return squares if group == 1 else squares.repeat_interleave(group)


def norm_over(calls: Sequence[GradientSquares], name: Literal["query", "key"]) -> Tensor | None:
    """The length of the gradient over all calls, a value a head; None where none was seen."""
    found = [squares for call in calls if (squares := getattr(call, name)) is not None]
    return sum(found[1:], found[0]).sqrt() if found else None
