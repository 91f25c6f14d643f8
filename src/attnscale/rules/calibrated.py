"""Scale to unit variance, measured on the query and key."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnscale.errors import InputError
from attnscale.numerics import wide_dtype, without_autocast
from attnscale.rules.rule import Scaled, Visible, about, multiply
from attnscale.torch_internals import unseen


def calibrated_sequences(query: Tensor, key: Tensor, starts_q: Tensor, starts_k: Tensor) -> Tensor:
    """Return 1 / std(q·k) for each head, over every pair of a query and a key of the same sequence."""
    found = [
        (own.shape[-2] * theirs.shape[-2], *_moments(own, theirs))
        for own, theirs in _sequences(query, key, starts_q, starts_k)
    ]
    if not found:
        return query.new_ones(query.shape[1], dtype=wide_dtype(query))
    pairs = sum(count for count, *_ in found)
    mean = sum(count / pairs * means for count, means, _ in found)
    variance = sum(count / pairs * (variances + (means - mean).square()) for count, means, variances in found)
    assert isinstance(variance, Tensor)
    return 1.0 / _root(variance.mean(tuple(range(variance.dim() - 1))))


def _sequences(query: Tensor, key: Tensor, starts_q: Tensor, starts_k: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield queries and keys, (1, heads, length, head_dim), of each sequence that has both."""
    if unseen(starts_q) or unseen(starts_k):
        raise InputError(
            "The rule 'calibrated' needs to know where the packed sequences start, and torch.vmap or the meta device "
            "hides that. Call it for one batch at a time, or give the scale as a number."
        )
    queries, keys = (
        tensor.split(starts.diff().tolist(), dim=-2) for tensor, starts in ((query, starts_q), (key, starts_k))
    )
    for own, theirs in zip(queries, keys, strict=True):
        if own.shape[-2] and theirs.shape[-2]:
            yield own, theirs


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
    return multiply(query, 1.0 / _root(variance)[..., None, None]), key, 1.0


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


def _root(variance: Tensor) -> Tensor:
    return variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt()


def _mean_and_covariance(tensor: Tensor) -> tuple[Tensor, Tensor]:
    with without_autocast(tensor):
        tensor = tensor.to(wide_dtype(tensor))
        mean = tensor.mean(-2)
        centred = tensor - mean.unsqueeze(-2)
        return mean, centred.mT @ centred / tensor.shape[-2]
