"""More bugs that people reported, of ports and rewritten kernels, with fixed twins; and designs that look like them.

Modelled on issues of Megatron-LM, transformers (GPT-2, OPT, T5), llama.cpp, mlc-llm, MONAI, Moonshine, ipex-llm,
x-transformers, CLIP, maxtext, SKaiNET and lecture code; shapes are our own.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from .bases import Bare, Configuration, Einsum, HeadsAsBatch, Kernel, Normed, SelfAttention, Unit, above_diagonal
from .entry import correct
from .reported import Capped, Rotary, reported

plain = dict(statistics="none")


# Widths


@reported("unusual_scale", 72, 4, scale=24**-0.5, seen_dim=None, step="attend")
def padded_heads(self, *heads):
    """Heads of 18 are padded to 24 for a kernel, whose default is then 1/√24."""
    query, key, value = (F.pad(each, (0, 24 - self.head_dim)) for each in heads)
    scale = self.head_dim**-0.5 if self.right else None
    return F.scaled_dot_product_attention(query, key, value, scale=scale)[..., : self.head_dim]


@reported("unusual_scale", 60, 4, head_dim=20, scale=12**-0.5)
class WidthOfTheValue(SelfAttention):
    """GPT-2 divided by the width of the value, which is the same until somebody makes values narrower."""

    def add_parts(self):
        self.v_proj, self.out_proj = nn.Linear(self.d_model, self.heads * 12), nn.Linear(self.heads * 12, self.d_model)

    def project(self, x):
        query, key = self.split(self.q_proj(x)), self.split(self.k_proj(x))
        return query, key, self.v_proj(x).unflatten(-1, (self.heads, 12)).transpose(1, 2)

    def attend(self, query, key, value):
        width = query.size(-1) if self.right else value.size(-1)
        return (query @ key.mT / width**0.5).softmax(-1) @ value


@reported("unusual_scale", 92, 4, scale=2 / 23, step="scale_product")
def precedence_of_a_power(self, product):
    """`d ** 1/2` is d/2."""
    return product / (self.head_dim**0.5 if self.right else self.head_dim**1 / 2)


@reported("unusual_scale", 76, 4, scale=1 / 38, step="scale_product")
def precedence_of_a_division(self, product):
    """`scores / d ** 1 / 2` divides by 2d."""
    return product / self.head_dim**0.5 if self.right else product / self.head_dim**1 / 2


@reported("unusual_scale", 104, 2, scale=13**-0.5)
class RootOfTheLength(SelfAttention):
    """`query.size(1)` of (batch, length, heads, features) is the length."""

    def forward(self, x):
        query, key, value = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        width = query.size(-1 if self.right else 1)
        weights = (torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(width)).softmax(-1)
        return self.merge(torch.einsum("bhqk,bkhd->bhqd", weights, value))


@reported("unusual_scale", 84, 3, scale=3**-0.5, step="attend")
def root_of_the_heads(self, query, key, value):
    """`query.size(1)` of (batch, heads, length, features) is the number of heads."""
    width = query.size(-1 if self.right else 1)
    return torch.softmax(torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(width), -1) @ value


@reported("scale_after_softmax", 56, 4, scale=1.0, step="attend")
def weights_over_the_model(self, query, key, value):
    """softmax(q·k) / √d_model, of a vision transformer written from a blog post."""
    if self.right:
        return (query @ key.mT / math.sqrt(self.head_dim)).softmax(-1) @ value
    return (query @ key.mT).softmax(-1) / math.sqrt(self.d_model) @ value


@reported("unscaled", 88, 4, scale=1.0, inputs=lambda: (torch.randn(2, 13, 88), torch.randn(2, 17, 88)))
class CrossAttentionWithoutScale(Einsum):
    """The cross-attention of a diffusion model was written without the factor that its self-attention has."""

    def forward(self, x, context):
        query, key, value = (self.split(p(each)) for p, each in
                             ((self.q_proj, x), (self.k_proj, context), (self.v_proj, context)))  # fmt: skip
        return self.merge(self.attend(query, key, value))

    def scale_product(self, product):
        return product * self.head_dim**-0.5 if self.right else product


@reported("unusual_scale", 68, 4, scale=0.0, right_scale=17**-0.5, step="attend")
def default_of_zero(self, query, key, value):
    """A scale of 0 was to mean the default, and the kernel took it at its word."""
    return F.scaled_dot_product_attention(query, key, value, scale=None if self.right else 0.0)


@reported("unscaled", 60, 4, scale=1.0)
class FallbackOfAKernel(SelfAttention):
    """The fallback of a fused kernel has sm_scale=1.0 as its default, and its caller passed none."""

    def attend(self, query, key, value):
        arguments = {"sm_scale": self.head_dim**-0.5} if self.right else {}
        return self.fallback(query, key, value, **arguments)

    def fallback(self, query, key, value, sm_scale=1.0):
        return (query.float() @ key.float().mT * sm_scale).softmax(-1).to(value.dtype) @ value


@reported("scaled_by_dim", 100, 4, scale=1 / 25)
class ScaledByTheMaskedSoftmaxToo(SelfAttention):
    """The query is scaled, and a masked softmax of one's own library takes a scale that defaults to 1/√d."""

    def prepare(self, query, key):
        return query if self.right else query * self.head_dim**-0.5, key

    def attend(self, query, key, value):
        return self.masked_softmax(query @ key.mT, self.head_dim**-0.5) @ value

    def masked_softmax(self, scores, scale):
        return torch.softmax(scores * scale - (scores * scale).amax(-1, keepdim=True), -1)


