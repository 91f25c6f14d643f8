"""Queries and keys that are normalised, and scores that are capped."""

import torch
from torch import nn

from .bases import Divided, Normed, SelfAttention, Unit
from .entry import correct
from .fused import sdpa


class Normalised(Normed):
    """Norms before SDPA."""

    def attend(self, query, key, value):
        return sdpa(self, query, key, value)


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

    attn_logit_softcapping, softcap = None, 0.0

    def add_parts(self):
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()


@correct(57, 3)
class NormBeforeTheSplit(SelfAttention):
    """OLMo 2's: over the whole width."""

    def add_parts(self):
        self.q_norm, self.k_norm = nn.RMSNorm(self.heads * self.head_dim), nn.RMSNorm(self.heads * self.head_dim)

    def project(self, x):
        query, key = self.split(self.q_norm(self.q_proj(x))), self.split(self.k_norm(self.k_proj(x)))
        return query, key, self.split(self.v_proj(x))


@correct(46, 2, scale=7.3)
class UnitVectors(Unit):
    """Cosines times a learned number, which starts at 7.3: log₂(n² − n)."""

    def add_parts(self):
        self.g = nn.Parameter(torch.tensor(7.3))

    def scale_product(self, product):
        return self.g * product


@correct(69, 3, scale=10.0)
class CosinePerHead(Unit):
    """Swin v2's: F.normalize, a logit scale for each head, clamped at 100, and a bias between 0 and 16."""

    def add_parts(self):
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones((self.heads, 1, 1))))
        self.table = nn.Parameter(torch.randn(self.heads, 13, 13))

    def multiplier(self):
        return torch.clamp(self.logit_scale, max=4.6052).exp()

    def adjust(self, scores):
        return scores + 16 * torch.sigmoid(self.table)


@correct(44, 4, scale=(4 + 8 + 12 + 16) / 4)
class DifferentPerHead(SelfAttention):
    """Unit vectors by hand, and another temperature for every head."""

    def add_parts(self):
        self.temperature = nn.Parameter(torch.tensor([4.0, 8.0, 12.0, 16.0])[:, None, None])

    def prepare(self, query, key):
        return [x / x.norm(dim=-1, keepdim=True) for x in (query, key)]

    def multiplier(self):
        return self.temperature


@correct(52, 4, softcap=30.0, init=2.0)
class SoftCap(SelfAttention):
    softcap = 30.0

    def adjust(self, scores):
        return self.softcap * torch.tanh(scores / self.softcap)


@correct(55, 5, softcap=50.0, gradients=False)
class SoftCapInPlace(SelfAttention):
    """A cap far above the scores of an untrained model: meant for later, not inert."""

    softcap = 50.0

    def adjust(self, scores):
        return scores.div_(self.softcap).tanh_().mul_(self.softcap)


@correct(65, 5, softcap=20.0, init=1.5)
class SoftCapThenMask(SelfAttention):
    softcap = 20.0

    def adjust(self, scores):
        scores = (scores / self.softcap).tanh() * self.softcap
        place = torch.arange(scores.shape[-1])
        return scores.masked_fill((place[:, None] - place).abs() > 5, -torch.inf)


@correct(68, 4, softcap=15.0)
class NormAndCap(Normalised, Divided):
    """Both."""

    attend = SelfAttention.attend

    def adjust(self, scores):
        return 15.0 * torch.tanh(scores / 15.0)
