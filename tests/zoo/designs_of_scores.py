"""Designs whose scores are more than q·k: other terms, distances, biases; all of them are right.

What cannot be read of them may be said in a note; none gets a warning or an error.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .bases import Causal, Divided, SelfAttention, above_diagonal, note
from .entry import Expected, correct, enter


class ResidualScores(SelfAttention):
    """RealFormer's: the scores of the layer before are added."""

    def forward(self, x, before=None):
        query, key, value = self.project(x)
        scores = query @ key.mT / math.sqrt(self.head_dim)
        if before is not None:
            scores = scores + before
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value), scores


class RealFormer(nn.Module):
    def __init__(self, d_model, heads, layers):
        super().__init__()
        self.blocks = nn.ModuleList(ResidualScores(d_model, heads) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(layers))

    def forward(self, x):
        scores = None
        for block, norm in zip(self.blocks, self.norms, strict=True):
            mixed, scores = block(x, scores)
            x = norm(x + mixed)
        return x


enter(
    "designs_of_scores.RealFormer",
    lambda: (RealFormer(52, 4, 4), (torch.randn(2, 13, 52),)),
    {f"blocks.{index}": Expected(4, None, 13**-0.5, 4) for index in range(4)},
)


class Disentangled(SelfAttention):
    """DeBERTa's: content to content, content to position, position to content, under one root of 3 d_k."""

    def add_parts(self):
        self.table = nn.Parameter(torch.randn(26, self.heads * self.head_dim))
        self.pos_k, self.pos_q = (nn.Linear(self.heads * self.head_dim, self.heads * self.head_dim) for _ in range(2))

    def relative(self, x):
        """(queries, keys): which row of the table stands for their distance."""
        place = torch.arange(x.shape[1])
        return place[:, None] - place[None] + 13


@correct(55, 5, scale=(3 * 11) ** -0.5, seen_dim=None, statistics="none")
class DisentangledGathered(Disentangled):
    """As published: gathered from products with every distance, each divided by the scale."""

    def forward(self, x):
        query, key, value = self.project(x)
        scale, at = math.sqrt(3 * self.head_dim), self.relative(x)
        pos_k, pos_q = (
            p(self.table).unflatten(-1, (self.heads, -1)).transpose(0, 1)[None] for p in (self.pos_k, self.pos_q)
        )
        scores = query @ (key / scale).mT
        to_position = query @ (pos_k / scale).mT
        scores = scores + torch.gather(to_position, -1, at.expand(*scores.shape[:2], -1, -1))
        to_content = key @ (pos_q / scale).mT
        scores = scores + torch.gather(to_content, -1, at.expand(*scores.shape[:2], -1, -1)).mT
        return self.merge(scores.softmax(-1) @ value)


@correct(65, 5, scale=(3 * 13) ** -0.5, seen_dim=None, statistics="none")
class DisentangledEinsum(Disentangled):
    """A position for every pair, and one division at the end."""

    def forward(self, x):
        query, key, value = self.project(x)
        at = self.relative(x)
        pos_k = self.pos_k(self.table)[at].unflatten(-1, (self.heads, -1))
        pos_q = self.pos_q(self.table)[at].unflatten(-1, (self.heads, -1))
        content = torch.einsum("bhqd,bhkd->bhqk", query, key)
        to_position = torch.einsum("bhqd,qkhd->bhqk", query, pos_k)
        to_content = torch.einsum("bhkd,qkhd->bhqk", key, pos_q)
        scores = (content + to_position + to_content) / math.sqrt(3 * self.head_dim)
        return self.merge(scores.softmax(-1) @ value)