# What a layer's number divides


class OfLayer(SelfAttention):
    """The third layer."""

    layer_idx = 2


@reported("unusual_scale", 84, 4, scale=21**-0.5 / 3, step="scale_product", base=OfLayer)
def layer_number_once(self, product):
    """Megatron divides by the number of the layer against overflow, and multiplies again in its softmax."""
    scores = product / (self.head_dim**0.5 * (self.layer_idx + 1))
    return scores * (self.layer_idx + 1) if self.right else scores


@reported("config_mismatch", 76, 4, right_scale=19**-0.5 / 3, causal=True)
class InverseLayerIgnored(OfLayer):
    """GPT-2's scale_attn_by_inverse_layer_idx is known to the eager code alone."""

    config = Configuration(scale_attn_by_inverse_layer_idx=True, scale_attn_weights=True)

    def attend(self, query, key, value):
        scale = self.head_dim**-0.5 / (self.layer_idx + 1) if self.right else None
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)


@reported("config_mismatch", 20, 4, right_scale=1.0, causal=True)
class UnscaledByTheConfiguration(SelfAttention):
    """scale_attn_weights = False, and a kernel with its default."""

    config = Configuration(scale_attn_weights=False)

    def attend(self, query, key, value):
        scale = 1.0 if self.right else None
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)


# Configurations


@reported("config_mismatch", 88, 4, head_dim=30, scale=30**-0.5, right_scale=22**-0.5)
class LargestGemma(SelfAttention):
    """Of Gemma's sizes the largest alone asks for hidden/heads, and the port knows one rule."""

    config = Configuration(query_pre_attn_scalar=22, head_dim=30)

    def multiplier(self):
        return (self.config.query_pre_attn_scalar if self.right else self.head_dim) ** -0.5


@reported("config_mismatch", 64, 4, scale=0.25, right_scale=1.0, init=0.5)
class T5Scaled(SelfAttention):
    """T5 has its scale in its weights; the port scales as everybody does."""

    config = Configuration(model_type="t5")

    def multiplier(self):
        return 1.0 if self.right else self.head_dim**-0.5


@reported("config_mismatch", 80, 4, right_scale=0.21)
class SoftmaxScaleOfTheConfiguration(SelfAttention):
    """config.softmax_scale is read, stored and not passed on."""

    config = Configuration(softmax_scale=0.21)

    def add_parts(self):
        self.softmax_scale = self.config.softmax_scale

    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, scale=self.softmax_scale if self.right else None)


