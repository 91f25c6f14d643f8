"""Reported bugs of normalised queries and keys, and of parameters that are built and never used, with fixed twins."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .bases import Configuration, Kernel, Normed, SelfAttention, Unit
from .reported import reported


@reported("config_mismatch", 64, 4, scale=16**-0.5, right_scale=10.0)
class CosineScaleIgnored(Unit):
    """x-transformers multiplies cosines by qk_norm_scale = 10; the kernel was called with its default."""

    scale = 10.0

    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, scale=self.scale if self.right else None)


@reported("diluted", 72, 4, scale=18**-0.5, right_scale=18**0.5, step="multiplier", base=Unit)
def cosines_divided(self):
    """1/√d of cosines: no weight differs from another."""
    return self.head_dim ** (0.5 if self.right else -0.5)


@reported("diluted", 56, 4, scale=1.0, right_scale=10.0, step="multiplier", base=Unit)
def cosines_as_they_are(self):
    """No temperature at all."""
    return 10.0 if self.right else 1.0


class LearnedLogit(Unit):
    """CLIP and Swin v2 learn the logarithm of the scale."""

    def add_parts(self):
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))


@reported("config_mismatch", 88, 4, scale=10.0, right_scale=1 / 0.07)
class LogitScaleUnused(LearnedLogit):
    """Built, and a constant is used in its place."""

    def multiplier(self):
        return self.logit_scale.exp() if self.right else 10.0


@reported("unusual_scale", 92, 4, scale=-0.15, right_scale=0.15)
class NegativeTemperature(SelfAttention):
    """A learned temperature that nothing keeps positive, after training: the least similar keys get the most."""

    def add_parts(self):
        self.temperature = nn.Parameter(torch.tensor(-0.15))

    def multiplier(self):
        return self.temperature.abs() if self.right else self.temperature


@reported("unusual_scale", 52, 4, scale=-0.2, right_scale=0.2, causal=True)
class NegativeTemperatureOfTheQuery(SelfAttention):
    """A temperature on the query, before a kernel, one for each head."""

    def add_parts(self):
        self.tau = nn.Parameter(torch.full((self.heads, 1, 1), -0.2))

    def prepare(self, query, key):
        return query * (self.tau.abs() if self.right else self.tau), key

    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, scale=1.0, is_causal=True)


@reported("qk_norm_freezes", 128, 2, scale=1.0, step="multiplier", base=Normed)
def normed_and_unscaled(self):
    return self.head_dim**-0.5 if self.right else 1.0


@reported("scaled_by_model_dim", 96, 4, scale=96**-0.5, step="multiplier", base=Normed)
def normed_by_the_model(self):
    """A layer with norms is as wrong with √d_model as one without."""
    return (self.head_dim if self.right else self.d_model) ** -0.5


@reported("scaled_by_dim", 92, 4, scale=1 / 23)
class NormedAndScaledTwice(Normed, Kernel):
    """The query is scaled after its norm, and the kernel scales again."""

    def prepare(self, query, key):
        query, key = super().prepare(query, key)
        return query if self.right else query * self.head_dim**-0.5, key


@reported("unusual_scale", 60, 4, head_dim=24, scale=15**-0.5, step="multiplier", base=Normed, kept_as="scaling")
def normed_by_hidden_over_heads(self):
    return (self.head_dim if self.right else self.d_model // self.heads) ** -0.5


@reported("config_mismatch", 72, 4, scale=18**-0.5, right_scale=0.4)
class NormedAndMultiplierIgnored(Normed):
    config = Configuration(attention_multiplier=0.4)

    def multiplier(self):
        return self.config.attention_multiplier if self.right else self.head_dim**-0.5


class NormedByFunction(SelfAttention):
    """F.rms_norm without a weight."""

    def prepare(self, query, key):
        return F.rms_norm(query, (self.head_dim,)), F.rms_norm(key, (self.head_dim,))


@reported("scaled_by_model_dim", 76, 4, scale=76**-0.5, step="multiplier", base=NormedByFunction)
def normed_without_gains(self):
    """F.rms_norm without a weight is a norm, too."""
    return (self.head_dim if self.right else self.d_model) ** -0.5


@reported("inert_qk_norm", 68, 4)
class NormsOfKeyAndValue(Normed):
    """The arguments moved by one."""

    def prepare(self, query, key):
        return query, key

    def attend(self, query, key, value):
        if self.right:
            query, key = self.q_norm(query), self.k_norm(key)
        else:
            key, value = self.q_norm(key), self.k_norm(value)
        return F.scaled_dot_product_attention(query, key, value)


class GainLost(nn.Module):
    """x / √(mean x²), and a gain that is not multiplied unless `right`."""

    right = False

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * self.weight if self.right else x


@reported("inert_qk_norm", 44, 4)
class GainsOfNormsUnused(Normed):
    def norm(self, dim):
        norm = GainLost(dim)
        norm.right = self.right
        return norm


@reported("inert_qk_norm", 84, 4)
class GainsUnused(NormedByFunction):
    """Gains that are parameters of the attention itself."""

    def add_parts(self):
        self.q_gain = nn.Parameter(torch.ones(self.heads, 1, self.head_dim))
        self.k_gain = nn.Parameter(torch.ones(self.heads, 1, self.head_dim))

    def prepare(self, query, key):
        query, key = super().prepare(query, key)
        return (query * self.q_gain, key * self.k_gain) if self.right else (query, key)


@reported("inert_qk_norm", 56, 4, step="prepare", base=Normed)
def only_the_query_is_normed(self, query, key):
    """The line of the key was lost in a merge."""
    return self.q_norm(query), self.k_norm(key) if self.right else key
