"""What is known of every row without looking at its scores."""

import math
from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cpu.threads import share
from attnscale.numerics import is_surely_finite, wide_dtype

KEYS = 256  # whose covariance is taken: enough to tell rows apart, and cheap beside looking at some of them
WORTH_A_THREAD = 2**20  # elements of the query


def foreseen_variance(call: Call, lse: Tensor | None = None) -> Tensor:
    """σ² + (q·k̄ − μ)², (batch, heads, q_len): how far the scores of each row are from the head's mean.

    In a unit of its own: what tells rows apart, not what they are. Where a kernel left the lse of rows that see every
    key, σ² is that of Gaussian scores with this lse; else qᵀ Cov(k) q over keys spread evenly, before masks and caps.
    """
    if lse is not None and call.visibility.is_full and call.key.shape[-2] > 1:
        told = _told_by(lse, call)
        if math.isfinite(float(told.sum())):
            return torch.from_numpy(told)
    some = call.key[..., :: max(1, call.key.shape[-2] // KEYS), :]
    query, key = (tensor.to(wide_dtype(tensor)) for tensor in (call.query, some))
    found = _squares(query, key, call.group)
    if is_surely_finite(found):
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


def _told_by(lse: Tensor, call: Call) -> NDArray[np.floating]:
    """Of n Gaussian scores lse − mean − ln n is σ²/2 up to the freezing point, ln n; past it lse − mean is σ √(2 ln n).

    >>> from attnscale.visibility import EVERYTHING
    >>> query, key = torch.randn(1, 1, 500, 64), torch.randn(1, 1, 500, 64)
    >>> call = Call(query, key, key, EVERYTHING, 0.0, 0.125, None)
    >>> scores = query @ key.mT * 0.125
    >>> exact = scores.var(-1) + (scores.mean(-1) - scores.mean()) ** 2
    >>> bool(np.corrcoef(exact.ravel(), _told_by(scores.logsumexp(-1), call).ravel())[0, 1] > 0.9)
    True
    """
    query, key = (tensor.to(wide_dtype(tensor)) for tensor in (call.query, call.key))
    usual = key.mean(-2).mul_(call.scale)
    usual = usual if call.group == 1 else usual.repeat_interleave(call.group, dim=1)
    # a row times a matrix takes a fifth of a matrix times a column; of few numbers torch is slower than numpy
    means = torch.matmul(usual.unsqueeze(-2), query.mT).squeeze(-2).numpy()
    logarithm = math.log(key.shape[-2])
    above = lse.detach().numpy() - means
    above -= logarithm
    frozen = np.maximum(above - logarithm, 0.0)
    frozen *= frozen
    within = np.maximum(above, 0.0, out=above)
    within *= 2.0
    within += frozen * (0.5 / logarithm)
    means -= means.mean((0, 2), keepdims=True)
    within += means * means
    return cast("NDArray[np.floating]", within)
