"""Kernel calls whose heads stand where most models have the batch: each head is put back on the axis of heads.

SDPA does not ask which of its first two axes is which: (heads, batch, …), (key heads, group, …) and (batch · heads, 1,
…) all give right outputs. Entries of the batch are made by the same rows of a projection, heads by different ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnscale.tracing.coordinates import Indices, Points, grid
from attnscale.tracing.following import channels
from attnscale.tracing.lineage import Node, moved
from attnscale.visibility import Visibility
from attnscale.watching.kernels.kernel_call import KernelCall


def with_heads_on_their_axis(call: KernelCall) -> KernelCall:
    """Return the call with all heads on the second axis; the same call where they are, or where that is unknown."""
    node = call.query_node
    if node is None or len(node.shape) != 4 or not all(node.shape) or call.visibility.documents is not None:
        return call
    batch, heads = node.shape[:2]
    ends = grid(batch, 1, 1, 1)[[0, min(1, batch - 1), batch - 1]]
    if len(set(channels(node, ends))) == 1:
        return call
    entries_of: dict[tuple[object, ...], list[int]] = {}
    for number, channel in enumerate(channels(node, grid(batch, heads, 1, 1))):
        entries_of.setdefault(channel, []).append(number)
    if () in entries_of or len({len(entries) for entries in entries_of.values()}) > 1:
        return call
    order = _Order(heads, np.array(list(entries_of.values())).T)
    return replace(
        call,
        query=order.tensor(call.query),
        key=order.tensor(call.key),
        query_node=order.node(node),
        key_node=None if call.key_node is None else order.node(call.key_node),
        visibility=order.visibility(call.visibility, batch),
        value_node=None if call.value_node is None else order.node(call.value_node),
        value=None if call.value is None else order.tensor(call.value),
        lse=None if call.lse is None else order.tensor(call.lse),
        learning=(_Reordered(call.query, order.tensor), _Reordered(call.key, order.tensor)),
        heads_in_batch=True,
    )


@dataclass(frozen=True)
class _Order:
    """Which of the kernel's (batch · heads) entries holds each head of each batch entry."""

    kernel_heads: int
    entries: Indices  # (batch, heads)

    def tensor(self, tensor: Tensor) -> Tensor:
        """(batch, heads, …), a key for each query head."""
        each = tensor.repeat_interleave(self.kernel_heads // tensor.shape[1], 1).flatten(0, 1)
        return each[torch.from_numpy(self.entries).to(tensor.device)]

    def node(self, node: Node) -> Node:
        """The node of such a tensor."""
        share = self.kernel_heads // node.shape[1]

        def back(points: Points) -> Points:
            batch, head = np.divmod(self.entries[points[:, 0], points[:, 1]], self.kernel_heads)
            return np.stack([batch, head // share, points[:, 2], points[:, 3]], axis=1)

        return moved(node, (*self.entries.shape, *node.shape[2:]), back)

    def visibility(self, seen: Visibility, batch: int) -> Visibility:
        """What each row sees."""
        mask = seen.mask
        if mask is None or mask.shape[:-2].numel() == 1:
            return seen
        return replace(seen, mask=self.tensor(mask.expand(batch, self.kernel_heads, *mask.shape[-2:])))


@dataclass(frozen=True, eq=False)
class _Reordered:
    """A tensor that a kernel was given, whose gradients are told by heads."""

    given: Tensor
    order: Callable[[Tensor], Tensor]

    @property
    def shape(self) -> Any:
        """(batch, heads, length, features)."""
        return self.order(self.given.detach()).shape

    @property
    def requires_grad(self) -> bool:
        """True if a gradient will reach it."""
        return self.given.requires_grad

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Have the hook called with the gradient."""
        return self.given.register_hook(lambda gradient: hook(self.order(gradient)))