class InvariantPoints(nn.Module):
    """AlphaFold's: scalar products under √(3·16), squared distances of points, a pair bias; weights kept."""

    scalars, points = 16, 4

    def __init__(self, d_model, heads, head_dim=None, kv_heads=None):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * heads * self.scalars)
        self.place = nn.Linear(d_model, 2 * heads * self.points * 3)
        self.pair = nn.Linear(7, heads)
        self.head_weights = nn.Parameter(torch.zeros(heads))
        self.out = nn.Linear(heads * self.scalars, d_model)
        self.kept = None

    def forward(self, x, pairs):
        query, key, value = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = query @ key.mT * math.sqrt(1 / (3 * self.scalars))
        scores = scores + math.sqrt(1 / 3) * self.pair(pairs).permute(0, 3, 1, 2)
        there, here = self.place(x).unflatten(-1, (2, self.heads, self.points, 3)).unbind(2)
        apart = (there[:, :, None] - here[:, None]).square().sum(-1).sum(-1)
        gamma = F.softplus(self.head_weights) * math.sqrt(1 / (3 * (self.points * 9 / 2)))
        scores = scores - 0.5 * (gamma * apart).permute(0, 3, 1, 2)
        self.kept = scores.softmax(-1)
        return self.out((self.kept @ value).transpose(1, 2).flatten(2))


correct(
    33, 3, head_dim=16, scale=48**-0.5, seen_dim=None, statistics="none",
    inputs=lambda: (torch.randn(2, 13, 33), torch.randn(2, 13, 13, 7)),
)(InvariantPoints)  # fmt: skip


@correct(33, 3, scale=3.3166, statistics="none")
class Hypersphere(SelfAttention):
    """nGPT's: unit vectors with learned gains, multiplied by √d_k."""

    def add_parts(self):
        self.gain = nn.Parameter(torch.ones(self.head_dim))

    def prepare(self, query, key):
        return [self.gain * F.normalize(y, dim=-1) for y in (query, key)]

    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, scale=math.sqrt(self.head_dim))


@correct(63, 3, causal=True, statistics="none", scale=None, seen_dim=None)
class RelativeShift(Causal):
    """Transformer-XL's: (q + u)·k and (q + v)·r, the second shifted into place by a reshape."""

    def add_parts(self):
        self.u, self.v = (nn.Parameter(torch.randn(self.heads, 1, self.head_dim)) for _ in range(2))
        self.r_proj = nn.Linear(self.heads * self.head_dim, self.heads * self.head_dim, bias=False)

    def product(self, query, key):
        length = query.shape[2]
        place = torch.arange(length - 1, -1, -1.0)[:, None] * 0.9 ** torch.arange(0.0, self.d_model)
        relative = self.split(self.r_proj(place.sin())[None])
        content = (query + self.u) @ key.mT
        position = (query + self.v) @ relative.mT
        padded = F.pad(position, (1, 0)).view(*position.shape[:2], length + 1, length)
        return content + padded[:, :, 1:]


@correct(48, 4, scale=None, statistics="none", step="product", base=Divided)
def distances(self, query, key):
    """Minus the squared distance of query and key, over √d: q·k counts twice, and their lengths are added."""
    lengths = query.square().sum(-1, keepdim=True) + key.square().sum(-1)[:, :, None]
    return -(lengths - 2 * query @ key.mT)


@correct(52, 4, causal=True, statistics="none", step="adjust", base=Divided)
def multiplied_and_taken_off(self, scores):
    """GPT-2's first: scores times the mask, less 1e10 where it is zero; and a switch for every head."""
    shown = (~above_diagonal(scores.shape[-1])).float()
    scores = scores * torch.ones(self.heads, 1, 1)
    return scores * shown - 1e10 * (1 - shown)


@correct(57, 3, statistics="shape", step="adjust", base=Divided)
def adjacent(self, scores):
    """One is added to the scores of neighbours in a graph, and to those of a few keys that everybody should see."""
    at = torch.arange(scores.shape[-1])
    neighbours, everybody = ((at[:, None] - at).abs() % 5 == 1).float(), (at % 4 == 1).float()
    return scores + neighbours + everybody
