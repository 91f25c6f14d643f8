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

from attnscale.measure.lengths import head_lengths
from attnscale.numerics import constant_on, wide_dtype
from attnscale.tracing.coordinates import Indices

Side = Literal["query", "key"]


@dataclass(eq=False)
class GradientLengths:
    """‖∂loss/∂q‖ and ‖∂loss/∂k‖ over all positions of one call, a value a query head; None until a backward passed.

    Each backward pass adds as one of another batch would: a second one through the same graph is not added to the first
    before its length is taken.
    """

    query: Tensor | None = field(default=None, repr=False)
    key: Tensor | None = field(default=None, repr=False)

    @classmethod
    def followed(
        cls, query: Tensor, key: Tensor, heads: int, owners: Indices | None, by_head: Callable[[Tensor], Tensor]
    ) -> "GradientLengths":
        """Follow the gradients of two tensors, which `by_head` makes (batch, heads, length, features).

        Heads that share a key, or have copies of it, share what reaches it; `owners` tells which key each head has.
        """
        lengths = cls()
        lengths._follow("query", query, lambda gradient: head_lengths(by_head(gradient)))
        lengths._follow("key", key, lambda gradient: by_shared_key(by_head(gradient), heads, owners))
        return lengths

    def _follow(self, side: Side, tensor: Tensor, length: Callable[[Tensor], Tensor | None]) -> None:
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return

        def add(gradient: Tensor) -> None:
            with torch.no_grad():
                self._add(side, length(gradient.detach()))

        tensor.register_hook(add)

    def _add(self, side: Side, lengths: Tensor | None) -> None:
        before = getattr(self, side)
        if lengths is not None:
            setattr(self, side, lengths if before is None else torch.hypot(before, lengths))


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


def key_owners_of(ends: Sequence[Sequence[object]], otherwise: Indices) -> Indices:
    """Return which key each head has, numbered as they come, by the channels that made the first and the last of each.

    A cache stands before the new keys, padding after them: the end that tells more heads apart is believed.

    >>> key_owners_of([["a", "a", "b", "b"], [(), (), (), ()]], np.arange(4)).tolist()
    [0, 0, 1, 1]
    """
    found = max((_numbered(keys) for keys in ends if () not in keys), key=lambda own: int(own.max()), default=otherwise)
    return otherwise if len(found) % (int(found.max()) + 1) else found


def _numbered(keys: Sequence[object]) -> Indices:
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys], dtype=np.int64)


def norm_over(calls: Sequence[GradientLengths], name: Side) -> Tensor | None:
    """Return the length of the gradient over all calls, a value a head; None where none was seen."""
    found = [lengths for call in calls if (lengths := getattr(call, name)) is not None]
    return reduce(torch.hypot, found) if found else None
