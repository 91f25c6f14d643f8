"""Attention with dropout that can be drawn again, and the gradients of attention, a block of rows at a time.

For operators of graphs, which autograd does not look into.
"""

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.attending.row_blocks import blocks
from attnscale.attending.weights import grouped_matmul, row_weights
from attnscale.numerics import wide_dtype

Gradients = tuple[Tensor, Tensor, Tensor]


class Dropped:
    """Which weights are dropped, drawn anew from a seed: the same in both passes."""

    def __init__(self, dropout_p: float, seed: Tensor) -> None:
        self.dropout_p = dropout_p
        self._generator = torch.Generator(seed.device).manual_seed(int(seed))

    def factors(self, like: Tensor) -> Tensor:
        """0 for what is dropped, and what makes up for it elsewhere."""
        drawn = torch.rand(like.shape, generator=self._generator, device=like.device, dtype=torch.float32)
        return torch.where(drawn < self.dropout_p, 0.0, 1.0 / max(1.0 - self.dropout_p, 1e-12)).to(like.dtype)


def attend_dropping(call: Call, dropped: Dropped) -> Tensor:
    """softmax(scores) V, some weights of which are dropped."""
    query, key, value = (tensor.to(wide_dtype(call.query)) for tensor in (call.query, call.key, call.value))
    output = [query.new_empty(*query.shape[:2], 0, value.shape[-1])]
    for rows, keys in blocks(call):
        own, theirs = query[:, :, rows], key[:, :, keys]
        weights = row_weights(own, theirs, call.visibility.added(rows, keys, own), call.scale, call.softcap)
        output.append(grouped_matmul(weights * dropped.factors(weights), value[:, :, keys]))
    return torch.cat(output, dim=-2).to(call.query.dtype)


def gradients_of(call: Call, grad: Tensor, dropped: Dropped | None) -> Gradients:
    """Return the gradients of query, key and value; `grad` is the output's."""
    wide, group = wide_dtype(call.query), call.group
    query, grad = call.query.to(wide), grad.to(wide)
    key, value = (tensor.to(wide).repeat_interleave(group, dim=1) for tensor in (call.key, call.value))
    found = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for rows, keys in blocks(call):
        own, theirs, given = query[:, :, rows], key[:, :, keys], grad[:, :, rows]
        weights = row_weights(own, theirs, call.visibility.added(rows, keys, own), call.scale, call.softcap)
        factors = torch.ones_like(weights) if dropped is None else dropped.factors(weights)
        of_weights = given @ value[:, :, keys].mT * factors
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * call.scale
        if call.softcap is not None:
            of_scores = of_scores * (1 - torch.tanh(own * call.scale @ theirs.mT / call.softcap).square())
        found[0][:, :, rows] = of_scores @ theirs
        found[1][:, :, keys] += of_scores.mT @ own
        found[2][:, :, keys] += (weights * factors).mT @ given
    shared = (_summed(each, group) for each in found[1:])
    of_query, of_key, of_value = (each.to(call.query.dtype) for each in (found[0], *shared))
    return of_query, of_key, of_value


def _summed(gradient: Tensor, group: int) -> Tensor:
    """Over the query heads that share a key head."""
    return gradient.unflatten(1, (-1, group)).sum(2) if group > 1 else gradient
