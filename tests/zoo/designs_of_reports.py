"""Correct designs that look like the bugs of `reported` and `reported_norms`: none gets a warning or an error."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from .bases import Configuration, Kernel, Normed, SelfAttention, Unit, above_diagonal
from .entry import correct
from .reported import Rotary
from .reported_norms import LearnedLogit, NormedByFunction

plain = dict(statistics="none")


@correct(128, 2, scale=1.0, **plain, step="multiplier", base=Normed, config=Configuration(query_pre_attn_scalar=1.0))
def normed_with_scalar_of_one(self):
    """query_pre_attn_scalar = 1 after a norm: the gains are to learn the scale."""
    return 1.0


@correct(128, 2, scale=1.0, **plain, step="multiplier", base=Normed, config=Configuration(attention_multiplier=1.0))
def normed_with_multiplier_of_one(self):
    return self.config.attention_multiplier


@correct(128, 2, scale=1.0, **plain, step="multiplier", base=Normed, kept_as="scaling")
def normed_with_scaling_of_one(self):
    """Gemma 4 writes self.scaling = 1.0 beside its norms."""
    return 1.0


@correct(96, 4, scale=0.12, **plain, step="multiplier", base=NormedByFunction)
def normed_with_its_own_constant(self):
    """Speed runs normalise without gains and multiply by 0.12."""
    return 0.12


@correct(92, 4, scale=1 / 0.07, **plain)
class LearnedLogitScale(LearnedLogit):
    def multiplier(self):
        return self.logit_scale.exp().clamp(max=100)


@correct(80, 4, scale=8.0, **plain)
class LearnedTauOfCosines(Unit):
    def add_parts(self):
        self.tau = nn.Parameter(torch.full((self.heads, 1, 1), 0.125))

    def multiplier(self):
        return 1 / self.tau.clamp(min=0.01)


@correct(
    72,
    4,
    scale=0.0915,
    **plain,
    step="multiplier",
    config=Configuration(attention_multiplier=0.0915),
    kept_as="scaling",
)
def multiplier_of_the_configuration(self):
    return self.config.attention_multiplier


@correct(
    48,
    4,
    head_dim=20,
    scale=12**-0.5,
    **plain,
    step="multiplier",
    config=Configuration(query_pre_attn_scalar=12),
    kept_as="scaling",
)
def scalar_of_hidden_over_heads(self):
    """Gemma 2 27B: hidden/heads, where heads are wider, on purpose: its configuration says so."""
    return self.config.query_pre_attn_scalar**-0.5


@correct(88, 4, **plain)
class YarnInTheTable(Rotary):
    @property
    def amplitude(self):
        return self.stretch


@correct(88, 4, scale=22**-0.5 * (0.1 * math.log(40) + 1) ** 2, **plain)
class YarnInTheScale(Rotary):
    amplitude = 1.0

    def multiplier(self):
        return self.head_dim**-0.5 * self.stretch**2


@correct(88, 4, **plain)
class LinearStretch(Rotary):
    """A context stretched linearly needs no factor."""

    rope: ClassVar[dict] = {"rope_type": "linear", "factor": 8.0}
    amplitude = 1.0


@correct(60, 4, causal=None, **plain, step="adjust")
def mask_by_index_assignment(self, scores):
    """scores[:, :, mask == 0] = −inf."""
    mask = ~above_diagonal(scores.shape[-1])
    scores[:, :, mask == 0] = float("-inf")
    return scores


@correct(52, 4, causal=None, **plain, step="adjust")
def mask_by_slices(self, scores):
    """The last keys of a sequence are padding, and a slice of the scores is set."""
    scores = scores.clone()
    scores[1:, :, :, 9:] = float("-inf")
    return scores


@correct(92, 4, scale=0.37, **plain, step="multiplier", kept_as="scale")
def scale_given_to_the_module(self):
    """A number of one's own, which somebody passed to the module."""
    return 0.37


@correct(76, 4, **plain)
class NormsOfTheInput(Kernel):
    """norm_q and norm_k before the projections, as in Perceiver, are no QK-norm."""

    def add_parts(self):
        self.norm_q, self.norm_k = nn.LayerNorm(self.d_model), nn.LayerNorm(self.d_model)

    def project(self, x):
        return self.split(self.q_proj(self.norm_q(x))), *(
            self.split(p(self.norm_k(x))) for p in (self.k_proj, self.v_proj)
        )


@correct(84, 4, **plain)
class OnlyTheKeyHasANorm(SelfAttention):
    """A norm of the key alone, by design: there is none of the query."""

    def add_parts(self):
        self.k_norm = nn.LayerNorm(self.head_dim)

    def prepare(self, query, key):
        return query, self.k_norm(key)


@correct(56, 4, **plain)
class FourthRoots(SelfAttention):
    """A diffusion U-Net's, as it should be."""

    def prepare(self, query, key):
        scale = self.head_dim**-0.25
        return query * scale, key * scale

    def multiplier(self):
        return 1.0


@correct(44, 4, **plain, step="attend")
def scaled_by_hand_for_a_kernel(self, query, key, value):
    """The query scaled, and the kernel told not to."""
    return F.scaled_dot_product_attention(query * self.head_dim**-0.5, key, value, scale=1.0)


@correct(64, 4, head_dim=10, seen_dim=10, **plain)
class LatentsNotAbsorbed(SelfAttention):
    """Multi-head latent attention as it is trained: 6 plain and 4 rotary features are dotted."""

    config = Configuration(qk_nope_head_dim=6, qk_rope_head_dim=4, kv_lora_rank=24)
