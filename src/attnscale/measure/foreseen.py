"""What is known of every row without looking at its scores."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cpu.threads import share
from attnscale.numerics import wide_dtype

KEYS = 256  # whose covariance is taken: enough to tell rows apart, and cheap beside looking at some of them
WORTH_A_THREAD = 2**20  # elements of the query


def foreseen_variance(call: Call) -> Tensor:
    """qᵀ Cov(k) q + (q·k̄ − μ)², (batch, heads, q_len): how far the scores of each row are from the head's mean.

    In a unit of its own, over keys spread evenly, and before masks and caps: what tells rows apart, not what they are.
    """
    some = call.key[..., :: max(1, call.key.shape[-2] // KEYS), :]
    query, key = (tensor.to(wide_dtype(tensor)) for tensor in (call.query, some))
    found = _squares(query, key, call.group)
    if bool(found.sum().isfinite()):
        return found
    return _squares(query / query.abs().amax(), key / key.abs().amax(), call.group)


def _squares(query: Tensor, key: Tensor, group: int) -> Tensor:
    """One batch entry at a time, which stays in a core's cache."""
    within, means = (query.new_empty(query.shape[:-1]) for _ in range(2))
    usual = key.mean(-2, keepdim=True)

    def look(entries: Iterator[int]) -> None:
        for entry in entries:
            apart = key[entry] - usual[entry]
            # the mean key beside the covariance: one product for both
            both = torch.cat([torch.bmm(apart.mT, apart).div_(max(key.shape[-2], 1)), usual[entry].mT], -1)
            product = torch.bmm(query[entry], both if group == 1 else both.repeat_interleave(group, dim=0))
            means[entry] = product[..., -1]
            torch.sum(product[..., :-1].mul_(query[entry]), -1, out=within[entry])

    share(look, range(len(query)), threads=query.numel() // WORTH_A_THREAD)
    means -= means.mean((0, 2), keepdim=True)
    return within.addcmul_(means, means)
