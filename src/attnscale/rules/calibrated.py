"""Scale to unit variance, measured on the query and key."""

import torch
from torch import Tensor

from attnscale.numerics import wide_dtype, without_autocast
from attnscale.rules.rule import Scaled, Visible, about, multiply


def calibrated_sequences(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return 1 / std(q·k) of each head, (heads, 1, 1), over every pair of a query and a key of the same sequence."""
    query = pairs[0][0]
    found = [
        (own.shape[-2] * theirs.shape[-2], *_moments(own, theirs))
        for own, theirs in pairs
        if own.shape[-2] and theirs.shape[-2]
    ]
    if not found:
        return query.new_ones((), dtype=wide_dtype(query))
    total = sum(count for count, *_ in found)
    mean = sum(count / total * means for count, means, _ in found)
    variance = sum(count / total * (variances + (means - mean).square()) for count, means, variances in found)
    assert isinstance(variance, Tensor)
    return _inverse_root(variance.squeeze(0))


@about(
    formula="q·k / std(q·k)",
    source="Var[q·k] measured instead of assumed",
    use="an initialisation that does not give q and k unit variance; measured for each head, over all pairs",
    over_sequences=calibrated_sequences,
)
def calibrated(query: Tensor, key: Tensor, visible: Visible = None) -> Scaled:
    """Divide by std(q·k) of each head, over every pair of a query and a key, in linear time.

    With means q̄, k̄ and covariances C_q, C_k, Var[q·k] = ⟨C_q, C_k⟩ + k̄ᵀC_q k̄ + q̄ᵀC_k q̄. This needs no scores and
    subtracts no large numbers.
    """
    mean, variance = _moments(query, key)
    batch = tuple(range(variance.dim() - 1))  # everything before the head
    if batch:
        variance = variance.mean(batch) + mean.var(batch, correction=0)
    return multiply(query, _inverse_root(variance)), key, 1.0


def _moments(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the scores of each batch entry and head."""
    query_mean, query_cov = _mean_and_covariance(query)
    key_mean, key_cov = _mean_and_covariance(key)
    if query.dim() > 2 and query.shape[-3] != key.shape[-3]:  # grouped queries share a key head
        group = query.shape[-3] // key.shape[-3]
        key_mean, key_cov = key_mean.repeat_interleave(group, -2), key_cov.repeat_interleave(group, -3)
    mean = (query_mean * key_mean).sum(-1)
    variance = (
        (query_cov * key_cov).sum((-2, -1))
        + torch.einsum("...i,...ij,...j->...", key_mean, query_cov, key_mean)
        + torch.einsum("...i,...ij,...j->...", query_mean, key_cov, query_mean)
    )
    return mean, variance


def _inverse_root(variance: Tensor) -> Tensor:
    return 1.0 / variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt()[..., None, None]


def _mean_and_covariance(tensor: Tensor) -> tuple[Tensor, Tensor]:
    with without_autocast(tensor):
        tensor = tensor.to(wide_dtype(tensor))
        mean = tensor.mean(-2)
        centred = tensor - mean.unsqueeze(-2)
        return mean, centred.mT @ centred / tensor.shape[-2]
