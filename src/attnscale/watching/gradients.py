"""The gradient that reaches queries and keys: its length a head, added up by hooks while the backward runs.

A hook sees ∂loss/∂q of one call as autograd computed it, a loss scale included. Nothing is kept but the sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from attnscale.measure.lengths import head_lengths, lengths_of_both, lengths_of_sums
from attnscale.numerics import constant_on, wide_dtype
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
        whole, is_more = self._whole(name, gradient)
        self._note(name, by_head(whole), is_more)

    def add_both(self, query: Tensor, key: Tensor, owners: Indices | None) -> None:
        """Gradients of (batch, heads, length, features) have passed, of which `owners` tells who has which key."""
        (query, more_query), (key, more_key) = self._whole("query", query), self._whole("key", key)
        found: tuple[Tensor, Tensor | None]
        if shares_as_kernels_do(query.shape[1], key.shape[1], owners):
            found = lengths_of_both(query, key)
        else:
            found = head_lengths(query), by_shared_key(key, query.shape[1], owners)
        self._note("query", found[0], more_query)
        self._note("key", found[1], more_key)

    def _whole(self, name: str, gradient: Tensor) -> tuple[Tensor, bool]:
        """With what passed before through the same graph, and whether anything did."""
        earlier = self._passed.pop(name, None)
        gradient = gradient if earlier is None else earlier + gradient
        if graph_is_kept():
            self._passed[name] = gradient.clone() if earlier is None else gradient
        return gradient, earlier is not None

    def _note(self, name: str, lengths: Tensor | None, is_more: bool) -> None:
        """Those of one graph beside those of others, or in the place of what is known of the same."""
        if lengths is None:
            return
        before = None if is_more else getattr(self, name)
        setattr(self, name, lengths if before is None else torch.hypot(before, lengths))

    def settle(self) -> None:
        """No other backward is waited for."""
        self._passed.clear()

    def follow(self, name: str, tensor: Learning, by_head: Callable[[Tensor], Tensor | None]) -> None:
        """Add up what reaches this tensor: `by_head` tells the length of a gradient, a value a head."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return

        def add(gradient: Tensor) -> None:
            with torch.no_grad():
                self.add(name, gradient.detach(), by_head)

        tensor.register_hook(add)


def of_kernel(query: Learning, key: Learning, owners: Indices | None) -> GradientLengths:
    """Follow (batch, heads, length, features); heads that share a key, or have copies of it, share what reaches it.

    `owners` tells of each query head which key it has.
    """
    lengths, heads = GradientLengths(), query.shape[1]
    lengths.follow("query", query, head_lengths)
    lengths.follow("key", key, lambda gradient: by_shared_key(gradient, heads, owners))
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


class _Sharing(NamedTuple):
    """How query heads share keys: `distinct` keys, each of which stands in `copies` places."""

    order: str  # "own": a key for each group of neighbours; "repeated", "tiled": copies; "irregular"; "unknown"
    distinct: int = 0
    copies: int = 1


def by_shared_key(gradient: Tensor, heads: int, owners: Indices | None) -> Tensor | None:
    """‖∂loss/∂k‖ of the key that each query head has, of (batch, keys, length, features).

    What reaches the copies of a key reaches the key. None where one of these keys is shared by heads that are known to
    have several.
    """
    keys = gradient.shape[1]
    sharing = _sharing(heads, keys, None if owners is None else tuple(owners.tolist()))
    if sharing.order == "unknown":
        return None
    if sharing.order == "own":
        lengths = head_lengths(gradient)
        return lengths if keys == heads else lengths.repeat_interleave(heads // max(keys, 1))
    if sharing.order == "repeated":
        lengths = lengths_of_sums(gradient.unflatten(1, (sharing.distinct, sharing.copies)))
        return lengths.repeat_interleave(heads // sharing.distinct)
    assert owners is not None
    if sharing.order == "tiled":
        lengths = lengths_of_sums(gradient.unflatten(1, (sharing.copies, sharing.distinct)).transpose(1, 2))
    else:
        dtype, own = wide_dtype(gradient), owners[:: heads // keys]
        of_keys = gradient.new_zeros(len(gradient), sharing.distinct, *gradient.shape[2:], dtype=dtype)
        lengths = head_lengths(of_keys.index_add_(1, constant_on(gradient.device, own), gradient.to(dtype)))
    return lengths[constant_on(gradient.device, owners)]


def shares_as_kernels_do(heads: int, keys: int, owners: Indices | None) -> bool:
    """Return True if each of so many keys is one, shared by as many heads that stand side by side.

    >>> shares_as_kernels_do(4, 2, np.array([0, 0, 1, 1])), shares_as_kernels_do(4, 4, np.array([0, 0, 1, 1]))
    (True, False)
    """
    return _sharing(heads, keys, None if owners is None else tuple(owners.tolist())).order == "own"


@lru_cache(maxsize=64)
def _sharing(heads: int, keys: int, owners: tuple[int, ...] | None) -> _Sharing:
    """Asked of every call of every sampled step, which are alike."""
    if owners is None:
        return _Sharing("own")
    group = heads // max(keys, 1)
    own = owners[::group]
    if len(own) != keys or owners != tuple(key for key in own for _ in range(group)):
        return _Sharing("unknown")
    if len(set(own)) == keys:
        return _Sharing("own")
    distinct = max(own) + 1
    copies = keys // distinct
    if own == tuple(key for key in range(distinct) for _ in range(copies)):
        return _Sharing("repeated", distinct, copies)
    return _Sharing("tiled" if own == tuple(range(distinct)) * copies else "irregular", distinct, copies)


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
