"""The shapes queries, keys and values come in, and the ways heads are split from them."""

import torch
from torch import nn

from .bases import Bare, Block, Divided, HeadsLast, SelfAttention, note
from .entry import Expected, correct, enter


class Projected(SelfAttention):
    """Projections of its own; a subclass makes them."""

    def __init__(self, d_model, heads, head_dim, kv_heads=None):
        nn.Module.__init__(self)
        self.d_model, self.heads, self.head_dim = d_model, heads, head_dim
        self.add_parts()


class Fused(Projected):
    """One projection for query, key and value."""

    def add_parts(self):
        width = self.heads * self.head_dim
        self.qkv, self.out_proj = nn.Linear(self.d_model, 3 * width, bias=False), nn.Linear(width, self.d_model)


@correct(33, 3, step="project", base=Fused)
def three_heads_dim(self, x):
    """view(batch, length, 3, heads, head_dim), as in vision transformers."""
    qkv = self.qkv(x).reshape(*x.shape[:2], 3, self.heads, self.head_dim)
    return qkv.permute(2, 0, 3, 1, 4).unbind(0)


@correct(39, 3, step="project", base=Fused)
def heads_three_dim(self, x):
    """view(batch, length, heads, 3 · head_dim): interleaved by head, as in GPT-NeoX."""
    qkv = self.qkv(x).view(*x.shape[:2], self.heads, 3 * self.head_dim)
    return [x.permute(0, 2, 1, 3) for x in qkv.chunk(3, dim=-1)]


@correct(51, 3, step="project", base=Fused)
def heads_dim_three(self, x):
    """view(batch, length, heads, head_dim, 3): interleaved by component."""
    qkv = self.qkv(x).unflatten(-1, (self.heads, self.head_dim, 3)).transpose(1, 2)
    return qkv[..., 0], qkv[..., 1], qkv[..., 2]


@correct(57, 3, step="project", base=Fused)
def split(self, x):
    """split along the last axis, as in GPT-2."""
    parts = self.qkv(x).split(self.heads * self.head_dim, dim=2)
    return [part.view(*x.shape[:2], self.heads, self.head_dim).swapaxes(1, 2) for part in parts]


@correct(46, 2, step="project", base=Fused)
def sliced(self, x):
    qkv, width = self.qkv(x), self.heads * self.head_dim
    parts = qkv[..., :width], qkv[..., width : 2 * width], qkv[..., 2 * width :]
    return [torch.movedim(part.unflatten(2, (self.heads, -1)), 2, 1) for part in parts]


@correct(38, 2, head_dim=23, step="project", base=Fused)
def wider_than_the_model(self, x):
    """heads · head_dim is not d_model."""
    return [part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).tensor_split(3, dim=-1)]


@correct(57, 3, step="split", base=Divided)
def strided_heads(self, x, heads=None):
    """Heads interleaved: view(batch, length, head_dim, heads)."""
    return x.unflatten(-1, (self.head_dim, self.heads)).permute(0, 3, 1, 2)


@correct(33, 3, shape=(13, 2, 33))
class LengthFirst(SelfAttention):
    """(length, batch, d_model), heads folded into the batch, as in fairseq."""

    def split(self, x, heads=None):
        length, batch, _ = x.shape
        return x.contiguous().view(length, batch * self.heads, self.head_dim).transpose(0, 1)

    def attend(self, query, key, value):
        scores = torch.bmm(query * self.head_dim**-0.5, key.transpose(1, 2))
        note(self, scores, "nqk")
        return torch.bmm(nn.functional.softmax(scores, dim=-1), value)

    def merge(self, x):
        return self.out_proj(x.transpose(0, 1).reshape(x.shape[1], -1, self.d_model))


@correct(33, 3, shape=(13, 2, 33))
class LengthFirstFourAxes(HeadsLast):
    """(length, batch, heads, head_dim), softmax over axis 1, as in Transformer-XL."""

    scored, mixed, axis, layout = "ibnd,jbnd->ijbn", "ijbn,jbnd->ibnd", 1, "qkbh"

    def scale_product(self, product):
        return product.mul_(self.head_dim**-0.5)


@correct(39, 3)
class WeightsByHead(Projected, Divided):
    """No Linear: parameters of (heads, d_model, head_dim) and an einsum."""

    def add_parts(self):
        width, shape = self.d_model, (self.heads, self.d_model, self.head_dim)
        self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.randn(shape) * width**-0.5) for _ in range(3))
        self.w_o = nn.Parameter(torch.randn(self.heads, self.head_dim, width) * width**-0.5)

    def project(self, x):
        return [torch.einsum("bnm,hmd->bhnd", x, w) for w in (self.w_q, self.w_k, self.w_v)]

    def product(self, query, key):
        return torch.einsum("bhqd,bhkd->bhqk", query, key)

    def mix(self, weights, value):
        return torch.einsum("bhqk,bhkd,hdm->bqm", weights, value, self.w_o)

    def merge(self, x):
        return x


@correct(35, 5)
class HeadByHead(Projected, Divided):
    """A Linear for each head, stacked."""

    def add_parts(self):
        self.q, self.k, self.v = (
            nn.ModuleList(nn.Linear(self.d_model, self.head_dim) for _ in range(self.heads)) for _ in range(3)
        )
        self.out_proj = nn.Linear(self.heads * self.head_dim, self.d_model)

    def project(self, x):
        return [torch.stack([p(x) for p in ps], dim=1) for ps in (self.q, self.k, self.v)]