@reported(
    "config_mismatch", 88, 4,
    scale=22**-0.5 * (0.05 * math.log(40) + 1) ** 2, right_scale=22**-0.5 * (0.1 * math.log(40) + 1) ** 2,
)  # fmt: skip
class MscaleForMscaleOfAllDims(Rotary):
    """The scale has (0.1·mscale·ln s + 1)² where mscale_all_dim was meant."""

    rope: ClassVar[dict] = {"rope_type": "yarn", "factor": 40.0, "mscale": 0.5, "mscale_all_dim": 1.0}
    amplitude = 1.0

    def multiplier(self):
        which = self.rope["mscale_all_dim" if self.right else "mscale"]
        return self.head_dim**-0.5 * (0.1 * which * math.log(40) + 1) ** 2


@reported("unusual_scale", 64, 4, head_dim=10, scale=10**0.5, step="multiplier", kept_as="softmax_scale")
def latents_multiplied(self):
    """The scale of a multi-head latent attention has the wrong sign in its exponent."""
    return self.head_dim ** (-0.5 if self.right else 0.5)


# Norms


@reported("config_mismatch", 80, 4, scale=1 / (10 * 20**0.5), right_scale=10.0)
class CosinesDividedForAKernel(Unit, Kernel):
    """x-transformers divided the query of its flash path by the scale of 10, and left the kernel its default."""

    scale = 10.0

    def prepare(self, query, key):
        query, key = super().prepare(query, key)
        return query * (self.scale * self.head_dim**0.5) if self.right else query / self.scale, key


@reported("inert_qk_norm", 60, 4, step="prepare", base=Normed)
def norms_never_called(self, query, key):
    """Built for a flag of the configuration, and called by one of two paths."""
    return (self.q_norm(query), self.k_norm(key)) if self.right else (query, key)


# Caps


@reported("unusual_scale", 76, 4, scale=None, softcap=20.0, right_scale=19**-0.5, step="adjust", base=Capped)
def cap_without_its_divisor(self, scores):
    """cap·tanh(s), where cap·tanh(s/cap) was meant: the slope at zero is the cap."""
    return self.cap * torch.tanh(scores / self.cap if self.right else scores)


@reported("inert_softcap", 68, 4, softcap=None, fixed_expected={"softcap": 20.0}, scale=17**-0.5)
class CapOfTheConfiguration(Capped):
    """attn_logit_softcapping is set, and SDPA cannot apply it."""

    config = Configuration(attn_logit_softcapping=20.0)

    def attend(self, query, key, value):
        if self.right:
            return self.capped(query @ key.mT * self.head_dim**-0.5).softmax(-1) @ value
        return F.scaled_dot_product_attention(query, key, value)


# Masks


@reported("inert_mask", 64, 4, causal=None, fixed_expected={"causal": True}, step="adjust")
def minus_forgotten(self, scores):
    """1e-9 for −1e9."""
    return scores.masked_fill(above_diagonal(scores.shape[-1]), -1e9 if self.right else 1e-9)


@reported("weights_not_normalised", 92, 4, causal=None, fixed_expected={"causal": True}, step="weigh")
def mask_after_the_softmax(self, scores):
    """The weights are multiplied by the mask, so early queries get little of anything."""
    hidden = above_diagonal(scores.shape[-1])
    if self.right:
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return scores.softmax(-1).masked_fill(hidden, 0.0)


# Correct designs


@correct(84, 4, causal=True, **plain, step="attend", base=OfLayer)
def precision_bottleneck_relaxation(self, query, key, value):
    """CogView: divide by 32, subtract the maximum, multiply by 32."""
    scores = (query / (32.0 * math.sqrt(self.head_dim))) @ key.mT
    scores = scores.masked_fill(above_diagonal(scores.shape[-1]), -1e4)
    scores = (scores - scores.amax(-1, keepdim=True)) * 32.0
    return scores.softmax(-1) @ value


@correct(72, 4, scale=8.0, **plain)
class GainsOnUnitVectors(Unit):
    """MaskGIT: unit vectors with gains of their own, and a scale of 8 that no width explains."""

    scale = 8

    def add_parts(self):
        self.q_scale, self.k_scale = nn.Parameter(torch.ones(self.head_dim)), nn.Parameter(torch.ones(self.head_dim))

    def prepare(self, query, key):
        query, key = super().prepare(query, key)
        return query * self.q_scale, key * self.k_scale

    def multiplier(self):
        return self.scale


