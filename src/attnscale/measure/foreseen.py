"""What is known of every row without looking at its scores."""

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.numerics import wide_dtype


def foreseen_variance(call: Call) -> Tensor:
    """qᵀ Cov(k) q, (batch, heads, q_len): how wide the scores of each row spread, in a unit of its own.

    Over all keys, and before masks and caps: what tells rows apart, not what they are.
    """
    query, key = (tensor.to(wide_dtype(tensor)) for tensor in (call.query, call.key))
    found = _squares(query, key, call.group)
    if bool(found.isfinite().all()):
        return found
    return _squares(query / query.abs().amax(), key / key.abs().amax(), call.group)


def _squares(query: Tensor, key: Tensor, group: int) -> Tensor:
    apart = key - key.mean(-2, keepdim=True)
    covariance = apart.mT @ apart / max(key.shape[-2], 1)
    if group > 1:
        covariance = covariance.repeat_interleave(group, dim=1)
    return (query @ covariance).mul_(query).sum(-1, dtype=torch.float64)