class Convolved(Projected):
    """1 × 1 convolutions on images, heads from the channels."""

    def add_parts(self):
        width = self.heads * self.head_dim
        self.to_qkv, self.to_out = nn.Conv2d(self.d_model, 3 * width, 1, bias=False), nn.Conv2d(width, self.d_model, 1)


class ScaledInChannels(Convolved):
    """(batch, heads, head_dim, height · width), 'bhdi,bhdj->bhij', the query scaled."""

    def forward(self, x):
        query, key, value = (y.unflatten(1, (self.heads, -1)).flatten(3) for y in self.to_qkv(x).chunk(3, dim=1))
        query = query * self.head_dim**-0.5
        scores = torch.einsum("bhdi,bhdj->bhij", query, key)
        note(self, scores)
        mixed = torch.einsum("bhij,bhdj->bhdi", scores.softmax(dim=-1), value)
        return self.to_out(mixed.flatten(1, 2).unflatten(-1, x.shape[-2:]))


class OneHeadOfChannels(Convolved):
    """A diffusion model's block: one head, bmm, the scale from the number of channels."""

    def forward(self, x):
        query, key, value = self.to_qkv(x).chunk(3, dim=1)
        query, key, value = query.flatten(2).permute(0, 2, 1), key.flatten(2), value.flatten(2)
        scores = torch.bmm(query, key) * (int(key.shape[1]) ** (-0.5))
        note(self, scores, "bqk")
        mixed = torch.bmm(value, torch.softmax(scores, dim=2).permute(0, 2, 1))
        return self.to_out(mixed.unflatten(2, x.shape[-2:]))


for cls, d_model, heads in (ScaledInChannels, 33, 3), (OneHeadOfChannels, 23, 1):
    head_dim = d_model // heads

    def make(cls=cls, d_model=d_model, heads=heads, head_dim=head_dim):
        block = Block(d_model, cls(d_model, heads, head_dim))
        block.norm = nn.GroupNorm(1, d_model)  # (batch, channels, height, width)
        return block, (torch.randn(2, d_model, 3, 5),)

    enter(f"layouts.{cls.__name__}", make, {"attention": Expected(heads, head_dim, head_dim**-0.5, heads)})


@correct(39, 3)
class LearnedQueries(SelfAttention):
    """Seven queries that are parameters, for every element of the batch: a resampler."""

    def add_parts(self):
        self.latents = nn.Parameter(torch.randn(7, 39))

    def project(self, x):
        query = self.split(self.q_proj(self.latents).expand(x.shape[0], -1, -1))
        return query, self.split(self.k_proj(x)), self.split(self.v_proj(x))

    def merge(self, x):
        return super().merge(x).mean(1, keepdim=True)


@correct(38, 2)
class QueryIsAParameter(Divided):
    """Pooling by one query that never passed a projection."""

    def add_parts(self):
        self.query = nn.Parameter(torch.randn(1, self.heads, 1, self.head_dim))
        del self.q_proj

    def project(self, x):
        return self.query, self.split(self.k_proj(x)), self.split(self.v_proj(x))


@correct(51, 3, tolerance=4e-3)
class HalfPrecision(SelfAttention):
    """bfloat16 throughout, softmax in float32."""

    def add_parts(self):
        self.to(torch.bfloat16)

    def project(self, x):
        return super().project(x.to(torch.bfloat16))

    def weigh(self, scores):
        return scores.float().softmax(-1).to(torch.bfloat16)

    def merge(self, x):
        return super().merge(x).to(torch.float32)


@correct(57, 3)
class LowRankUpdate(SelfAttention):
    """A projection and its low-rank update, whose multiplier is no scale of the scores."""

    def add_parts(self):
        self.down, self.up = nn.Linear(57, 4, bias=False), nn.Linear(4, 57, bias=False)

    def project(self, x):
        query = self.split(self.q_proj(x) + self.up(self.down(x)) * 2.0)
        return query, self.split(self.k_proj(x)), self.split(self.v_proj(x))


@correct(51, 3)
class PositionsAdded(Bare):
    """DETR's: positions join queries and keys before their projections, and not the values."""

    def project(self, x):
        placed = x + torch.linspace(-1, 1, x.shape[1])[:, None]
        return self.split(self.q_proj(placed)), self.split(self.k_proj(placed)), self.split(self.v_proj(x))

    def product(self, query, key):
        return query.mul(self.head_dim**-0.5).matmul(key.mT)


@correct(46, 2)
class WeightNormed(SelfAttention):
    """Projections whose weights are made anew at every call."""

    def add_parts(self):
        for projection in (self.q_proj, self.k_proj):
            nn.utils.parametrizations.weight_norm(projection)


@correct(69, 3)
class GatedOutput(SelfAttention):
    """Each head's output times a sigmoid of the input, and the value damped by a constant."""

    def add_parts(self):
        self.gate = nn.Linear(69, 69)

    def forward(self, x):
        query, key, value = self.project(x)
        return self.merge(self.attend(query, key, 0.7 * value) * self.split(torch.sigmoid(self.gate(x))))
