"""Norm of the gradient that reaches queries and keys, per head, accumulated by hooks during the backward pass.

A hook receives ∂loss/∂q of one call from autograd, including any loss scale. Only the norms are stored.
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
    """‖∂loss/∂q‖ and ‖∂loss/∂k‖ of one call, one value per query head; None before the first backward pass.

    A second backward pass through the same graph counts like that of another batch: norms are combined, gradients are
    not summed.
    """

    query: Tensor | None = field(default=None, repr=False)
    key: Tensor | None = field(default=None, repr=False)

    @classmethod
    def followed(
        cls, query: Tensor, key: Tensor, owners: Indices, by_head: Callable[[Tensor], Tensor]
    ) -> "GradientLengths":
        """Add hooks to two tensors; `by_head` reshapes their gradients to (batch, heads, length, features).

        Heads that share a key, or have copies of it, share its gradient; `owners` holds the key number of each head.
        """
        lengths = cls()
        lengths._follow("query", query, lambda gradient: head_lengths(by_head(gradient)))
        lengths._follow("key", key, lambda gradient: by_shared_key(by_head(gradient), owners))
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


def by_shared_key(gradient: Tensor, owners: Indices) -> Tensor | None:
    """Return ‖∂loss/∂k‖ of each query head's key, from the gradient (batch, keys, length, features).

    Gradients of copies of a key are summed. None if heads with different keys, by `owners`, share one of these keys.
    """
    keys = gradient.shape[1]
    group = len(owners) // max(keys, 1)
    if shares_as_kernels_do(len(owners), keys, owners):
        return head_lengths(gradient).repeat_interleave(group)
    own = owners[::group]
    if len(own) != keys or (owners != own.repeat(group)).any():
        return None
    dtype = wide_dtype(gradient)
    summed = gradient.new_zeros(len(gradient), int(own.max()) + 1, *gradient.shape[2:], dtype=dtype)
    summed.index_add_(1, constant_on(gradient.device, own), gradient.to(dtype))
    return head_lengths(summed)[constant_on(gradient.device, owners)]


def shares_as_kernels_do(heads: int, keys: int, owners: Indices | None) -> bool:
    """Return True if all keys are distinct and each is shared by an equally large block of adjacent heads.

    >>> shares_as_kernels_do(4, 2, np.array([0, 0, 1, 1])), shares_as_kernels_do(4, 4, np.array([0, 0, 1, 1]))
    (True, False)
    """
    if owners is None:
        return True
    return len(set(owners.tolist())) == keys and bool((owners == owners[:: heads // keys].repeat(heads // keys)).all())


def key_owners_of(ends: Sequence[Sequence[object]], otherwise: Indices) -> Indices:
    """Return the key number of each head, in order of appearance, from the channels of its first and last key.

    The first key may come from a cache and the last may be padding, so the end that distinguishes more heads is used.
    """
    best = max((keys for keys in ends if () not in keys), key=lambda keys: len(set(keys)), default=())
    numbers = {key: number for number, key in enumerate(dict.fromkeys(best))}
    if not numbers or len(best) % len(numbers):
        return otherwise
    return np.array([numbers[key] for key in best], dtype=np.int64)


def norm_over(calls: Sequence[GradientLengths], name: Side) -> Tensor | None:
    """Return the norm of the gradient over all calls, one value per head; None if no gradient arrived."""
    found = [lengths for call in calls if (lengths := getattr(call, name)) is not None]
    return reduce(torch.hypot, found) if found else None
