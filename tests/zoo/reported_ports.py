"""More bugs that people reported, of ports and rewritten kernels, with fixed twins; and designs that look like them.

Modelled on issues of Megatron-LM, transformers (GPT-2, OPT, T5), llama.cpp, mlc-llm, MONAI, Moonshine, ipex-llm,
x-transformers, CLIP, maxtext, SKaiNET and lecture code; shapes are our own.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from .entry import SelfAttention, above_diagonal, correct
from .reported import Capped, Configuration, Reported, Rotary, reported
from .reported_norms import Normed, Unit

plain = dict(statistics="none")


# Widths


@reported("unusual_scale", 72, 4, scale=24**-0.5, seen_dim=None)
class PaddedHeads(SelfAttention):
    """Heads of 18 are padded to 24 for a kernel, whose default is then 1/√24."""

    right = False

    def forward(self, x):
        query, key, value = (F.pad(each, (0, 24 - self.head_dim)) for each in self.project(x))
        scale = self.head_dim**-0.5 if self.right else None
        mixed = F.scaled_dot_product_attention(query, key, value, scale=scale)
        return self.merge(mixed[..., : self.head_dim])


@reported("unusual_scale", 60, 4, head_dim=20, scale=12**-0.5)
class WidthOfTheValue(SelfAttention):
    """GPT-2 divided by the width of the value, which is the same until somebody makes values narrower."""

    right = False

    def __init__(self, d_model, heads, **kwargs):
        super().__init__(d_model, heads, **kwargs)
        self.v_proj, self.out_proj = nn.Linear(d_model, heads * 12), nn.Linear(heads * 12, d_model)

    def forward(self, x):
        query, key = self.split(self.q_proj(x)), self.split(self.k_proj(x))
        value = self.v_proj(x).unflatten(-1, (self.heads, 12)).transpose(1, 2)
        width = query.size(-1) if self.right else value.size(-1)
        return self.merge((query @ key.mT / width**0.5).softmax(-1) @ value)


@reported("unusual_scale", 92, 4, scale=2 / 23)
class PrecedenceOfAPower(Reported):
    """`d ** 1/2` is d/2."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.mT / (self.head_dim**0.5 if self.right else self.head_dim**1 / 2)
        return self.merge(scores.softmax(-1) @ value)


@reported("unusual_scale", 76, 4, scale=1 / 38)
class PrecedenceOfADivision(Reported):
    """`scores / d ** 1 / 2` divides by 2d."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.mT
        scores = scores / self.head_dim**0.5 if self.right else scores / self.head_dim**1 / 2
        return self.merge(scores.softmax(-1) @ value)


@reported("unusual_scale", 104, 2, scale=13**-0.5)
class RootOfTheLength(Reported):
    """`query.size(1)` of (batch, length, heads, features) is the length."""

    def forward(self, x):
        query, key, value = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        width = query.size(-1 if self.right else 1)
        weights = (torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(width)).softmax(-1)
        return self.merge(torch.einsum("bhqk,bkhd->bhqd", weights, value))


@reported("unusual_scale", 84, 3, scale=3**-0.5)
class RootOfTheHeads(Reported):
    """`query.size(1)` of (batch, heads, length, features) is the number of heads."""

    def forward(self, x):
        query, key, value = self.project(x)
        width = query.size(-1 if self.right else 1)
        return self.merge(torch.softmax(torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(width), -1) @ value)


@reported("scale_after_softmax", 56, 4, scale=1.0)
class WeightsOverTheModel(Reported):
    """softmax(q·k) / √d_model, of a vision transformer written from a blog post."""

    def forward(self, x):
        query, key, value = self.project(x)
        if self.right:
            return self.merge((query @ key.mT / math.sqrt(self.head_dim)).softmax(-1) @ value)
        return self.merge((query @ key.mT).softmax(-1) / math.sqrt(x.shape[-1]) @ value)


@reported("unscaled", 88, 4, scale=1.0, inputs=lambda: (torch.randn(2, 13, 88), torch.randn(2, 17, 88)))
class CrossAttentionWithoutScale(Reported):
    """The cross-attention of a diffusion model was written without the factor that its self-attention has."""

    def forward(self, x, context):
        query, key, value = (self.split(p(each)) for p, each in
                             ((self.q_proj, x), (self.k_proj, context), (self.v_proj, context)))  # fmt: skip
        scores = torch.einsum("bhid,bhjd->bhij", query, key)
        scores = scores * self.head_dim**-0.5 if self.right else scores
        return self.merge(torch.einsum("bhij,bhjd->bhid", scores.softmax(dim=-1), value))


@reported("unusual_scale", 68, 4, scale=0.0, right_scale=17**-0.5)
class DefaultOfZero(Reported):
    """A scale of 0 was to mean the default, and the kernel took it at its word."""

    def forward(self, x):
        query, key, value = self.project(x)
        return self.merge(F.scaled_dot_product_attention(query, key, value, scale=None if self.right else 0.0))


@reported("unscaled", 60, 4, scale=1.0)
class FallbackOfAKernel(Reported):
    """The fallback of a fused kernel has sm_scale=1.0 as its default, and its caller passed none."""

    def forward(self, x):
        query, key, value = self.project(x)
        arguments = {"sm_scale": self.head_dim**-0.5} if self.right else {}
        return self.merge(self.fallback(query, key, value, **arguments))

    def fallback(self, query, key, value, sm_scale=1.0):
        return (query.float() @ key.float().mT * sm_scale).softmax(-1).to(value.dtype) @ value


@reported("scaled_by_dim", 100, 4, scale=1 / 25)
class ScaledByTheMaskedSoftmaxToo(Reported):
    """The query is scaled, and a masked softmax of one's own library takes a scale that defaults to 1/√d."""

    def forward(self, x):
        query, key, value = self.project(x)
        query = query if self.right else query * self.head_dim**-0.5
        return self.merge(self.masked_softmax(query @ key.mT, self.head_dim**-0.5) @ value)

    def masked_softmax(self, scores, scale):
        return torch.softmax(scores * scale - (scores * scale).amax(-1, keepdim=True), -1)


