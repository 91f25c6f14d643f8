"""The shapes queries, keys and values come in, and the ways heads are split from them."""

import torch
from torch import nn

from .entry import Entry, Expected, SelfAttention, correct, enter
from .recording import note


class Fused(nn.Module):
    """One projection for query, key and value."""

    def __init__(self, d_model, heads, head_dim=None, kv_heads=None):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.qkv = nn.Linear(d_model, 3 * heads * head_dim, bias=False)
        self.proj = nn.Linear(heads * head_dim, d_model)

    def attend(self, query, key, value):
        """The plain formula on (batch, heads, length, head_dim)."""
        scores = (query @ key.transpose(-2, -1)) * self.head_dim**-0.5
        note(self, scores)
        return self.proj((scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2))


@correct(33, 3)
class ThreeHeadsDim(Fused):
    """view(batch, length, 3, heads, head_dim), as in vision transformers."""

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        return self.attend(*qkv.unbind(0))


@correct(39, 3)
class HeadsThreeDim(Fused):
    """view(batch, length, heads, 3 · head_dim): interleaved by head, as in GPT-NeoX."""

    def forward(self, x):
        qkv = self.qkv(x).view(*x.shape[:2], self.heads, 3 * self.head_dim)
        query, key, value = (x.permute(0, 2, 1, 3) for x in qkv.chunk(3, dim=-1))
        return self.attend(query, key, value)


@correct(51, 3)
class HeadsDimThree(Fused):
    """view(batch, length, heads, head_dim, 3): interleaved by component."""

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (self.heads, self.head_dim, 3)).transpose(1, 2)
        return self.attend(qkv[..., 0], qkv[..., 1], qkv[..., 2])


@correct(57, 3)
class Split(Fused):
    """split along the last axis, as in GPT-2."""

    def forward(self, x):
        width = self.heads * self.head_dim
        parts = self.qkv(x).split(width, dim=2)
        return self.attend(*(part.view(*x.shape[:2], self.heads, self.head_dim).swapaxes(1, 2) for part in parts))


@correct(46, 2)
class Sliced(Fused):
    def forward(self, x):
        width = self.heads * self.head_dim
        qkv = self.qkv(x)
        parts = qkv[..., :width], qkv[..., width : 2 * width], qkv[..., 2 * width :]
        return self.attend(*(torch.movedim(part.unflatten(2, (self.heads, -1)), 2, 1) for part in parts))


@correct(38, 2, head_dim=23)
class WiderThanTheModel(Fused):
    """heads · head_dim is not d_model."""

    def forward(self, x):
        parts = self.qkv(x).tensor_split(3, dim=-1)
        return self.attend(*(part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts))


