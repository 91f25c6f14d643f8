"""Positions, in the queries and keys or in the scores."""

import torch
import torch.nn.functional as F
from torch import nn

from .bases import Bare, Block, Causal, Divided, SelfAttention, above_diagonal, note
from .entry import Expected, correct, enter
from .fused import sdpa


def angles(length, dim):
    """(length, dim / 2): position times frequency."""
    return torch.arange(length)[:, None] * 100.0 ** (-torch.arange(0, dim, 2) / dim)


def rotate_halves(x):
    """Components i and i + dim/2 turn together, as in NeoX and Llama."""
    cos, sin = (f(angles(x.shape[-2], x.shape[-1])).repeat(1, 2) for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotate_pairs(x):
    """Components 2i and 2i + 1 turn together, as complex numbers."""
    turns = torch.polar(torch.ones(()), angles(x.shape[-2], x.shape[-1]))
    return torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * turns).flatten(-2)


class Rotary(SelfAttention):
    def prepare(self, query, key):
        return self.rotate(query), self.rotate(key)

    def attend(self, query, key, value):
        return sdpa(self, query, key, value, is_causal=True)


@correct(42, 3, causal=True, step="rotate", base=Rotary)
def rotary_halves(self, x):
    return rotate_halves(x)


@correct(66, 3, causal=True, step="rotate", base=Rotary)
def rotary_complex(self, x):
    return rotate_pairs(x)


@correct(54, 3, causal=True, step="rotate", base=Rotary)
def rotary_partial(self, x):
    """Only the first ten components turn."""
    return torch.cat([rotate_halves(x[..., :10]), x[..., 10:]], dim=-1)


@correct(52, 2, step="prepare", base=Divided)
def rotary_stacked(self, query, key):
    """Even and odd components by strides, put back by a stack, written into an eager product."""
    cos, sin = (f(angles(query.shape[2], self.head_dim)) for f in (torch.cos, torch.sin))

    def turned(y):
        even, odd = y[..., ::2], y[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)

    return turned(query), turned(key)


@correct(90, 5)
class ScaledThenRotated(Bare):
    """The scale goes onto the query, and then the query turns: still a scale."""

    def prepare(self, query, key):
        return rotate_halves(query * self.head_dim**-0.5), rotate_halves(key)


@correct(44, 2, causal=True)
class NormedThenRotated(Rotary):
    """Qwen 3's order."""

    def add_parts(self):
        self.norm = nn.RMSNorm(self.head_dim)

    def rotate(self, x):
        return rotate_halves(self.norm(x))


@correct(57, 3)
class Alibi(Divided):
    def adjust(self, scores):
        slopes, place = 2.0 ** (-8.0 * torch.arange(1, self.heads + 1) / self.heads), torch.arange(scores.shape[-1])
        return scores - slopes[:, None, None] * (place[:, None] - place).abs()


@correct(51, 3, scale=1.0)
class FoldedIntoInitialisation(SelfAttention):
    """T5's: no scale anywhere, the query's weights are smaller by √d instead; a learned bias by distance."""

    def add_parts(self):
        self.relative = nn.Embedding(7, self.heads)
        nn.init.normal_(self.q_proj.weight, std=(self.q_proj.in_features * self.head_dim) ** -0.5)
        nn.init.normal_(self.k_proj.weight, std=self.q_proj.in_features**-0.5)

    def scale_product(self, product):
        place = torch.arange(product.shape[-1])
        product += self.relative((place - place[:, None]).clamp(-3, 3) + 3).permute(2, 0, 1).unsqueeze(0)
        return product

    def weigh(self, scores):
        return F.softmax(scores.float(), dim=-1).type_as(scores)