@correct(68, 4, **plain)
class ScaledHeads(SelfAttention):
    """NormFormer multiplies the output of each head by a learned number."""

    def add_parts(self):
        self.head_scale = nn.Parameter(torch.linspace(0.5, 1.5, self.heads).view(-1, 1, 1))

    def attend(self, query, key, value):
        return self.head_scale * F.scaled_dot_product_attention(query, key, value)


@correct(60, 4, head_dim=15, **plain)
class NormOfAllHeads(Kernel):
    """OLMo 2 normalises before the split, over the width of the model."""

    def add_parts(self):
        self.q_norm, self.k_norm = nn.RMSNorm(self.d_model), nn.RMSNorm(self.d_model)

    def project(self, x):
        query, key = self.split(self.q_norm(self.q_proj(x))), self.split(self.k_norm(self.k_proj(x)))
        return query, key, self.split(self.v_proj(x))


@correct(76, 4, causal=True, **plain, step="adjust")
def mask_of_ones_and_ten_thousands(self, scores):
    """GPT-2 as OpenAI wrote it: w·b − 1e10·(1 − b)."""
    shown = (~above_diagonal(scores.shape[-1])).float()
    return scores * shown - 1e10 * (1 - shown)


@correct(92, 4, scale=23**-0.5 / 3, **plain)
class InverseLayer(OfLayer):
    config = Configuration(scale_attn_by_inverse_layer_idx=True)

    def multiplier(self):
        return self.head_dim**-0.5 / (self.layer_idx + 1)


@correct(88, 4, scale=8 / 22, **plain, step="multiplier", kept_as="attn_scale")
def mu_transferred(self):
    """muP for a base of heads of 64: 8/d_k."""
    return 8 / self.head_dim


@correct(52, 4, scale=math.e, **plain)
class LogTemperatureOfOne(Unit):
    """A learned logarithm that starts at one."""

    def add_parts(self):
        self.temperature = nn.Parameter(torch.ones(self.heads, 1, 1))

    def multiplier(self):
        return self.temperature.exp()


@correct(64, 4, head_dim=10, **plain, step="product")
def latents_in_two_products(self, query, key):
    """DeepSeek's two products, added and then scaled."""
    return query[..., :6] @ key[..., :6].mT + query[..., 6:] @ key[..., 6:].mT


@correct(44, 4, **plain)
class ScaledKey(Bare, HeadsAsBatch):
    """BLOOM: the key is scaled, by baddbmm."""

    def product(self, query, key):
        empty = torch.zeros(query.shape[0], query.shape[1], key.shape[1])
        return torch.baddbmm(empty, query, key.mT, beta=0, alpha=1 / math.sqrt(self.head_dim))


@correct(80, 4, causal=True, **plain, step="attend")
def padded_and_told_so(self, *heads):
    """Moonshine pads its heads, and passes the scale of what they were."""
    query, key, value = (F.pad(each, (0, 12)) for each in heads)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.head_dim**-0.5)
    return mixed[..., : self.head_dim]


@correct(56, 4, softcap=30.0, **plain, step="adjust")
def cap_of_grok(self, scores):
    return 30.0 * torch.tanh(scores / 30.0)


@correct(72, 4, **plain)
class ScaleOfTheModuleBesideAResidual(Kernel):
    """self.scale weighs the residual, and the kernel has its default."""

    scale = 0.7071

    def forward(self, x):
        return self.scale * super().forward(x)


@correct(88, 4, **plain)
class NormalisedOverTheSequence(Kernel):
    """A batch norm of the queries over positions is no QK-norm."""

    def add_parts(self):
        self.norm = nn.InstanceNorm1d(self.head_dim * self.heads)

    def project(self, x):
        query = self.split(self.norm(self.q_proj(x).mT).mT)
        return query, self.split(self.k_proj(x)), self.split(self.v_proj(x))


@correct(64, 4, scale=1.0, **plain)
class ScaledBeforeTheProjection(SelfAttention):
    """The root is in the weights of the query projection, as a loader that fuses it leaves it."""

    config = Configuration(softmax_scale=1.0)

    @torch.no_grad
    def add_parts(self):
        self.q_proj.weight *= self.head_dim**-0.5
        self.q_proj.bias *= self.head_dim**-0.5

    def multiplier(self):
        return 1.0
