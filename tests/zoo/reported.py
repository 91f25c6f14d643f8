"""Bugs that people reported of real projects, each with its fixed twin: the class with `right` set.

`reported(code, …)` enters both. They are modelled on issues of transformers, x-transformers,
timm, diffusers, vLLM, SGLang, llama.cpp and lecture code, and on ports between them; shapes are our own.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from .bases import Configuration, Divided, Einsum, HeadsLast, SelfAttention, above_diagonal
from .entry import bug, correct


def reported(code, d_model, heads, *, right_scale=..., scale=None, fixed_expected=None, **expected):
    """Enter a class or a step as a bug that gets this code, and its twin as a correct attention."""

    def wrap(design):
        cls = bug(code, d_model, heads, scale=scale, **expected)(design)
        twin = type(f"{cls.__name__}Fixed", (cls,), {"right": True, "__module__": cls.__module__})
        correct(d_model, heads, scale=right_scale, statistics="none", **(expected | (fixed_expected or {})))(twin)
        return cls

    return wrap


# The wrong width


@reported("unusual_scale", 48, 4, head_dim=20, scale=12**-0.5, step="multiplier", kept_as="scale")
def hidden_over_heads_in_an_attribute(self):
    """Gemma and PLaMo have heads wider than hidden/heads; the port computes the scale from those."""
    return (self.head_dim if self.right else self.d_model // self.heads) ** -0.5


@reported("unusual_scale", 60, 4, head_dim=24, kv_heads=2, causal=True, scale=15**-0.5)
class HiddenOverHeadsForAKernel(SelfAttention):
    """By SDPA, with grouped keys, as softmax_scale."""

    def add_parts(self):
        self.softmax_scale = (self.head_dim if self.right else self.d_model // self.heads) ** -0.5

    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )


@reported("unusual_scale", 72, 6, kv_heads=2, scale=36**-0.5)
class HiddenOverKeyHeads(SelfAttention):
    """Divided by the heads of the keys, of which there are fewer."""

    def add_parts(self):
        self.norm_factor = math.sqrt(self.head_dim if self.right else self.d_model / self.kv_heads)

    def attend(self, query, key, value):
        key, value = (each.repeat_interleave(self.heads // self.kv_heads, 1) for each in (key, value))
        return (query @ key.mT / self.norm_factor).softmax(-1) @ value


@reported("scaled_by_model_dim", 44, 4, scale=44**-0.5, step="multiplier", kept_as="scale")
def dim_for_dim_head(self):
    """Lecture code: dim ** -0.5, where dim_head was meant, kept as an attribute."""
    return (self.head_dim if self.right else self.d_model) ** -0.5


@reported("scaled_by_model_dim", 52, 4, scale=52**-0.5)
class SetTransformer(SelfAttention):
    """A multihead attention block over sets divides by √dim_V, the width of all heads."""

    def forward(self, x):
        heads = [torch.cat(p(x).split(self.head_dim, 2), 0) for p in (self.q_proj, self.k_proj, self.v_proj)]
        query, key, value = heads
        width = self.head_dim if self.right else self.heads * self.head_dim
        mixed = torch.softmax(query.bmm(key.transpose(1, 2)) / math.sqrt(width), 2).bmm(value)
        return self.out_proj(torch.cat((query + mixed).split(x.size(0), 0), 2))


@reported("unusual_scale", 92, 4, scale=23**-0.25)
class FourthRootOfOneSide(SelfAttention):
    """A diffusion U-Net gives d^-¼ to query and key; here the key was forgotten."""

    def prepare(self, query, key):
        scale = 1 / math.sqrt(math.sqrt(self.head_dim))
        return query * scale, key * scale if self.right else key

    def multiplier(self):
        return 1.0


@reported("scaled_by_dim", 76, 4, scale=1 / 19)
class RootOnBothSides(Einsum):
    """d^-½ where each side should get d^-¼."""

    def add_parts(self):
        self.scale = self.head_dim ** (-0.25 if self.right else -0.5)

    def product(self, query, key):
        return torch.einsum("bhqd,bhkd->bhqk", query * self.scale, key * self.scale)

    def scale_product(self, product):
        return product.float()


@reported("unusual_scale", 84, 4, scale=21**0.5, step="multiplier")
def multiplied_by_the_root(self):
    return 1 / math.sqrt(self.head_dim) if self.right else math.sqrt(self.head_dim)


@reported("unusual_scale", 88, 4, scale=11**-0.5, step="multiplier", kept_as="scaling")
def half_the_width(self):
    """The width of the rotated half."""
    return (self.head_dim if self.right else self.head_dim // 2) ** -0.5


# Applied twice, or not at all


@reported("scaled_by_dim", 88, 4, scale=1 / 22, causal=True)
class ScaledQueryForAKernel(SelfAttention):
    """OPT and BART scale the query; the port calls SDPA, which scales again."""

    def add_parts(self):
        self.scaling = self.head_dim**-0.5

    def attend(self, query, key, value):
        scale = 1.0 if self.right else None
        return F.scaled_dot_product_attention(query * self.scaling, key, value, is_causal=True, scale=scale)


@reported("unscaled", 80, 4, scale=1.0, causal=True)
class ScaleLostInAPort(SelfAttention):
    """SDPA(scale=1.0) was kept, and the scaling of the query dropped."""

    def prepare(self, query, key):
        return query * self.head_dim**-0.5 if self.right else query, key

    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)


@reported("scale_after_softmax", 64, 4, scale=1.0, step="attend")
def scaled_weights(self, query, key, value):
    """softmax(q·k)/√d."""
    if self.right:
        weights = torch.softmax(query @ key.mT / self.head_dim**0.5, dim=-1)
    else:
        weights = torch.softmax(query @ key.mT, dim=-1) / self.head_dim**0.5
    return weights @ value


# What the configuration or the module asks for


@reported("config_mismatch", 76, 4, right_scale=0.11, step="attend", config=Configuration(attention_multiplier=0.11))
def attention_multiplier_ignored(self, query, key, value):
    """Granite's attention_multiplier, and a kernel with its default."""
    scale = self.config.attention_multiplier if self.right else None
    return F.scaled_dot_product_attention(query, key, value, scale=scale)