@correct(57, 3)
class StridedHeads(SelfAttention):
    """Heads interleaved: view(batch, length, head_dim, heads)."""

    def forward(self, x):
        query, key, value = (
            proj(x).unflatten(-1, (self.head_dim, self.heads)).permute(0, 3, 1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = query @ key.mT / self.head_dim**0.5
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value)


@correct(33, 3, shape=(13, 2, 33))
class LengthFirst(SelfAttention):
    """(length, batch, d_model), heads folded into the batch, as in fairseq."""

    def forward(self, x):
        length, batch, _ = x.shape
        query, key, value = (
            proj(x).contiguous().view(length, batch * self.heads, self.head_dim).transpose(0, 1)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = query * self.head_dim**-0.5
        scores = torch.bmm(query, key.transpose(1, 2))
        note(self, scores, "nqk")
        mixed = torch.bmm(nn.functional.softmax(scores, dim=-1), value)
        return self.out_proj(mixed.transpose(0, 1).reshape(length, batch, -1))


@correct(33, 3, shape=(13, 2, 33))
class LengthFirstFourAxes(SelfAttention):
    """(length, batch, heads, head_dim), 'ibnd,jbnd->ijbn', softmax over axis 1, as in Transformer-XL."""

    def forward(self, x):
        query, key, value = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = torch.einsum("ibnd,jbnd->ijbn", query, key).mul_(self.head_dim**-0.5)
        note(self, scores, "qkbh")
        return self.out_proj(torch.einsum("ijbn,jbnd->ibnd", scores.softmax(dim=1), value).flatten(2))


@correct(39, 3)
class WeightsByHead(nn.Module):
    """No Linear: parameters of (heads, d_model, head_dim) and an einsum."""

    def __init__(self, d_model, heads, head_dim, kv_heads=None):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.w_q, self.w_k, self.w_v = (
            nn.Parameter(torch.randn(heads, d_model, head_dim) * d_model**-0.5) for _ in range(3)
        )
        self.w_o = nn.Parameter(torch.randn(heads, head_dim, d_model) * d_model**-0.5)

    def forward(self, x):
        query, key, value = (torch.einsum("bnm,hmd->bhnd", x, w) for w in (self.w_q, self.w_k, self.w_v))
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / self.head_dim**0.5
        note(self, scores)
        return torch.einsum("bhqk,bhkd,hdm->bqm", scores.softmax(-1), value, self.w_o)


@correct(35, 5)
class HeadByHead(nn.Module):
    """A Linear for each head, stacked."""

    def __init__(self, d_model, heads, head_dim, kv_heads=None):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.q, self.k, self.v = (nn.ModuleList(nn.Linear(d_model, head_dim) for _ in range(heads)) for _ in range(3))
        self.proj = nn.Linear(heads * head_dim, d_model)

    def forward(self, x):
        query, key, value = (torch.stack([p(x) for p in ps], dim=1) for ps in (self.q, self.k, self.v))
        scores = query @ key.mT / self.head_dim**0.5
        note(self, scores)
        return self.proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class Convolved(nn.Module):
    """1 × 1 convolutions on images, heads from the channels."""

    def __init__(self, d_model, heads, head_dim, kv_heads=None):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.to_qkv = nn.Conv2d(d_model, 3 * heads * head_dim, 1, bias=False)
        self.to_out = nn.Conv2d(heads * head_dim, d_model, 1)


class Image(nn.Module):
    """A block of a convolutional network: (batch, channels, height, width)."""

    def __init__(self, d_model, attention):
        super().__init__()
        self.norm = nn.GroupNorm(1, d_model)
        self.attention = attention

    def forward(self, x):
        return x + self.attention(self.norm(x))


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
        return Image(d_model, cls(d_model, heads, head_dim)), (torch.randn(2, d_model, 3, 5),)

    enter(Entry(f"layouts.{cls.__name__}", make, {"attention": Expected(heads, head_dim, head_dim**-0.5, heads)}))


@correct(39, 3)
class LearnedQueries(SelfAttention):
    """Seven queries that are parameters, for every element of the batch: a resampler."""

    def add_parts(self):
        self.latents = nn.Parameter(torch.randn(7, 39))

    def forward(self, x):
        query = self.split(self.q_proj(self.latents).expand(x.shape[0], -1, -1))
        key, value = self.split(self.k_proj(x)), self.split(self.v_proj(x))
        scores = query @ key.mT * self.head_dim**-0.5
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value).mean(1, keepdim=True)


@correct(38, 2)
class QueryIsAParameter(SelfAttention):
    """Pooling by one query that never passed a projection."""

    def add_parts(self):
        self.query = nn.Parameter(torch.randn(1, self.heads, 1, self.head_dim))
        del self.q_proj

    def forward(self, x):
        key, value = self.split(self.k_proj(x)), self.split(self.v_proj(x))
        scores = (self.query @ key.transpose(-1, -2)) / self.head_dim**0.5
        note(self, scores)
        return self.merge(torch.softmax(scores, dim=-1) @ value)


@correct(51, 3, tolerance=4e-3)
class HalfPrecision(SelfAttention):
    """bfloat16 throughout, softmax in float32."""

    def add_parts(self):
        self.to(torch.bfloat16)

    def forward(self, x):
        query, key, value = self.project(x.to(torch.bfloat16))
        scores = query @ key.mT * self.head_dim**-0.5
        note(self, scores)
        weights = scores.float().softmax(-1).to(value.dtype)
        return self.merge(weights @ value).to(x.dtype)


@correct(57, 3)
class LowRankUpdate(SelfAttention):
    """A projection and its low-rank update, whose multiplier is no scale of the scores."""

    def add_parts(self):
        self.down, self.up = nn.Linear(57, 4, bias=False), nn.Linear(4, 57, bias=False)

    def forward(self, x):
        query = self.split(self.q_proj(x) + self.up(self.down(x)) * 2.0)
        key, value = self.split(self.k_proj(x)), self.split(self.v_proj(x))
        scores = query @ key.mT * self.head_dim**-0.5
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value)


@correct(51, 3)
class PositionsAdded(SelfAttention):
    """DETR's: positions join queries and keys before their projections, and not the values."""

    def forward(self, x):
        placed = x + torch.linspace(-1, 1, x.shape[1])[:, None]
        query, key, value = self.split(self.q_proj(placed)), self.split(self.k_proj(placed)), self.split(self.v_proj(x))
        scores = query.mul(self.head_dim**-0.5).matmul(key.mT)
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value)


@correct(46, 2)
class WeightNormed(SelfAttention):
    """Projections whose weights are made anew at every call."""

    def add_parts(self):
        for projection in (self.q_proj, self.k_proj):
            nn.utils.parametrizations.weight_norm(projection)

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.mT * self.head_dim**-0.5
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value)


@correct(69, 3)
class GatedOutput(SelfAttention):
    """Each head's output times a sigmoid of the input, and the value damped by a constant."""

    def add_parts(self):
        self.gate = nn.Linear(69, 69)

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.mT * self.head_dim**-0.5
        note(self, scores)
        return self.merge(scores.softmax(-1) @ (0.7 * value) * self.split(torch.sigmoid(self.gate(x))))
