"""Correct designs that look like the bugs of `reported` and `reported_norms`: none gets a warning or an error."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from .entry import SelfAttention, above_diagonal, correct
from .reported import Configuration, Reported, Rotary
from .reported_norms import LearnedLogit, Normed, Unit

plain = dict(statistics="none")


@correct(128, 2, scale=1.0, **plain)
class NormedWithScalarOfOne(Normed):
    """query_pre_attn_scalar = 1 after a norm: the gains are to learn the scale."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.config = Configuration(query_pre_attn_scalar=1.0)

    def multiplier(self, x):
        return 1.0


@correct(128, 2, scale=1.0, **plain)
class NormedWithMultiplierOfOne(Normed):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.config = Configuration(attention_multiplier=1.0)

    def multiplier(self, x):
        return self.config.attention_multiplier


@correct(128, 2, scale=1.0, **plain)
class NormedWithScalingOfOne(Normed):
    """Gemma 4 writes self.scaling = 1.0 beside its norms."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scaling = 1.0

    def multiplier(self, x):
        return self.scaling


@correct(96, 4, scale=0.12, **plain)
class NormedWithItsOwnConstant(Reported):
    """Speed runs normalise without gains and multiply by 0.12."""

    def queries_and_keys(self, query, key):
        return F.rms_norm(query, (self.head_dim,)), F.rms_norm(key, (self.head_dim,))

    def multiplier(self, x):
        return 0.12


@correct(92, 4, scale=1 / 0.07, **plain)
class LearnedLogitScale(LearnedLogit):
    def multiplier(self, x):
        return self.logit_scale.exp().clamp(max=100)


@correct(80, 4, scale=8.0, **plain)
class LearnedTauOfCosines(Unit):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tau = nn.Parameter(torch.full((self.heads, 1, 1), 0.125))

    def multiplier(self, x):
        return 1 / self.tau.clamp(min=0.01)


@correct(72, 4, scale=0.0915, **plain)
class MultiplierOfTheConfiguration(Reported):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.config = Configuration(attention_multiplier=0.0915)
        self.scaling = self.config.attention_multiplier

    def multiplier(self, x):
        return self.scaling


@correct(48, 4, head_dim=20, scale=12**-0.5, **plain)
class ScalarOfHiddenOverHeads(Reported):
    """Gemma 2 27B: hidden/heads, where heads are wider, on purpose: its configuration says so."""

    def __init__(self, d_model, heads, **kwargs):
        super().__init__(d_model, heads, **kwargs)
        self.config = Configuration(query_pre_attn_scalar=d_model // heads)
        self.scaling = self.config.query_pre_attn_scalar**-0.5

    def multiplier(self, x):
        return self.scaling


@correct(88, 4, **plain)
class YarnInTheTable(Rotary):
    @property
    def amplitude(self):
        return self.stretch


@correct(88, 4, scale=22**-0.5 * (0.1 * math.log(40) + 1) ** 2, **plain)
class YarnInTheScale(Rotary):
    amplitude = 1.0

    def multiplier(self, x):
        return self.head_dim**-0.5 * self.stretch**2


@correct(88, 4, **plain)
class LinearStretch(Rotary):
    """A context stretched linearly needs no factor."""

    rope: ClassVar[dict] = {"rope_type": "linear", "factor": 8.0}
    amplitude = 1.0


@correct(60, 4, causal=None, **plain)
class MaskByIndexAssignment(Reported):
    """scores[:, :, mask == 0] = −inf."""

    def masked(self, scores):
        mask = ~above_diagonal(scores.shape[-1])
        scores[:, :, mask == 0] = float("-inf")
        return scores


@correct(52, 4, causal=None, **plain)
class MaskBySlices(Reported):
    """The last keys of a sequence are padding, and a slice of the scores is set."""

    def masked(self, scores):
        scores = scores.clone()
        scores[1:, :, :, 9:] = float("-inf")
        return scores


@correct(92, 4, scale=0.37, **plain)
class ScaleGivenToTheModule(Reported):
    """A number of one's own, which somebody passed to the module."""

    def __init__(self, *args, scale=0.37, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = scale

    def multiplier(self, x):
        return self.scale


@correct(76, 4, **plain)
class NormsOfTheInput(Reported):
    """norm_q and norm_k before the projections, as in Perceiver, are no QK-norm."""

    def __init__(self, d_model, *args, **kwargs):
        super().__init__(d_model, *args, **kwargs)
        self.norm_q, self.norm_k = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x):
        query = self.split(self.q_proj(self.norm_q(x)))
        key, value = (self.split(p(self.norm_k(x))) for p in (self.k_proj, self.v_proj))
        return self.merge(F.scaled_dot_product_attention(query, key, value))


@correct(84, 4, **plain)
class OnlyTheKeyHasANorm(Reported):
    """A norm of the key alone, by design: there is none of the query."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.k_norm = nn.LayerNorm(self.head_dim)

    def queries_and_keys(self, query, key):
        return query, self.k_norm(key)


@correct(56, 4, **plain)
class FourthRoots(Reported):
    """A diffusion U-Net's, as it should be."""

    def queries_and_keys(self, query, key):
        scale = self.head_dim**-0.25
        return query * scale, key * scale

    def multiplier(self, x):
        return 1.0


@correct(44, 4, **plain)
class ScaledByHandForAKernel(SelfAttention):
    """The query scaled, and the kernel told not to."""

    def forward(self, x):
        query, key, value = self.project(x)
        scaling = self.head_dim**-0.5
        return self.merge(F.scaled_dot_product_attention(query * scaling, key, value, scale=1.0))


@correct(64, 4, head_dim=10, seen_dim=10, **plain)
class LatentsNotAbsorbed(Reported):
    """Multi-head latent attention as it is trained: 6 plain and 4 rotary features are dotted."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.config = Configuration(qk_nope_head_dim=6, qk_rope_head_dim=4, kv_lora_rank=24)
