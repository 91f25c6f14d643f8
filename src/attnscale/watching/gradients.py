"""The gradient that reaches queries and keys: its length a head, added up by hooks while the backward runs.

A hook sees ∂loss/∂q of one call as autograd computed it, a loss scale included. Nothing is kept but the sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from attnscale.measure.lengths import head_lengths, lengths_of_both
from attnscale.numerics import constant_on, wide_dtype
from attnscale.torch_internals import graph_is_kept
from attnscale.tracing.coordinates import Indices


@dataclass(eq=False)
class GradientLengths:
    """‖∂loss/∂q‖ and ‖∂loss/∂k‖ over all positions of one call, a value a query head; None until a backward passed."""

    query: Tensor | None = field(default=None, repr=False)
    key: Tensor | None = field(default=None, repr=False)
    _passed: dict[str, Tensor] = field(default_factory=dict, repr=False)  # through a graph that is kept

    def add(self, name: str, gradient: Tensor, by_head: Callable[[Tensor], Tensor | None]) -> None:
        """Add a gradient that passed; `by_head` returns the length of each head, or None where it cannot be told.

        What another backward through the same graph brings is added to it, as autograd adds what reaches a parameter.
        """
        whole, is_more = self._whole(name, gradient)
        self._note(name, by_head(whole), is_more)

    def add_both(self, query: Tensor, key: Tensor, owners: Indices | None) -> None:
        """Add gradients of (batch, heads, length, features); `owners` tells which key each head has."""
        (query, more_query), (key, more_key) = self._whole("query", query), self._whole("key", key)
        found: tuple[Tensor, Tensor | None]
        if shares_as_kernels_do(query.shape[1], key.shape[1], owners):
            found = lengths_of_both(query, key)
        else:
            found = head_lengths(query), by_shared_key(key, query.shape[1], owners)
        self._note("query", found[0], more_query)
        self._note("key", found[1], more_key)

    def _whole(self, name: str, gradient: Tensor) -> tuple[Tensor, bool]:
        """Return the sum with what passed before through the same graph, and True if anything did."""
        earlier = self._passed.pop(name, None)
        gradient = gradient if earlier is None else earlier + gradient
        if graph_is_kept():
            self._passed[name] = gradient.clone() if earlier is None else gradient
        return gradient, earlier is not None

    def _note(self, name: str, lengths: Tensor | None, is_more: bool) -> None:
        """Note lengths beside those of other graphs, or in the place of what is known of the same."""
        if lengths is None:
            return
        before = None if is_more else getattr(self, name)
        setattr(self, name, lengths if before is None else torch.hypot(before, lengths))

    def settle(self) -> None:
        """Wait for no other backward."""
        self._passed.clear()

    def follow(self, name: str, tensor: Tensor, by_head: Callable[[Tensor], Tensor | None]) -> None:
        """Add up what reaches this tensor: `by_head` tells the length of a gradient, a value a head."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return

        def add(gradient: Tensor) -> None:
            with torch.no_grad():
                self.add(name, gradient.detach(), by_head)

        tensor.register_hook(add)


def of_kernel(
    query: Tensor,
    key: Tensor,
    heads: int,
    owners: Indices | None,
    turn: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> GradientLengths:
    """Follow what a kernel was given, which `turn` makes (batch, heads, length, features).

    Heads that share a key, or have copies of it, share what reaches it; `owners` tells which key each query head has.
    """
    lengths = GradientLengths()
    lengths.follow("query", query, lambda gradient: head_lengths(turn(gradient)))
    lengths.follow("key", key, lambda gradient: by_shared_key(turn(gradient), heads, owners))
    return lengths


def of_product(query: Tensor, key: Tensor, entries: Indices, owners: Indices, factor: float = 1.0) -> GradientLengths:
    """Follow operands (entries, …, …) of a product, of which `entries` (batch, heads) says whose they are.

    Where both were multiplied by a factor, what reaches them before that is told.
    """
    lengths = GradientLengths()
    if query.dim() != 3 or key.dim() != 3 or len(set(entries.ravel().tolist())) < entries.size:
        return lengths  # several heads in one entry cannot be told apart by it

    def by_entry(gradient: Tensor) -> Tensor:
        each = torch.linalg.vector_norm(gradient, dim=(1, 2), dtype=wide_dtype(gradient))
        each = each[constant_on(gradient.device, entries)]  # (batch, heads)
        return factor * torch.linalg.vector_norm(each, dim=0, dtype=torch.float64)  # type: ignore[no-any-return]

    def of_copies(gradient: Tensor) -> Tensor | None:
        found = by_shared_key(gradient[constant_on(gradient.device, entries)], entries.shape[1], owners)
        return None if found is None else factor * found

    lengths.follow("query", query, by_entry)
    lengths.follow("key", key, of_copies if owners.max() + 1 < len(owners) else by_entry)
    return lengths


def by_shared_key(gradient: Tensor, heads: int, owners: Indices | None) -> Tensor | None:
    """Return ‖∂loss/∂k‖ of the key that each query head has, of (batch, keys, length, features).

    What reaches the copies of a key reaches the key. None where one of these keys is shared by heads that are known to
    have several.
    """
    keys = gradient.shape[1]
    group = heads // max(keys, 1)
    if owners is None or shares_as_kernels_do(heads, keys, owners):
        return head_lengths(gradient).repeat_interleave(group)
    own = owners[::group]
    if len(own) != keys or (owners != own.repeat(group)).any():
        return None
    dtype = wide_dtype(gradient)
    summed = gradient.new_zeros(len(gradient), int(own.max()) + 1, *gradient.shape[2:], dtype=dtype)
    summed.index_add_(1, constant_on(gradient.device, own), gradient.to(dtype))
    return head_lengths(summed)[constant_on(gradient.device, owners)]


def shares_as_kernels_do(heads: int, keys: int, owners: Indices | None) -> bool:
    """Return True if each of so many keys is one, shared by as many heads that stand side by side.

    >>> shares_as_kernels_do(4, 2, np.array([0, 0, 1, 1])), shares_as_kernels_do(4, 4, np.array([0, 0, 1, 1]))
    (True, False)
    """
    if owners is None:
        return True
    return len(set(owners.tolist())) == keys and bool((owners == owners[:: heads // keys].repeat(heads // keys)).all())


def owners_told(ends: Sequence[Sequence[object]], otherwise: Indices) -> Indices:
    """Return which key each head has, numbered as they come, by the channels that made the first and the last of each.

    A cache stands before the new keys, padding after them: the end that tells more heads apart is believed.

    >>> owners_told([["a", "a", "b", "b"], [(), (), (), ()]], np.arange(4)).tolist()
    [0, 0, 1, 1]
    """
    found = max((_numbered(keys) for keys in ends if () not in keys), key=lambda own: int(own.max()), default=otherwise)
    return otherwise if len(found) % (int(found.max()) + 1) else found


def _numbered(keys: Sequence[object]) -> Indices:
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys], dtype=np.int64)


def norm_over(calls: Sequence[GradientLengths], name: Literal["query", "key"]) -> Tensor | None:
    """Return the length of the gradient over all calls, a value a head; None where none was seen."""
    found = [lengths for call in calls if (lengths := getattr(call, name)) is not None]
    return reduce(torch.hypot, found) if found else None
