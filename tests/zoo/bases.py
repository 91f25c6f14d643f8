"""Attention in steps, and the blocks it lives in: cases replace the steps in which they are special."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .recording import note


class Configuration:
    """A configuration as models carry it."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


class Block(nn.Module):
    """x + attention(norm(x)), what nearly every attention lives in."""

    def __init__(self, d_model: int, attention: nn.Module):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.attention = attention

    def forward(self, x: Tensor, *rest) -> Tensor:
        return x + self.attention(self.norm(x), *rest)


class SelfAttention(nn.Module):
    """Attention in steps: project, prepare, attend, merge. A subclass replaces the steps in which it is special.

    Attending, unless a subclass calls a kernel, is: product, scale, adjust, weigh, mix.
    """

    right = False  # the fixed twin of a reported bug sets it
    kept_as = None  # attribute that the multiplier is kept in; None if it is computed at every call
    layout = "bhqk"  # axes of the scores, as `note` names them

    def __init__(self, d_model: int, heads: int, head_dim: int | None = None, kv_heads: int | None = None):
        super().__init__()
        self.d_model, self.heads, self.kv_heads = d_model, heads, kv_heads or heads
        self.head_dim = head_dim or d_model // heads
        self.q_proj = nn.Linear(d_model, self.heads * self.head_dim)
        self.k_proj = nn.Linear(d_model, self.kv_heads * self.head_dim)
        self.v_proj = nn.Linear(d_model, self.kv_heads * self.head_dim)
        self.out_proj = nn.Linear(self.heads * self.head_dim, d_model)
        self.add_parts()
        if self.kept_as is not None:
            setattr(self, self.kept_as, self.multiplier())

    def add_parts(self) -> None:
        """Add parameters and attributes of a subclass."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        return self.merge(self.attend(*self.prepare(query, key), value))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each (batch, heads, length, head_dim)."""
        return (
            self.split(self.q_proj(x)),
            self.split(self.k_proj(x), self.kv_heads),
            self.split(self.v_proj(x), self.kv_heads),
        )

    def split(self, x: Tensor, heads: int | None = None) -> Tensor:
        """(batch, length, heads · head_dim) to (batch, heads, length, head_dim)."""
        batch, length, _ = x.shape
        return x.view(batch, length, heads or self.heads, self.head_dim).transpose(1, 2)

    def prepare(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Scale, rotate or normalise queries and keys."""
        return query, key

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = self.adjust(self.scale_product(self.product(query, key)))
        note(self, scores, self.layout)
        return self.mix(self.weigh(scores), value)

    def product(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT

    def scale_product(self, product: Tensor) -> Tensor:
        return product * (self.multiplier() if self.kept_as is None else getattr(self, self.kept_as))

    def multiplier(self) -> float | Tensor:
        return self.head_dim**-0.5

    def adjust(self, scores: Tensor) -> Tensor:
        """Mask or cap the scores, or add a bias."""
        return scores

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def mix(self, weights: Tensor, value: Tensor) -> Tensor:
        return weights @ value

    def merge(self, x: Tensor) -> Tensor:
        """(batch, heads, length, head_dim) back to (batch, length, d_model)."""
        return self.out_proj(x.transpose(1, 2).flatten(2))


class Divided(SelfAttention):
    """q·k / √d_k, as it is printed, where others multiply."""

    def scale_product(self, product):
        return product / math.sqrt(self.head_dim)


class Bare(SelfAttention):
    """q·k as it is: queries and keys carry the scale, or nothing does."""

    def scale_product(self, product):
        return product


class Normed(SelfAttention):
    """Norms of each head's query and key."""

    norm = nn.RMSNorm

    def add_parts(self):
        self.q_norm, self.k_norm = self.norm(self.head_dim), self.norm(self.head_dim)

    def prepare(self, query, key):
        return self.q_norm(query), self.k_norm(key)


class Unit(SelfAttention):
    """Cosines of queries and keys."""

    def prepare(self, query, key):
        return F.normalize(query, dim=-1), F.normalize(key, dim=-1)


class Causal(SelfAttention):
    """Hides later keys with −∞."""

    def adjust(self, scores):
        return scores.masked_fill(above_diagonal(scores.shape[-2], scores.shape[-1]), -torch.inf)


class Kernel(SelfAttention):
    """A plain call of SDPA."""

    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value)


class HeadsLast(SelfAttention):
    """Query, key and value as (batch, length, heads, head_dim), and einsum."""

    scored, mixed, axis = "bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", -1

    def project(self, x):
        return [p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj)]

    def product(self, query, key):
        return torch.einsum(self.scored, query, key)

    def weigh(self, scores):
        return scores.softmax(dim=self.axis)

    def mix(self, weights, value):
        return torch.einsum(self.mixed, weights, value)

    def merge(self, x):
        return self.out_proj(x.flatten(-2))


class Einsum(SelfAttention):
    """einsum with the heads before the length."""

    def product(self, query, key):
        return torch.einsum("bhid,bhjd->bhij", query, key)

    def mix(self, weights, value):
        return torch.einsum("bhij,bhjd->bhid", weights, value)


class HeadsAsBatch(SelfAttention):
    """(batch · heads, length, head_dim) and torch.bmm."""

    layout = "nqk"

    def project(self, x):
        return [each.flatten(0, 1) for each in super().project(x)]

    def product(self, query, key):
        return torch.bmm(query, key.transpose(1, 2))

    def mix(self, weights, value):
        return torch.bmm(weights, value)

    def merge(self, x):
        return super().merge(x.unflatten(0, (-1, self.heads)))


def above_diagonal(q_len: int, kv_len: int | None = None) -> Tensor:
    """True where a causal attention must not look: keys after the query, the last query seeing every key."""
    kv_len = kv_len or q_len
    return torch.ones(q_len, kv_len, dtype=torch.bool).triu(1 + kv_len - q_len)
