"""Queries and keys that are normalised, and scores that are capped."""

import torch
import torch.nn.functional as F
from torch import nn

from .entry import SelfAttention, correct
from .fused import dense
from .recording import note


class Normalised(SelfAttention):
    """Norms of each head's query and key; a subclass makes them."""

    norm = nn.RMSNorm

    def add_parts(self):
        self.q_norm, self.k_norm = self.norm(self.head_dim), self.norm(self.head_dim)

    def forward(self, x):
        query, key, value = self.project(x)
        query, key = self.q_norm(query), self.k_norm(key)
        note(self, lambda: dense(query, key))
        return self.merge(F.scaled_dot_product_attention(query, key, value))


@correct(33, 3)
class Rms(Normalised):
    pass


@correct(39, 3)
class LayerNorms(Normalised):
    norm = nn.LayerNorm


class HandWrittenRms(nn.Module):
    """x / √(mean x² + ε), in float32, times a gain named scale."""

    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale


@correct(35, 5)
class HandWritten(Normalised):
    norm = HandWrittenRms


@correct(51, 3)
class OptionalNorms(Normalised):
    """Norms that are switched off: nn.Identity. Nothing is inert that nobody asked for."""

    def add_parts(self):
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        self.attn_logit_softcapping = None
        self.softcap = 0.0


@correct(57, 3)
class NormBeforeTheSplit(SelfAttention):
    """OLMo 2's: over the whole width."""

    def add_parts(self):
        self.q_norm, self.k_norm = nn.RMSNorm(self.heads * self.head_dim), nn.RMSNorm(self.heads * self.head_dim)

    def forward(self, x):
        query, key = self.split(self.q_norm(self.q_proj(x))), self.split(self.k_norm(self.k_proj(x)))
        value = self.split(self.v_proj(x))
        scores = query @ key.transpose(2, 3) * self.head_dim**-0.5
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value)


@correct(46, 2, scale=7.3)
class UnitVectors(SelfAttention):
    """Cosines times a learned number, which starts at 7.3: log₂(n² − n)."""

    def add_parts(self):
        self.g = nn.Parameter(torch.tensor(7.3))

    def forward(self, x):
        query, key, value = self.project(x)
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        scores = self.g * (query @ key.mT)
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value)


@correct(69, 3, scale=10.0)
class CosinePerHead(SelfAttention):
    """Swin v2's: F.normalize, a logit scale for each head, clamped at 100, and a bias between 0 and 16."""

    def add_parts(self):
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones((self.heads, 1, 1))))
        self.table = nn.Parameter(torch.randn(self.heads, 13, 13))

    def forward(self, x):
        query, key, value = self.project(x)
        scores = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).transpose(-2, -1)
        scores = scores * torch.clamp(self.logit_scale, max=4.6052).exp()
        scores = scores + 16 * torch.sigmoid(self.table)
        note(self, scores)
        return self.merge(scores.softmax(dim=-1) @ value)


@correct(44, 4, scale=(4 + 8 + 12 + 16) / 4)
class DifferentPerHead(SelfAttention):
    """Unit vectors by hand, and another temperature for every head."""

    def add_parts(self):
        self.temperature = nn.Parameter(torch.tensor([4.0, 8.0, 12.0, 16.0])[:, None, None])

    def forward(self, x):
        query, key, value = self.project(x)
        query, key = (x / x.norm(dim=-1, keepdim=True) for x in (query, key))
        scores = query @ key.mT * self.temperature
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value)


class Capped(SelfAttention):
    """A soft-cap, said in an attribute."""

    softcap = 30.0

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.mT * self.head_dim**-0.5
        scores = self.cap(scores)
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value)


@correct(52, 4, softcap=30.0, init=2.0)
class SoftCap(Capped):
    def cap(self, scores):
        return self.softcap * torch.tanh(scores / self.softcap)


@correct(55, 5, softcap=50.0, gradients=False)
class SoftCapInPlace(Capped):
    """A cap far above the scores of an untrained model: meant for later, not inert."""

    softcap = 50.0

    def cap(self, scores):
        return scores.div_(self.softcap).tanh_().mul_(self.softcap)


@correct(65, 5, softcap=20.0, init=1.5)
class SoftCapThenMask(Capped):
    softcap = 20.0

    def cap(self, scores):
        scores = (scores / self.softcap).tanh() * self.softcap
        place = torch.arange(scores.shape[-1])
        return scores.masked_fill((place[:, None] - place).abs() > 5, -torch.inf)


@correct(68, 4, softcap=15.0)
class NormAndCap(Normalised):
    """Both."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = self.q_norm(query) @ self.k_norm(key).mT / self.head_dim**0.5
        scores = 15.0 * torch.tanh(scores / 15.0)
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value)
