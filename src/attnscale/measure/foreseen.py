"""What is known of every row without looking at its scores."""

from torch import Tensor

from attnscale.attending.call import Call
from attnscale.numerics import wide_dtype

KEYS = 256  # whose covariance is taken: enough to tell rows apart, and cheap beside looking at some of them


def foreseen_variance(call: Call) -> Tensor:
    """qᵀ Cov(k) q + (q·k̄ − μ)², (batch, heads, q_len): how far the scores of each row are from the head's mean.

    In a unit of its own, over keys spread evenly, and before masks and caps: what tells rows apart, not what they are.
    """
    some = call.key[..., :: max(1, call.key.shape[-2] // KEYS), :]
    query, key = (tensor.to(wide_dtype(tensor)) for tensor in (call.query, some))
    found = _squares(query, key, call.group)
    if bool(found.isfinite().all()):
        return found
    return _squares(query / query.abs().amax(), key / key.abs().amax(), call.group)


def _squares(query: Tensor, key: Tensor, group: int) -> Tensor:
    usual = key.mean(-2, keepdim=True)
    apart = key - usual
    covariance = apart.mT @ apart / max(key.shape[-2], 1)
    if group > 1:
        covariance, usual = (tensor.repeat_interleave(group, dim=1) for tensor in (covariance, usual))
    means = (query @ usual.mT).squeeze(-1)
    means = means - means.mean((0, 2), keepdim=True)
    return (query @ covariance).mul_(query).sum(-1).double() + means.square()