# What a layer's number divides


class OfLayer(Reported):
    """The third layer."""

    layer_idx = 2


@reported("unusual_scale", 84, 4, scale=21**-0.5 / 3)
class LayerNumberOnce(OfLayer):
    """Megatron divides by the number of the layer against overflow, and multiplies again in its softmax."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.mT / (self.head_dim**0.5 * (self.layer_idx + 1))
        scores = scores * (self.layer_idx + 1) if self.right else scores
        return self.merge(scores.softmax(-1) @ value)


@reported("config_mismatch", 76, 4, right_scale=19**-0.5 / 3, causal=True)
class InverseLayerIgnored(OfLayer):
    """GPT-2's scale_attn_by_inverse_layer_idx is known to the eager code alone."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.config = Configuration(scale_attn_by_inverse_layer_idx=True, scale_attn_weights=True)

    def forward(self, x):
        query, key, value = self.project(x)
        scale = self.head_dim**-0.5 / (self.layer_idx + 1) if self.right else None
        return self.merge(F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale))


@reported("config_mismatch", 20, 4, right_scale=1.0, causal=True)
class UnscaledByTheConfiguration(Reported):
    """scale_attn_weights = False, and a kernel with its default."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.config = Configuration(scale_attn_weights=False)

    def forward(self, x):
        query, key, value = self.project(x)
        scale = 1.0 if self.right else None
        return self.merge(F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale))


# Configurations


@reported("config_mismatch", 88, 4, head_dim=30, scale=30**-0.5, right_scale=22**-0.5)
class LargestGemma(Reported):
    """Of Gemma's sizes the largest alone asks for hidden/heads, and the port knows one rule."""

    def __init__(self, d_model, heads, **kwargs):
        super().__init__(d_model, heads, **kwargs)
        self.config = Configuration(query_pre_attn_scalar=d_model // heads, head_dim=30)

    def multiplier(self, x):
        return (self.config.query_pre_attn_scalar if self.right else self.head_dim) ** -0.5


@reported("config_mismatch", 64, 4, scale=0.25, right_scale=1.0, init=0.5)
class T5Scaled(Reported):
    """T5 has its scale in its weights; the port scales as everybody does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.config = Configuration(model_type="t5")

    def multiplier(self, x):
        return 1.0 if self.right else self.head_dim**-0.5


@reported("config_mismatch", 80, 4, right_scale=0.21)
class SoftmaxScaleOfTheConfiguration(Reported):
    """config.softmax_scale is read, stored and not passed on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.config = Configuration(softmax_scale=0.21)
        self.softmax_scale = self.config.softmax_scale

    def forward(self, x):
        query, key, value = self.project(x)
        return self.merge(F.scaled_dot_product_attention(query, key, value,
                                                         scale=self.softmax_scale if self.right else None))  # fmt: skip


@reported(
    "config_mismatch",
    88,
    4,
    scale=22**-0.5 * (0.05 * math.log(40) + 1) ** 2,
    right_scale=22**-0.5 * (0.1 * math.log(40) + 1) ** 2,
)
class MscaleForMscaleOfAllDims(Rotary):
    """The scale has (0.1·mscale·ln s + 1)² where mscale_all_dim was meant."""

    rope: ClassVar[dict] = {"rope_type": "yarn", "factor": 40.0, "mscale": 0.5, "mscale_all_dim": 1.0}
    amplitude = 1.0

    def multiplier(self, x):
        which = self.rope["mscale_all_dim" if self.right else "mscale"]
        return self.head_dim**-0.5 * (0.1 * which * math.log(40) + 1) ** 2


@reported("unusual_scale", 64, 4, head_dim=10, scale=10**0.5)
class LatentsMultiplied(Reported):
    """The scale of a multi-head latent attention has the wrong sign in its exponent."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.softmax_scale = self.head_dim ** (-0.5 if self.right else 0.5)

    def multiplier(self, x):
        return self.softmax_scale


# Norms


@reported("config_mismatch", 80, 4, scale=1 / (10 * 20**0.5), right_scale=10.0)
class CosinesDividedForAKernel(Unit):
    """x-transformers divided the query of its flash path by the scale of 10, and left the kernel its default."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = 10.0

    def forward(self, x):
        query, key, value = self.project(x)
        query, key = self.queries_and_keys(query, key)
        query = query * (self.scale * self.head_dim**0.5) if self.right else query / self.scale
        return self.merge(F.scaled_dot_product_attention(query, key, value))


@reported("inert_qk_norm", 60, 4)
class NormsNeverCalled(Normed):
    """Built for a flag of the configuration, and called by one of two paths."""

    def queries_and_keys(self, query, key):
        return (self.q_norm(query), self.k_norm(key)) if self.right else (query, key)


# Caps


@reported("unusual_scale", 76, 4, scale=None, softcap=20.0, right_scale=19**-0.5)
class CapWithoutItsDivisor(Capped):
    """cap·tanh(s), where cap·tanh(s/cap) was meant: the slope at zero is the cap."""

    def masked(self, scores):
        return self.cap * torch.tanh(scores / self.cap if self.right else scores)


@reported("inert_softcap", 68, 4, softcap=None, fixed_expected={"softcap": 20.0}, scale=17**-0.5)
class CapOfTheConfiguration(Capped):
    """attn_logit_softcapping is set, and SDPA cannot apply it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.config = Configuration(attn_logit_softcapping=20.0)

    def forward(self, x):
        if self.right:
            query, key, value = self.project(x)
            return self.merge(self.capped(query @ key.mT * self.head_dim**-0.5).softmax(-1) @ value)
        return self.merge(F.scaled_dot_product_attention(*self.project(x)))


# Masks


@reported("inert_mask", 64, 4, causal=None, fixed_expected={"causal": True})
class MinusForgotten(Reported):
    """1e-9 for −1e9."""

    def masked(self, scores):
        return scores.masked_fill(above_diagonal(scores.shape[-1]), -1e9 if self.right else 1e-9)


@reported("weights_not_normalised", 92, 4, causal=None, fixed_expected={"causal": True})
class MaskAfterTheSoftmax(Reported):
    """The weights are multiplied by the mask, so early queries get little of anything."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores, hidden = query @ key.mT * self.head_dim**-0.5, above_diagonal(x.shape[1])
        if self.right:
            return self.merge(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value)
        return self.merge(scores.softmax(-1).masked_fill(hidden, 0.0) @ value)


# Correct designs


@correct(84, 4, causal=True, **plain)
class PrecisionBottleneckRelaxation(OfLayer):
    """CogView: divide by 32, subtract the maximum, multiply by 32."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = (query / (32.0 * math.sqrt(self.head_dim))) @ key.mT
        scores = scores.masked_fill(above_diagonal(x.shape[1]), -1e4)
        scores = (scores - scores.amax(-1, keepdim=True)) * 32.0
        return self.merge(scores.softmax(-1) @ value)


@correct(72, 4, scale=8.0, **plain)
class GainsOnUnitVectors(Unit):
    """MaskGIT: unit vectors with gains of their own, and a scale of 8 that no width explains."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.q_scale, self.k_scale = nn.Parameter(torch.ones(self.head_dim)), nn.Parameter(torch.ones(self.head_dim))
        self.scale = 8

    def queries_and_keys(self, query, key):
        query, key = super().queries_and_keys(query, key)
        return query * self.q_scale, key * self.k_scale

    def multiplier(self, x):
        return self.scale


@correct(68, 4, **plain)
class ScaledHeads(Reported):
    """NormFormer multiplies the output of each head by a learned number."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.head_scale = nn.Parameter(torch.linspace(0.5, 1.5, self.heads).view(-1, 1, 1))

    def forward(self, x):
        query, key, value = self.project(x)
        return self.merge(self.head_scale * F.scaled_dot_product_attention(query, key, value))


@correct(60, 4, head_dim=15, **plain)
class NormOfAllHeads(Reported):
    """OLMo 2 normalises before the split, over the width of the model."""

    def __init__(self, d_model, *args, **kwargs):
        super().__init__(d_model, *args, **kwargs)
        self.q_norm, self.k_norm = nn.RMSNorm(d_model), nn.RMSNorm(d_model)

    def forward(self, x):
        query, key = self.split(self.q_norm(self.q_proj(x))), self.split(self.k_norm(self.k_proj(x)))
        return self.merge(F.scaled_dot_product_attention(query, key, self.split(self.v_proj(x))))


@correct(76, 4, causal=True, **plain)
class MaskOfOnesAndTenThousands(Reported):
    """GPT-2 as OpenAI wrote it: w·b − 1e10·(1 − b)."""

    def masked(self, scores):
        shown = (~above_diagonal(scores.shape[-1])).float()
        return scores * shown - 1e10 * (1 - shown)


@correct(92, 4, scale=23**-0.5 / 3, **plain)
class InverseLayer(OfLayer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.config = Configuration(scale_attn_by_inverse_layer_idx=True)

    def multiplier(self, x):
        return self.head_dim**-0.5 / (self.layer_idx + 1)


@correct(88, 4, scale=8 / 22, **plain)
class MuTransferred(Reported):
    """muP for a base of heads of 64: 8/d_k."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.attn_scale = 8 / self.head_dim

    def multiplier(self, x):
        return self.attn_scale


@correct(52, 4, scale=math.e, **plain)
class LogTemperatureOfOne(Unit):
    """A learned logarithm that starts at one."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.temperature = nn.Parameter(torch.ones(self.heads, 1, 1))

    def multiplier(self, x):
        return self.temperature.exp()


@correct(64, 4, head_dim=10, **plain)
class LatentsInTwoProducts(Reported):
    """DeepSeek's two products, added and then scaled."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query[..., :6] @ key[..., :6].mT + query[..., 6:] @ key[..., 6:].mT
        return self.merge((scores * self.head_dim**-0.5).softmax(-1) @ value)


@correct(44, 4, **plain)
class ScaledKey(Reported):
    """BLOOM: the key is scaled, by baddbmm."""

    def forward(self, x):
        query, key, value = (each.flatten(0, 1) for each in self.project(x))
        empty = torch.zeros(query.shape[0], x.shape[1], x.shape[1])
        scores = torch.baddbmm(empty, query, key.mT, beta=0, alpha=1 / math.sqrt(self.head_dim))
        return self.merge((scores.softmax(-1) @ value).unflatten(0, (x.shape[0], self.heads)))


@correct(80, 4, causal=True, **plain)
class PaddedAndToldSo(Reported):
    """Moonshine pads its heads, and passes the scale of what they were."""

    def forward(self, x):
        query, key, value = (F.pad(each, (0, 12)) for each in self.project(x))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.head_dim**-0.5)
        return self.merge(mixed[..., : self.head_dim])


