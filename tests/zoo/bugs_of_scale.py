"""Scores multiplied by the wrong number."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .bases import Block, Configuration, Divided, Kernel, SelfAttention, above_diagonal
from .entry import Expected, bug, enter
from .structures import ManyHeads


@bug("scaled_by_model_dim", 33, 3, scale=33**-0.5, step="multiplier")
@bug("scaled_by_model_dim", 51, 3, scale=51**-0.5, init=1.0, step="multiplier")
def root_of_the_model(self):
    """√d_model."""
    return self.d_model**-0.5


@bug("scaled_by_model_dim", 35, 5, scale=35**-0.5, causal=True)
class RootOfTheEmbedding(SelfAttention):
    """The tutorial's: einsum, −1e20, and softmax(energy / embed_size ** (1/2), dim=3)."""

    def forward(self, x):
        query, key, value = (
            p(x).reshape(*x.shape[:2], self.heads, -1) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        energy = torch.einsum("nqhd,nkhd->nhqk", [query, key])
        energy = energy.masked_fill(above_diagonal(x.shape[1]), float("-1e20"))
        weights = torch.softmax(energy / (x.shape[-1] ** (1 / 2)), dim=3)
        return self.out_proj(torch.einsum("nhql,nlhd->nqhd", [weights, value]).flatten(2))


@bug("scaled_by_model_dim", 57, 3, scale=57**-0.5)
class BeforeTheSplit(SelfAttention):
    """The dimension read from the query while it still holds all heads."""

    def forward(self, x):
        query = self.q_proj(x)
        scale = query.size(-1) ** -0.5
        query, key, value = self.split(query), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        return self.merge(F.scaled_dot_product_attention(query, key, value, scale=scale))


@bug("scaled_by_model_dim", 39, 3, head_dim=17, scale=51**-0.5)
class RootOfAllHeads(SelfAttention):
    """√(heads · head_dim), where that is not d_model."""

    def forward(self, x):
        query, key, value = (x.transpose(0, 1).flatten(1, 2) for x in self.project(x))
        scores = torch.bmm(query, key.mT) / math.sqrt(self.heads * self.head_dim)
        mixed = torch.bmm(scores.softmax(-1), value).unflatten(1, (x.shape[0], -1)).transpose(0, 1)
        return self.merge(mixed)


class CarelessHead(nn.Module):
    """A lecture's: one head that scales by the width of its input."""

    def __init__(self, d_model, head_dim):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(d_model, head_dim, bias=False) for _ in range(3))

    def forward(self, x):
        channels = x.shape[-1]
        scores = self.query(x) @ self.key(x).transpose(-2, -1) * channels**-0.5
        scores = scores.masked_fill(above_diagonal(x.shape[1]), float("-inf"))
        return F.softmax(scores, dim=-1) @ self.value(x)


enter(
    "bugs_of_scale.CarelessHeads",
    lambda: (Block(44, ManyHeads(44, 4, 11, head=CarelessHead)), (torch.randn(2, 13, 44),)),
    {f"attention.heads.{index}": Expected(1, 11, 44**-0.5, 1, causal=True) for index in range(4)},
    code="scaled_by_model_dim",
)


@bug("scaled_by_dim", 33, 3, scale=1 / 11, step="multiplier")
@bug("scaled_by_dim", 69, 3, scale=1 / 23, init=1.0, step="multiplier")
def no_root(self):
    """d_k for √d_k."""
    return 1 / self.head_dim


@bug("scaled_by_dim", 39, 3, scale=1 / 13, step="prepare", base=Divided)
def query_and_scores(self, query, key):
    """Scaled twice: the query by hand, and the scores again."""
    return query * self.head_dim**-0.5, key


@bug("scaled_by_dim", 51, 3, scale=1 / 17, step="attend")
def query_and_kernel(self, query, key, value):
    """Scaled twice: the query by hand, and by the kernel that does so itself."""
    return F.scaled_dot_product_attention(query / self.head_dim**0.5, key, value)


@bug("scaled_by_dim", 46, 2, scale=1 / 23, step="attend")
def query_and_key(self, query, key, value):
    """Scaled twice: both by √d, where each should get its fourth root."""
    scores = torch.einsum("bhqd,bhkd->bhqk", query / self.head_dim**0.5, key / self.head_dim**0.5)
    return scores.softmax(-1) @ value


@bug("unscaled", 96, 3, scale=1.0, step="multiplier")
@bug("unscaled", 51, 3, scale=1.0, init=1.0, step="multiplier")
def unscaled(self):
    return 1.0


@bug("unscaled", 93, 3, scale=1.0, step="scale_product")
def no_multiplication(self, product):
    """Not even a multiplication by one."""
    return product


@bug("unscaled", 57, 3, scale=1.0, init=1.0, step="attend")
def kernel_told_one(self, query, key, value):
    """SDPA(scale=1.0), and nobody scaled before."""
    return F.scaled_dot_product_attention(query, key, value, scale=1.0)


@bug("unscaled", 69, 3, scale=1.0, init=1.0)
class BiasScaledInstead(SelfAttention):
    """Brackets in the wrong place: q·k + bias/√d."""

    def add_parts(self):
        self.bias = nn.Parameter(torch.randn(self.heads, 13, 13))

    def scale_product(self, product):
        return product + self.bias / math.sqrt(self.head_dim)


@bug("unusual_scale", 33, 3, scale=11**0.5, step="multiplier")
def multiplied(self):
    """√d on the wrong side of the fraction."""
    return self.head_dim**0.5


@bug("unusual_scale", 39, 3, scale=0.05, step="multiplier")
def any_number(self):
    """A number that nothing in the model explains."""
    return 0.05


@bug("unusual_scale", 57, 3)
class BiasScaledToo(SelfAttention):
    """(q·k + bias)/√d: the bias gets the scale that was meant for the product."""

    def add_parts(self):
        self.relative = nn.Parameter(torch.randn(self.heads, 13, 13))

    def scale_product(self, product):
        return (product + self.relative) / math.sqrt(self.head_dim)


@bug("config_mismatch", 46, 2)
class KernelIgnoresTheAttribute(SelfAttention):
    """A scale of one's own, which only the slow path knows."""

    scale, fused = 0.35, True

    def attend(self, query, key, value):
        if self.fused:
            return F.scaled_dot_product_attention(query, key, value)
        return (query * self.scale @ key.mT).softmax(-1) @ value


@bug("config_mismatch", 69, 3)
class KernelIgnoresTheConfiguration(Kernel):
    """query_pre_attn_scalar says 60, the code divides by √d."""

    config = Configuration(query_pre_attn_scalar=60, num_attention_heads=3)


@bug("unusual_scale", 69, 3, scale=3**-0.5, step="multiplier")
def root_of_the_heads(self):
    """√heads for √d_k."""
    return self.heads**-0.5


@bug("unusual_scale", 57, 3, scale=13**-0.5, step="attend")
def root_of_the_length(self, query, key, value):
    """The wrong axis of the key: its length."""
    key = key.transpose(-2, -1)
    return (query @ key / math.sqrt(key.size(-1))).softmax(-1) @ value