@correct(33, 3, shape=(2, 24, 33))
class ShiftedWindows(SelfAttention):
    """Swin's: windows of six, a table of biases, and −100 between tokens that only the shift brought together."""

    def add_parts(self):
        self.relative_position_bias_table = nn.Parameter(torch.randn(11, self.heads) * 0.02)
        self.scale = self.head_dim**-0.5

    def forward(self, x):
        batch, length, width = x.shape
        windows = torch.roll(x, shifts=-3, dims=1).view(batch * length // 6, 6, width)
        query, key, value = self.project(windows)
        place = torch.arange(6)
        bias = self.relative_position_bias_table[(place[:, None] - place + 5).view(-1)].view(6, 6, self.heads)
        scores = (query * self.scale) @ key.transpose(-2, -1) + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        region = torch.zeros(length // 6, 6)
        region[-1, 3:] = 1
        mask = (region[:, None, :] != region[:, :, None]).float() * -100.0
        scores = scores.view(batch, length // 6, self.heads, 6, 6) + mask[None, :, None]
        scores = scores.view(-1, self.heads, 6, 6)
        note(self, scores)
        mixed = self.merge(scores.softmax(dim=-1) @ value)
        return torch.roll(mixed.view(batch, length, width), shifts=3, dims=1)


@correct(39, 3)
class RelativeKeys(Divided):
    """Shaw's: the query also meets an embedding of the distance, and the sum is scaled."""

    def add_parts(self):
        self.distance = nn.Embedding(25, self.head_dim)

    def product(self, query, key):
        place = torch.arange(query.shape[2])
        content = torch.matmul(query, key.transpose(-1, -2))
        return content + torch.einsum("bhld,lrd->bhlr", query, self.distance(place[:, None] - place + 12))


@correct(46, 2)
class ContentAndPosition(SelfAttention):
    """Transformer-XL's: (q + u)·k and (q + v)·r, shifted, added and scaled together."""

    def add_parts(self):
        self.u, self.v = (nn.Parameter(torch.randn(self.heads, 1, self.head_dim) * 0.2) for _ in range(2))
        self.r_proj = nn.Linear(46, self.heads * self.head_dim, bias=False)

    def product(self, query, key):
        length = query.shape[2]
        waves = angles(2 * length - 1, 46)
        place = self.r_proj(torch.cat([waves.sin(), waves.cos()], -1)).view(-1, self.heads, self.head_dim)
        content = (query + self.u) @ key.mT
        position = (query + self.v) @ place.permute(1, 2, 0)
        position = F.pad(position, (1, 0)).view(*position.shape[:2], -1, length)[:, :, 1:].view_as(position)
        return content + position[..., :length]


@correct(55, 5, causal=True, statistics="shape")
class Sinks(Causal):
    """A learned score for nothing at all, joined before the softmax and dropped after it."""

    def add_parts(self):
        self.sinks = nn.Parameter(torch.randn(self.heads))

    def adjust(self, scores):
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], -1)
        return torch.cat([super().adjust(scores), sinks], dim=-1)

    def weigh(self, joined):
        joined = joined - joined.max(dim=-1, keepdim=True).values
        return F.softmax(joined, dim=-1)[..., :-1]


class Biased(SelfAttention):
    """An attention that is handed its bias."""

    def forward(self, x, bias):
        query, key, value = self.project(x)
        scores = torch.matmul(query, key.transpose(-1, -2)) * self.head_dim**-0.5
        scores = scores + bias[:, -x.shape[1] :, -x.shape[1] :]
        scores = scores.masked_fill(above_diagonal(x.shape[1]), torch.finfo(x.dtype).min)
        note(self, scores)
        return self.merge(F.softmax(scores.float(), dim=-1) @ value)


class OneBiasForAll(nn.Module):
    """MPT's: the bias is made once, and every layer adds it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(57, Biased(57, 3)) for _ in range(3))

    def forward(self, x):
        distance = torch.arange(1 - x.shape[1], 1, dtype=torch.int32).view(1, 1, -1)
        slopes = 1.0 / torch.pow(2, torch.arange(1, 4).float() * 2)
        alibi = (distance * slopes.view(1, 3, 1, 1)).squeeze(0)
        for block in self.blocks:
            x = block(x, alibi)
        return x


enter(
    "positions.OneBiasForAll",
    lambda: (OneBiasForAll(), (torch.randn(2, 13, 57),)),
    {f"blocks.{index}.attention": Expected(3, 19, 19**-0.5, 3, causal=True) for index in range(3)},
)