@reported("config_mismatch", 92, 4, scale=31**-1.0, right_scale=31**-0.5)
class ScalarWithoutItsRoot(SelfAttention):
    """Gemma 2's query_pre_attn_scalar is the square of a divisor."""

    config = Configuration(query_pre_attn_scalar=31)

    def multiplier(self):
        return self.config.query_pre_attn_scalar ** (-0.5 if self.right else -1)


@reported("config_mismatch", 72, 4, right_scale=0.31)
class FusedForgetsTheScale(SelfAttention):
    """timm's: the fused path takes the default, the other self.scale."""

    scale, fused_attn = 0.31, True

    def attend(self, query, key, value):
        if self.fused_attn:
            scale = self.scale if self.right else None
            return F.scaled_dot_product_attention(query, key, value, scale=scale)
        return (query * self.scale @ key.mT).softmax(-1) @ value


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Rotary(SelfAttention):
    """Rotary embedding whose table is multiplied by `amplitude`, of a context stretched by YaRN."""

    rope: ClassVar[dict] = {"rope_type": "yarn", "factor": 40.0}

    def add_parts(self):
        self.config = Configuration(rope_parameters=self.rope)

    @property
    def stretch(self):
        return 0.1 * self.rope.get("mscale_all_dim", 1.0) * math.log(self.rope["factor"]) + 1

    def rotated(self, x, amplitude):
        angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** -torch.linspace(0, 1, x.shape[-1] // 2)
        angles = torch.cat((angles, angles), -1)
        return x * (angles.cos() * amplitude) + rotate_half(x) * (angles.sin() * amplitude)

    def prepare(self, query, key):
        return self.rotated(query, self.amplitude), self.rotated(key, self.amplitude)


@reported("config_mismatch", 88, 4)
class YarnWithoutItsFactor(Rotary):
    """Frequencies are stretched; neither the table nor the scale is multiplied."""

    @property
    def amplitude(self):
        return self.stretch if self.right else 1.0


@reported("config_mismatch", 72, 4, right_scale=18**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
class MscaleOfAllDimsMissing(Rotary):
    """DeepSeek's mscale_all_dim belongs into the softmax's scale; its table has amplitude one."""

    rope: ClassVar[dict] = {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}
    amplitude = 1.0

    def multiplier(self):
        return self.head_dim**-0.5 * (self.stretch**2 if self.right else 1.0)


@reported("config_mismatch", 56, 4)
class MscaleTwice(Rotary):
    """In the table and in the scale."""

    @property
    def amplitude(self):
        return self.stretch

    def multiplier(self):
        return self.head_dim**-0.5 * (1.0 if self.right else self.stretch**2)


@reported("config_mismatch", 64, 4, head_dim=10, seen_dim=28, kv_heads=1, scale=28**-0.5, right_scale=10**-0.5)
class AbsorbedLatents(SelfAttention):
    """Multi-head latent attention with its key projection absorbed: 24 latents and 4 rotary features are dotted.

    The scale is still that of a head before it was absorbed: 1/√(6 + 4).
    """

    config = Configuration(qk_nope_head_dim=6, qk_rope_head_dim=4, kv_lora_rank=24)

    def add_parts(self):
        self.latent = nn.Linear(self.d_model, 24 + 4)
        self.key_up = nn.Parameter(torch.randn(self.heads, 6, 24) * 24**-0.5)

    def forward(self, x):
        plain, rotary = self.split(self.q_proj(x)).split((6, 4), -1)
        key = self.latent(x)[:, None]
        query = torch.cat((torch.einsum("bhqd,hdc->bhqc", plain, self.key_up), rotary), -1)
        scores = query @ key.mT * (10 if self.right else 28) ** -0.5
        return self.merge(scores.softmax(-1) @ self.split(self.v_proj(x), 1))


# Masks and caps


class Capped(SelfAttention):
    """A soft-cap of 20."""

    cap = 20.0

    def capped(self, scores):
        return self.cap * torch.tanh(scores / self.cap)


@reported("inert_mask", 52, 4, causal=None, softcap=20.0, fixed_expected={"causal": True}, step="adjust", base=Capped)
def cap_after_the_mask(self, scores):
    """−inf becomes −20, which is a score."""
    hidden = above_diagonal(scores.shape[-1])
    if self.right:
        return self.capped(scores).masked_fill(hidden, -torch.inf)
    return self.capped(scores.masked_fill(hidden, -torch.inf))


@reported("inert_mask", 60, 4, causal=None, softcap=20.0, fixed_expected={"causal": True}, step="adjust", base=Capped)
def cap_after_the_added_mask(self, scores):
    """The mask is added, as large negative numbers."""
    mask = above_diagonal(scores.shape[-1]).float() * -1e9
    return self.capped(scores) + mask if self.right else self.capped(scores + mask)


@reported("inert_softcap", 68, 4, softcap=None, fixed_expected={"softcap": 20.0}, step="adjust", base=Capped)
def scores_for_the_cap(self, scores):
    """x·tanh(x/cap) has no bound."""
    return (self.cap if self.right else scores) * torch.tanh(scores / self.cap)


@reported("inert_softcap", 76, 4, softcap=None, fixed_expected={"softcap": 20.0})
class CapOfAnotherName(Capped):
    """The soft-cap is set, and the eager code does not know it."""

    attn_logit_softcapping = 20.0

    def adjust(self, scores):
        return self.capped(scores) if self.right else scores


# The wrong axis

swapped = dict(scale=..., **dict.fromkeys(("seen_heads", "seen_dim", "kv_heads", "calls")))


@reported("softmax_wrong_axis", 48, 4, **swapped)
class OverQueries(Divided, HeadsLast):
    """Scores (batch, queries, keys, heads), over axis 1."""

    scored, mixed = "bqhd,bkhd->bqkh", "bqkh,bkhd->bqhd"

    @property
    def axis(self):
        return 2 if self.right else 1


@reported("softmax_wrong_axis", 56, 4, **swapped)
class OverQueriesLast(Divided, HeadsLast):
    """Scores (batch, heads, keys, queries), and the habit of dim=-1."""

    scored, mixed = "bqhd,bkhd->bhkq", "bhkq,bkhd->bqhd"

    @property
    def axis(self):
        return 2 if self.right else -1
