"""Mean and variance of every score in linear time: no score is ever formed.

Unmasked, Σ s = (Σ q)·(Σ k) and Σ s² = ⟨QᵀQ, KᵀK⟩; causal, the same chunk by chunk, with the prefix of KᵀK and the
lower triangle of the chunk's own scores. Both sums are taken of u = s − q̄·k̄, written as a dot product of its own,
so that a large mean does not swallow the variance.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attnscale.numerics import wide_dtype

LINEAR = "linear time"
CHUNK = 128  # rows whose own triangle of scores is formed; as wide as a head, it costs as much as a Gram matrix
BLOCK = 64 * CHUNK  # rows taken together, as one batch of chunks


@dataclass(frozen=True)
class ScoreMoments:
    """How many scores each head has, their mean and their variance; `a + b` merges (Chan et al. 1979)."""

    count: Tensor
    mean: Tensor
    variance: Tensor
    method: str = LINEAR

    def __add__(self, other: "ScoreMoments") -> "ScoreMoments":
        count = self.count + other.count
        share = other.count.double() / count.clamp(min=1)
        difference = torch.where((self.count > 0) & (other.count > 0), other.mean - self.mean, 0.0)
        mean = torch.where(self.count > 0, self.mean, other.mean) + difference * share
        squares = self.variance.nan_to_num() * self.count + other.variance.nan_to_num() * other.count
        squares = squares + difference**2 * self.count * share
        method = self.method if self.method == other.method else f"{self.method}; {other.method}"
        return ScoreMoments(count, mean, squares / count, method)


def linear_moments(query: Tensor, key: Tensor, scale: float, is_causal: bool) -> ScoreMoments:
    """The moments of query (batch, heads, q_len, head_dim) on key (batch, kv_heads, kv_len, head_dim)."""
    q_len, kv_len = query.shape[-2], key.shape[-2]
    centring = _Centring.of(query, key)
    if is_causal:
        diagonal = min(q_len, kv_len)
        pairs = diagonal * (diagonal + 1) // 2 + (q_len - diagonal) * kv_len
        first, second = _causal_sums(query, key, centring)
    else:
        pairs = q_len * kv_len
        rows, keys = _grams(query, centring.query), _grams(key, centring.key)
        first, second = (rows[0] * keys[0]).sum(-1), (rows[1] * keys[1]).sum((-2, -1))
    # every batch entry has an offset of its own: merge them as shards of one size
    batch, divisor = query.shape[0], max(pairs, 1)
    means = scale * (centring.offset + first / divisor)
    mean = means.sum(0) / max(batch, 1)
    squares = scale**2 * (second - first**2 / divisor).clamp(min=0.0).sum(0) + pairs * (means - mean).square().sum(0)
    return ScoreMoments(torch.full_like(mean, batch * pairs, dtype=torch.int64), mean, squares / (batch * pairs))


@dataclass(frozen=True)
class _Centring:
    """The means of queries and keys, (batch, heads, 1, head_dim); q⁺ and k⁺ with q⁺·k⁺ = q·k − q̄·k̄."""

    query_mean: Tensor
    key_mean: Tensor

    @classmethod
    def of(cls, query: Tensor, key: Tensor) -> "_Centring":
        group = query.shape[1] // key.shape[1]
        return cls(_mean(query), _mean(key).repeat_interleave(group, dim=1))

    @property
    def offset(self) -> Tensor:
        return (self.query_mean * self.key_mean).sum((-2, -1))

    def query(self, rows: Tensor) -> Tensor:
        """(q − q̄, (q − q̄)·k̄, 1)."""
        rows = rows.to(wide_dtype(rows))
        rows = rows - self.query_mean.to(rows.dtype)
        return torch.cat([rows, rows @ self.key_mean.to(rows.dtype).mT, torch.ones_like(rows[..., :1])], dim=-1)

    def key(self, keys: Tensor) -> Tensor:
        """(k − k̄, 1, q̄·(k − k̄)), for every query head."""
        keys = keys.to(wide_dtype(keys)).repeat_interleave(self.key_mean.shape[1] // keys.shape[1], dim=1)
        keys = keys - self.key_mean.to(keys.dtype)
        return torch.cat([keys, torch.ones_like(keys[..., :1]), keys @ self.query_mean.to(keys.dtype).mT], dim=-1)


def _mean(tensor: Tensor) -> Tensor:
    sums = [_sum(block.to(wide_dtype(block))) for block in tensor.split(BLOCK, dim=-2)]
    return (torch.stack(sums).sum(0) / max(tensor.shape[-2], 1)).unsqueeze(-2)


def _grams(tensor: Tensor, centre: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Σ x and Σ x xᵀ of the centred rows, in float64."""
    chunks = [_chunked(centre(block)) for block in tensor.split(BLOCK, dim=-2)]
    first = torch.stack([_sum(chunk).sum(2) for chunk in chunks]).sum(0)
    return first, torch.stack([_gram(chunk).sum(2) for chunk in chunks]).sum(0)


def _causal_sums(query: Tensor, key: Tensor, centring: _Centring) -> tuple[Tensor, Tensor]:
    """Σ u and Σ u² over j ≤ i, in float64: each chunk against the Gram matrix of all keys before it."""
    diagonal = min(query.shape[-2], key.shape[-2])
    past_sum: Tensor | float = 0.0
    past: Tensor | float = 0.0
    first: Tensor | float = 0.0
    second: Tensor | float = 0.0
    blocks = zip(query[..., :diagonal, :].split(BLOCK, -2), key[..., :diagonal, :].split(BLOCK, -2), strict=True)
    for query_block, key_block in blocks:
        rows, keys = _chunked(centring.query(query_block)), _chunked(centring.key(key_block))
        sums, grams = _sum(keys), _gram(keys)  # (batch, heads, chunks, …)
        before_sum, before = sums.cumsum(2) - sums + past_sum, grams.cumsum(2) - grams + past
        own = (rows @ keys.mT).tril()
        first = first + (_sum(rows) * before_sum).sum((-2, -1)) + own.sum((-3, -2, -1), dtype=torch.float64)
        second = second + (_gram(rows) * before).sum((-3, -2, -1)) + own.square().sum((-3, -2, -1), dtype=torch.float64)
        past_sum, past = before_sum[:, :, -1:] + sums[:, :, -1:], before[:, :, -1:] + grams[:, :, -1:]
    if query.shape[-2] > diagonal:  # rows past the last key see all of them
        beyond = _grams(query[..., diagonal:, :], centring.query)
        keys_seen = _grams(key, centring.key)
        first = first + (beyond[0] * keys_seen[0]).sum(-1)
        second = second + (beyond[1] * keys_seen[1]).sum((-2, -1))
    return torch.as_tensor(first), torch.as_tensor(second)


def _chunked(rows: Tensor) -> Tensor:
    """(batch, heads, chunks, CHUNK, width), the last chunk filled up with zeros, which add nothing."""
    batch, heads, length, width = rows.shape
    chunks = -(-length // CHUNK)
    return F.pad(rows, (0, 0, 0, chunks * CHUNK - length)).reshape(batch, heads, chunks, CHUNK, width)


def _gram(tensor: Tensor) -> Tensor:
    return (tensor.mT @ tensor).double()


def _sum(tensor: Tensor) -> Tensor:
    return tensor.sum(-2, dtype=torch.float64)