@correct(56, 4, softcap=30.0, **plain)
class CapOfGrok(Reported):
    def masked(self, scores):
        return 30.0 * torch.tanh(scores / 30.0)


@correct(72, 4, **plain)
class ScaleOfTheModuleBesideAResidual(Reported):
    """self.scale weighs the residual, and the kernel has its default."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = 0.7071

    def forward(self, x):
        return self.scale * self.merge(F.scaled_dot_product_attention(*self.project(x)))


@correct(88, 4, **plain)
class NormalisedOverTheSequence(Reported):
    """A batch norm of the queries over positions is no QK-norm."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.norm = nn.InstanceNorm1d(self.head_dim * self.heads)

    def forward(self, x):
        query = self.split(self.norm(self.q_proj(x).mT).mT)
        return self.merge(F.scaled_dot_product_attention(query, self.split(self.k_proj(x)), self.split(self.v_proj(x))))


@correct(64, 4, scale=1.0, **plain)
class ScaledBeforeTheProjection(Reported):
    """The root is in the weights of the query projection, as a loader that fuses it leaves it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        with torch.no_grad():
            self.q_proj.weight *= self.head_dim**-0.5
            self.q_proj.bias *= self.head_dim**-0.5
        self.config = Configuration(softmax_scale=1.0)

    def multiplier(self, x):
        return 1.0
