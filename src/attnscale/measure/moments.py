"""Mean and variance of every score in linear time, and what of it lies within rows: no score is ever formed.

Row i has the mean q_i·k̄ over all keys, and its scores lie about it by w_ij = q_i·(k_j − k̄). Unmasked, Σ w² is
⟨QᵀQ, Σ(k − k̄)(k − k̄)ᵀ⟩, and the rows' means vary by k̄ᵀ C_q k̄. Causal, Σ w² goes chunk by chunk, with the prefix of
the keys' Gram matrix and the lower triangle of the chunk's own scores, and a row's mean moves by what its own prefix
leaves of Σ w. Queries are centred too, so that a large mean of either does not swallow the variance.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attnscale.numerics import wide_dtype
from attnscale.visibility import Visibility

LINEAR = "linear time"
CHUNK = 128  # rows whose own triangle of scores is formed; as wide as a head, it costs as much as a Gram matrix
BLOCK = 64 * CHUNK  # rows taken together, as one batch of chunks


@dataclass(frozen=True)
class ScoreMoments:
    """Number of scores of each head, their mean and their variance; `a + b` merges (Chan et al. 1979).

    Of disjoint rows all of it merges. Of the same rows over other keys the variance within rows does not: how far the
    means of a row lie apart is not kept.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor
    variance_within_rows: Tensor  # about the mean of their own row, which is all that softmax sees
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
    """Return the moments of query (batch, heads, q_len, head_dim) on key (batch, kv_heads, kv_len, head_dim)."""
    (batch, _, q_len, _), kv_len = query.shape, key.shape[-2]
    visible = Visibility.of(None, is_causal).counts_at(torch.arange(q_len, device=query.device), kv_len)
    pairs = batch * int(visible.sum())
    centring = _Centring.of(query, key)
    if is_causal:
        sums, squares = _causal_sums(query, key, centring)
    else:
        sums = torch.zeros((), dtype=torch.float64, device=query.device)
        squares = (_gram_of(query, centring.query) * _gram_of(key, centring.key)).sum((-2, -1))
    seen = visible.clamp(min=1)
    means = centring.offset.unsqueeze(-1) + centring.shifts(query) + sums / seen  # of rows
    mean = (means * visible).sum((0, 2)) / pairs
    within = (squares - (sums.square() / seen).sum(-1)).clamp(min=0.0).sum(0)
    between = ((means - mean.unsqueeze(-1)).square() * visible).sum((0, 2))
    count = torch.full_like(mean, pairs, dtype=torch.int64)
    return ScoreMoments(count, scale * mean, scale**2 * (within + between) / pairs, scale**2 * within / pairs)


@dataclass(frozen=True)
class _Centring:
    """The means of queries and keys, (batch, heads, 1, head_dim); q⁺ and k⁺ with q⁺·k⁺ = q·(k − k̄)."""

    query_mean: Tensor
    key_mean: Tensor

    @classmethod
    def of(cls, query: Tensor, key: Tensor) -> "_Centring":
        group = query.shape[1] // key.shape[1]
        return cls(_mean(query), _mean(key).repeat_interleave(group, dim=1))

    @property
    def offset(self) -> Tensor:
        """q̄·k̄."""
        return (self.query_mean * self.key_mean).sum((-2, -1))

    def shifts(self, query: Tensor) -> Tensor:
        """(q − q̄)·k̄: by how much the mean of each row over all keys is above q̄·k̄, (batch, heads, q_len)."""
        shifts = [self._apart(rows) @ self.key_mean.to(wide_dtype(rows)).mT for rows in query.split(BLOCK, dim=-2)]
        return torch.cat(shifts, dim=-2).squeeze(-1).double()

    def query(self, rows: Tensor) -> Tensor:
        """(q − q̄, 1)."""
        apart = self._apart(rows)
        return torch.cat([apart, torch.ones_like(apart[..., :1])], dim=-1)

    def key(self, keys: Tensor) -> Tensor:
        """(k − k̄, q̄·(k − k̄)), for every query head."""
        keys = keys.to(wide_dtype(keys)).repeat_interleave(self.key_mean.shape[1] // keys.shape[1], dim=1)
        keys = keys - self.key_mean.to(keys.dtype)
        return torch.cat([keys, keys @ self.query_mean.to(keys.dtype).mT], dim=-1)

    def _apart(self, rows: Tensor) -> Tensor:
        rows = rows.to(wide_dtype(rows))
        return rows - self.query_mean.to(rows.dtype)


def _mean(tensor: Tensor) -> Tensor:
    sums = [_sum(block.to(wide_dtype(block))) for block in tensor.split(BLOCK, dim=-2)]
    return (torch.stack(sums).sum(0) / max(tensor.shape[-2], 1)).unsqueeze(-2)


def _gram_of(tensor: Tensor, centre: Callable[[Tensor], Tensor]) -> Tensor:
    """Σ x xᵀ of the centred rows, in float64."""
    blocks = (_chunked(centre(block)) for block in tensor.split(BLOCK, dim=-2))
    return torch.stack([_gram(chunks).sum(2) for chunks in blocks]).sum(0)


def _causal_sums(query: Tensor, key: Tensor, centring: _Centring) -> tuple[Tensor, Tensor]:
    """Σ w of each row and Σ w² of all, over j ≤ i, in float64: each chunk against the keys before it."""
    diagonal = min(query.shape[-2], key.shape[-2])
    past_sum: Tensor | float = 0.0
    past: Tensor | float = 0.0
    first: list[Tensor] = []
    second: Tensor | float = 0.0
    blocks = zip(query[..., :diagonal, :].split(BLOCK, -2), key[..., :diagonal, :].split(BLOCK, -2), strict=True)
    for query_block, key_block in blocks:
        rows, keys = _chunked(centring.query(query_block)), _chunked(centring.key(key_block))
        sums, grams = _sum(keys), _gram(keys)  # (batch, heads, chunks, …)
        before_sum, before = sums.cumsum(2) - sums + past_sum, grams.cumsum(2) - grams + past
        own = (rows @ keys.mT).tril()
        of_row = own.sum(-1, dtype=torch.float64) + (rows.double() @ before_sum.unsqueeze(-1)).squeeze(-1)
        first.append(of_row.flatten(-2)[..., : query_block.shape[-2]])
        second = second + (_gram(rows) * before).sum((-3, -2, -1)) + own.square().sum((-3, -2, -1), dtype=torch.float64)
        past_sum, past = before_sum[:, :, -1:] + sums[:, :, -1:], before[:, :, -1:] + grams[:, :, -1:]
    beyond = query[..., diagonal:, :]  # rows past the last key see all of them, whose w add up to nothing
    if beyond.shape[-2]:
        second = second + (_gram_of(beyond, centring.query) * _gram_of(key, centring.key)).sum((-2, -1))
        first.append(torch.zeros(beyond.shape[:-1], dtype=torch.float64, device=query.device))
    return torch.cat(first, dim=-1), torch.as_tensor(second)


def _chunked(rows: Tensor) -> Tensor:
    """(batch, heads, chunks, CHUNK, width), the last chunk filled up with zeros, which add nothing."""
    batch, heads, length, width = rows.shape
    chunks = -(-length // CHUNK)
    return F.pad(rows, (0, 0, 0, chunks * CHUNK - length)).reshape(batch, heads, chunks, CHUNK, width)


def _gram(tensor: Tensor) -> Tensor:
    return (tensor.mT @ tensor).double()


def _sum(tensor: Tensor) -> Tensor:
    return tensor.sum(-2, dtype=torch.float64)
