"""Mean, variance and variance within rows of every score in linear time.

Row i has the mean q_i·k̄ over all keys, and its scores deviate from it by w_ij = q_i·(k_j − k̄). Summed over all rows
and keys, Σ w² = ⟨QᵀQ, Σ(k − k̄)(k − k̄)ᵀ⟩. Causal attention is computed block by block, from the Gram matrix of the
keys before the block and the lower triangle of the block's own scores. Queries are also centred, so that a large mean
does not cancel the digits of the variance.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnscale.numerics import wide_dtype
from attnscale.visibility import Visibility

LINEAR = "linear time"
BLOCK = 128  # rows per block; with head_dim 128 its triangle of scores costs as much as a Gram matrix


@dataclass(frozen=True)
class ScoreMoments:
    """Number of scores of each head, their mean and their variance; `a + b` merges (Chan et al. 1979).

    Merging disjoint rows is exact. Merging the same rows over different keys gives a wrong variance within rows,
    because the mean of each row is not kept.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor
    variance_within_rows: Tensor  # about the mean of each row; softmax ignores a shift of a whole row
    method: str = LINEAR

    def __add__(self, other: "ScoreMoments") -> "ScoreMoments":
        count = self.count + other.count
        share = other.count.double() / count.clamp(min=1)
        difference = torch.where((self.count > 0) & (other.count > 0), other.mean - self.mean, 0.0)
        mean = torch.where(self.count > 0, self.mean, other.mean) + difference * share
        squares, within = (
            getattr(self, name).nan_to_num() * self.count + getattr(other, name).nan_to_num() * other.count
            for name in ("variance", "variance_within_rows")
        )
        squares = squares + difference**2 * self.count * share
        method = self.method if self.method == other.method else f"{self.method}; {other.method}"
        return ScoreMoments(count, mean, squares / count, within / count, method)


def linear_moments(query: Tensor, key: Tensor, scale: float, is_causal: bool) -> ScoreMoments:
    """Return the moments for query (batch, heads, q_len, head_dim) and key (batch, kv_heads, kv_len, head_dim)."""
    (batch, heads, q_len, head_dim), kv_len = query.shape, key.shape[-2]
    visible = Visibility.of(None, is_causal).counts_at(torch.arange(q_len, device=query.device), kv_len)
    pairs, group = batch * int(visible.sum()), heads // key.shape[1]
    query_mean, key_mean = _mean(query), _mean(key).repeat_interleave(group, dim=1)
    # Sums over the keys that all rows of a block see, of k⁺ = (k − k̄, q̄·(k − k̄)). With q⁺ = (q − q̄, 1),
    # q⁺·k⁺ = q·(k − k̄).
    key_sums = query.new_zeros(batch, heads, head_dim + 1, dtype=torch.float64)
    key_gram = query.new_zeros(batch, heads, head_dim + 1, head_dim + 1, dtype=torch.float64)
    squares, means = query.new_zeros(batch, heads, dtype=torch.float64), [query.new_zeros(batch, heads, 0).double()]
    for keys in () if is_causal else key.split(BLOCK, dim=-2):
        key_gram += _gram(_centred_keys(keys, key_mean, query_mean))
    for start in range(0, q_len, BLOCK):
        centred = _centred(query[..., start : start + BLOCK, :], query_mean)
        rows = torch.cat([centred, torch.ones_like(centred[..., :1])], dim=-1)
        sums = (rows.double() @ key_sums.unsqueeze(-1)).squeeze(-1)
        squares += (_gram(rows) * key_gram).sum((-2, -1))
        if is_causal:
            keys = _centred_keys(key[..., start : start + BLOCK, :], key_mean, query_mean)
            own = (rows @ keys.mT).tril()
            sums += own.sum(-1, dtype=torch.float64)
            squares += own.square().sum((-2, -1), dtype=torch.float64)
            key_gram += _gram(keys)
            key_sums += keys.sum(-2, dtype=torch.float64)
        seen = visible[start : start + BLOCK].clamp(min=1)
        squares -= (sums.square() / seen).sum(-1)
        means.append((centred @ key_mean.to(centred.dtype).mT).squeeze(-1) + sums / seen)
    row_means = (query_mean * key_mean).sum(-1) + torch.cat(means, dim=-1)
    mean = (row_means * visible).sum((0, 2)) / pairs
    within = squares.clamp(min=0.0).sum(0)
    between = ((row_means - mean.unsqueeze(-1)).square() * visible).sum((0, 2))
    count = torch.full_like(mean, pairs, dtype=torch.int64)
    return ScoreMoments(count, scale * mean, scale**2 * (within + between) / pairs, scale**2 * within / pairs)


def _mean(tensor: Tensor) -> Tensor:
    sums = sum(block.sum(-2, keepdim=True, dtype=torch.float64) for block in tensor.split(BLOCK, dim=-2))
    return torch.as_tensor(sums / max(tensor.shape[-2], 1))


def _centred(vectors: Tensor, mean: Tensor) -> Tensor:
    vectors = vectors.to(wide_dtype(vectors))
    return vectors - mean.to(vectors.dtype)


def _centred_keys(keys: Tensor, mean: Tensor, query_mean: Tensor) -> Tensor:
    centred = _centred(keys.repeat_interleave(mean.shape[1] // keys.shape[1], dim=1), mean)
    return torch.cat([centred, centred @ query_mean.to(centred.dtype).mT], dim=-1)


def _gram(tensor: Tensor) -> Tensor:
    return (tensor.mT @ tensor).double()
