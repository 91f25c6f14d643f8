"""What is known of every row without looking at its scores."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cpu.threads import share
from attnscale.numerics import is_surely_finite, wide_dtype

KEYS = 256  # whose covariance is taken: enough to tell rows apart, and cheap beside looking at some of them
WORTH_A_THREAD = 2**20  # elements of the query

Rows = NDArray[np.floating]  # a value each


def foreseen_variance(call: Call, lse: Tensor | None = None) -> Tensor:
    """σ² + (q·k̄ − μ)², (batch, heads, q_len): how far the scores of each row are from the head's mean.

    In a unit of its own: what tells rows apart, not what they are. Where a kernel left the lse of rows that see every
    key, σ² is that of Gaussian scores with this lse; else qᵀ Cov(k) q over keys spread evenly, before masks and caps.
    """
    keys = call.key.shape[-2]
    if lse is None or keys < 2 or not call.visibility.is_full:
        return _by_covariance(call)
    with np.errstate(over="ignore", invalid="ignore"):  # what is past float32 is worked out otherwise
        found = _told_by(lse.detach().numpy(), _row_means(call), keys)
        is_finite = np.isfinite(found.sum())
    return torch.from_numpy(found) if is_finite else _by_covariance(call)


def _by_covariance(call: Call) -> Tensor:
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


def _row_means(call: Call) -> Rows:
    """Scale · q·k̄, the mean score of each row that sees every key: (batch, heads, q_len)."""
    query, key = (tensor.to(wide_dtype(tensor)) for tensor in (call.query, call.key))
    usual = key.mean(-2).mul_(call.scale)
    usual = usual if call.group == 1 else usual.repeat_interleave(call.group, dim=1)
    # a row times a matrix takes a fifth of a matrix times a column
    return torch.matmul(usual.unsqueeze(-2), query.mT).squeeze(-2).numpy()


def _told_by(lse: Rows, means: Rows, keys: int) -> Rows:
    """Of n Gaussian scores lse − mean − ln n is σ²/2 up to the freezing point, ln n; past it lse − mean is σ √(2 ln n).

    All are (batch, heads, q_len); `means` are written over. Of few numbers torch is slower than numpy.

    >>> scores = torch.randn(1, 1, 500, 64) @ torch.randn(1, 1, 500, 64).mT * 0.125
    >>> exact = scores.var(-1) + (scores.mean(-1) - scores.mean()) ** 2
    >>> told = _told_by(scores.logsumexp(-1).numpy(), scores.mean(-1).numpy(), keys=500)
    >>> bool(np.corrcoef(exact.ravel(), told.ravel())[0, 1] > 0.9)
    True
    """
    logarithm = math.log(keys)
    above = lse - means
    above -= logarithm
    frozen = np.maximum(above - logarithm, 0.0)
    frozen *= frozen
    within = np.maximum(above, 0.0, out=above)
    within *= 2.0
    within += frozen * (0.5 / logarithm)
    means -= means.mean((0, 2), keepdims=True)
    within += means * means
    return within
