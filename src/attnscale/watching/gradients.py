"""The gradient that reaches queries and keys: its length a head, added up by hooks while the backward runs.

A hook sees ∂loss/∂q of one call as autograd computed it, a loss scale included. Nothing is kept but the sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from attnscale.numerics import wide_dtype
from attnscale.torch_internals import graph_is_kept
from attnscale.tracing.coordinates import Indices


class Learning(Protocol):
    """A tensor that a gradient may reach, or what stands for one."""

    @property
    def shape(self) -> Any:
        """(batch, heads, length, features), of a kernel's."""

    @property
    def requires_grad(self) -> bool:
        """Whether one will."""

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Have the hook called with it."""


@dataclass(eq=False)
class GradientLengths:
    """‖∂loss/∂q‖ and ‖∂loss/∂k‖ over all positions of one call, a value a query head; None until a backward passed."""

    query: Tensor | None = field(default=None, repr=False)
    key: Tensor | None = field(default=None, repr=False)
    _passed: dict[str, Tensor] = field(default_factory=dict, repr=False)  # through a graph that is kept

    def add(self, name: str, gradient: Tensor, by_head: Callable[[Tensor], Tensor | None]) -> None:
        """A gradient has passed, of which `by_head` tells the length of each head; None where it cannot be told.

        What another backward through the same graph brings is added to it, as autograd adds what reaches a parameter.
        """
        earlier = self._passed.pop(name, None)
        gradient = gradient if earlier is None else earlier + gradient
        if graph_is_kept():
            self._passed[name] = gradient.clone() if earlier is None else gradient
        lengths = by_head(gradient)
        if lengths is None:
            return
        before = None if earlier is not None else getattr(self, name)
        setattr(self, name, lengths if before is None else torch.hypot(before, lengths))

    def settle(self) -> None:
        """No other backward is waited for."""
        self._passed.clear()

    def follow(
        self,
        name: str,
        tensor: Learning,
        by_head: Callable[[Tensor], Tensor | None],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Add up what reaches this tensor: `by_head` tells the length of a gradient, a value a head."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return

        def add(gradient: Tensor) -> None:
            with torch.no_grad():
                self.add(name, gradient.detach(), by_head)
            if meanwhile is not None:
                meanwhile()

        tensor.register_hook(add)


def of_kernel(
    query: Learning, key: Learning, owners: Indices | None, meanwhile: Callable[[], None] | None = None
) -> GradientLengths:
    """Follow (batch, heads, length, features); heads that share a key, or have copies of it, share what reaches it.

    `owners` tells of each query head which key it has. `meanwhile` is called whenever a gradient passes.
    """
    lengths, heads = GradientLengths(), query.shape[1]
    lengths.follow("query", query, by_query_head, meanwhile)
    lengths.follow("key", key, lambda gradient: by_shared_key(gradient, heads, owners), meanwhile)
    return lengths


def of_product(query: Tensor, key: Tensor, entries: Indices, owners: Indices) -> GradientLengths:
    """Follow operands (entries, …, …) of a product, of which `entries` (batch, heads) says whose they are."""
    lengths = GradientLengths()
    if query.dim() != 3 or key.dim() != 3 or len(set(entries.ravel().tolist())) < entries.size:
        return lengths  # several heads in one entry cannot be told apart by it
    at = torch.from_numpy(entries)

    def by_entry(gradient: Tensor) -> Tensor:
        of_entries: Tensor = torch.linalg.vector_norm(gradient, dim=(1, 2), dtype=wide_dtype(gradient))
        return _over_batch(of_entries[at.to(gradient.device)])

    def of_copies(gradient: Tensor) -> Tensor | None:
        return by_shared_key(gradient[at.to(gradient.device)], entries.shape[1], owners)

    lengths.follow("query", query, by_entry)
    lengths.follow("key", key, of_copies if owners.max() + 1 < len(owners) else by_entry)
    return lengths


def by_query_head(gradient: Tensor) -> Tensor:
    """‖∂loss‖ of each head of (batch, heads, length, features); by one kernel on a GPU, which sums in pairs."""
    dtype = wide_dtype(gradient)
    if gradient.is_cuda:
        return torch.linalg.vector_norm(gradient, dim=(0, 2, 3), dtype=dtype)  # type: ignore[no-any-return]
    return _over_batch(torch.linalg.vector_norm(gradient, dim=(-2, -1), dtype=dtype))


def _over_batch(lengths: Tensor) -> Tensor:
    """Of (batch, heads), a value a head."""
    return torch.linalg.vector_norm(lengths, dim=0, dtype=torch.float64)  # type: ignore[no-any-return]


def by_shared_key(gradient: Tensor, heads: int, owners: Indices | None) -> Tensor | None:
    """‖∂loss/∂k‖ of the key that each query head has, of (batch, keys, length, features).

    What reaches the copies of a key reaches the key. None where one of these keys is shared by heads that are known to
    have several.
    """
    keys = gradient.shape[1]
    group = heads // max(keys, 1)
    if owners is None:
        lengths = by_query_head(gradient)
        return lengths if group == 1 else lengths.repeat_interleave(group)
    own = owners[::group]
    if len(own) != keys or (np.repeat(own, group) != owners).any():
        return None
    distinct = int(own.max()) + 1
    if distinct < keys:
        of_keys = gradient.new_zeros(len(gradient), distinct, *gradient.shape[2:], dtype=wide_dtype(gradient))
        gradient = of_keys.index_add_(1, torch.from_numpy(own).to(gradient.device), gradient.to(of_keys.dtype))
    lengths = by_query_head(gradient)
    return lengths if distinct == heads else lengths[torch.from_numpy(owners).to(lengths.device)]


def owners_told(ends: Sequence[Sequence[object]], otherwise: Indices) -> Indices:
    """Which key each head has, numbered as they come, by the channels that made the first and the last key of each.

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
    """The length of the gradient over all calls, a value a head; None where none was seen."""
    found = [lengths for call in calls if (lengths := getattr(call, name)) is not None]
    return reduce(torch.hypot, found) if found else None
