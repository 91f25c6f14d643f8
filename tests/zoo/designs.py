"""Published designs whose product, scale or softmax is not the usual one; all of them are right.

What cannot be read of them may be said in a note; none gets a warning or an error.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .entry import Block, Entry, Expected, SelfAttention, above_diagonal, correct, enter
from .recording import note

UNREAD = dict(scale=None, seen_heads=None, seen_dim=None, causal=None, calls=None, statistics="none")


class Slots(nn.Module):
    """Slot attention: slots compete for inputs, softmax over slots, then each slot averages what it won."""

    def __init__(self, d_model, heads, head_dim=None, kv_heads=None):
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 5, d_model))
        self.to_q, self.to_k, self.to_v = (nn.Linear(d_model, d_model, bias=False) for _ in range(3))
        self.cell, self.norm = nn.GRUCell(d_model, d_model), nn.LayerNorm(d_model)
        self.back = nn.Linear(d_model, d_model)

    def forward(self, x):
        key, value = self.to_k(x), self.to_v(x)
        slots = self.start.expand(x.shape[0], -1, -1)
        for _ in range(3):
            query = self.to_q(self.norm(slots))
            update = self.updates(query, key, value)
            slots = self.cell(update.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        return self.back(slots.mean(1, keepdim=True).expand_as(x))


@correct(33, 1, **UNREAD)
class SlotsOverQueries(Slots):
    """einsum, dim=1 of (batch, slots, inputs)."""

    def updates(self, query, key, value):
        dots = torch.einsum("bid,bjd->bij", query, key) * query.shape[-1] ** -0.5
        weights = dots.softmax(dim=1) + 1e-8
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return torch.einsum("bjd,bij->bid", value, weights)


@correct(39, 1, **UNREAD)
class SlotsLast(Slots):
    """Inputs first: softmax over the last axis, which is the slots'; normalised over the first."""

    def updates(self, query, key, value):
        logits = key @ query.transpose(1, 2) * query.shape[-1] ** -0.5
        weights = F.softmax(logits, dim=-1) + 1e-8
        weights = weights / torch.sum(weights, dim=1, keepdim=True)
        return weights.transpose(1, 2) @ value


@correct(51, 1, **UNREAD)
class SlotsMixedThenDivided(Slots):
    """The average taken after the sum."""

    def updates(self, query, key, value):
        weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-2)
        return (weights @ value) / weights.sum(-1, keepdim=True)


@correct(66, 3, **UNREAD)
class GroupAssignment(SelfAttention):
    """GroupViT's: every token is assigned to groups, the queries; a group averages its tokens."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.groups = nn.Parameter(torch.randn(1, 4, self.heads * self.head_dim))

    def forward(self, x):
        query = self.split(self.q_proj(self.groups.expand(x.shape[0], -1, -1)))
        key, value = self.split(self.k_proj(x)), self.split(self.v_proj(x))
        scores = (query @ key.transpose(-2, -1)) * self.head_dim**-0.5
        soft = F.softmax(scores, dim=-2)
        index = soft.max(-2, keepdim=True)[1]
        hard = torch.zeros_like(soft).scatter_(-2, index, 1.0)
        weights = hard - soft.detach() + soft
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1.0)
        return self.merge(weights @ value).mean(1, keepdim=True).expand_as(x)


@correct(78, 3, **UNREAD)
class CrossCovariance(SelfAttention):
    """XCiT's: channels attend to channels, both of unit length over the tokens, with a learned temperature."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.temperature = nn.Parameter(torch.ones(self.heads, 1, 1))

    def forward(self, x):
        query, key, value = (y.transpose(-2, -1) for y in self.project(x))
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        weights = ((query @ key.transpose(-2, -1)) * self.temperature).softmax(dim=-1)
        return self.merge((weights @ value).transpose(-2, -1))


@correct(44, 2, **UNREAD)
class TransposedAttention(nn.Module):
    """Restormer's: the same over the pixels of an image, from convolutions."""

    def __init__(self, d_model, heads, head_dim=None, kv_heads=None):
        super().__init__()
        self.heads = heads
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.qkv, self.out = nn.Conv1d(d_model, 3 * d_model, 1), nn.Conv1d(d_model, d_model, 1)

    def forward(self, x):
        query, key, value = (y.unflatten(1, (self.heads, -1)) for y in self.qkv(x.transpose(1, 2)).chunk(3, dim=1))
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        weights = (query @ key.mT * self.temperature).softmax(-1)
        return self.out((weights @ value).flatten(1, 2)).transpose(1, 2)


class ResidualScores(SelfAttention):
    """RealFormer's: the scores of the layer before are added."""

    def forward(self, x, before=None):
        query, key, value = self.project(x)
        scores = query @ key.mT / math.sqrt(self.head_dim)
        if before is not None:
            scores = scores + before
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value), scores


class RealFormer(nn.Module):
    def __init__(self, d_model, heads, layers):
        super().__init__()
        self.blocks = nn.ModuleList(ResidualScores(d_model, heads) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(layers))

    def forward(self, x):
        scores = None
        for block, norm in zip(self.blocks, self.norms, strict=True):
            mixed, scores = block(x, scores)
            x = norm(x + mixed)
        return x


enter(
    Entry(
        "designs.RealFormer",
        lambda: (RealFormer(52, 4, 4), (torch.randn(2, 13, 52),)),
        {f"blocks.{index}": Expected(4, None, 13**-0.5, 4) for index in range(4)},
    )
)


class Nystrom(SelfAttention):
    """Nyström attention: three softmaxes about five landmarks, and the pseudo-inverse of one of them."""

    landmarks = 5

    def forward(self, x):
        query, key, value = self.project(x)
        query = query * self.head_dim**-0.25
        key = key * self.head_dim**-0.25
        q_marks, k_marks = (y.unflatten(2, (self.landmarks, -1)).mean(3) for y in (query, key))
        first = (query @ k_marks.mT).softmax(-1)
        middle = (q_marks @ k_marks.mT).softmax(-1)
        last = (q_marks @ key.mT).softmax(-1)
        return self.merge((first @ self.inverse(middle)) @ (last @ value))

    def inverse(self, matrix, steps=6):
        eye = torch.eye(matrix.shape[-1])
        found = matrix.mT / matrix.sum(-2).max()
        for _ in range(steps):
            both = matrix @ found
            found = 0.25 * found @ (13 * eye - both @ (15 * eye - both @ (7 * eye - both)))
        return found


enter(
    Entry(
        "designs.Nystrom",
        lambda: (Block(57, Nystrom(57, 3)), (torch.randn(2, 20, 57),)),
        {name: Expected(3, 19, 19**-0.5, 3) for name in ("attention", "attention#2", "attention#3")},
        statistics="none",
    )
)


@correct(35, 5, shape=(2, 20, 35), **UNREAD)
class NystromScaledQuery(Nystrom):
    """The reference implementation's: the query alone is scaled, an exact pseudo-inverse."""

    def forward(self, x):
        query, key, value = self.project(x)
        query = query * self.head_dim**-0.5
        q_marks, k_marks = (y.unflatten(2, (self.landmarks, -1)).mean(3) for y in (query, key))
        first, middle, last = (
            torch.einsum("...id,...jd->...ij", *pair).softmax(-1)
            for pair in ((query, k_marks), (q_marks, k_marks), (q_marks, key))
        )
        return self.merge(first @ torch.linalg.pinv(middle) @ (last @ value))


@correct(46, 2, scale=None)
class ScalableSoftmax(SelfAttention):
    """SSMax by hand: scores times s·ln n, s learned for each head."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.s = nn.Parameter(torch.full((self.heads, 1, 1), 0.43))

    def forward(self, x):
        query, key, value = self.project(x)
        scores = self.s * math.log(x.shape[1]) * (query @ key.mT) / math.sqrt(self.head_dim)
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value)


@correct(69, 3, scale=None, causal=True)
class ScalableSoftmaxCausal(SelfAttention):
    """The same by row: n is what each row sees; the query is multiplied, and a fused kernel runs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.s = nn.Parameter(torch.full((self.heads, 1, 1), 0.43))

    def forward(self, x):
        query, key, value = self.project(x)
        length = torch.arange(1, x.shape[1] + 1).float().log()[:, None]
        query = query * (self.s * length)
        scores = query @ key.mT * self.head_dim**-0.5
        scores = scores.masked_fill(above_diagonal(x.shape[1]), -torch.inf)
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value)


@correct(34, 2, scale=None, causal=True)
class ScalableSoftmaxInAKernel(ScalableSoftmaxCausal):
    def forward(self, x):
        query, key, value = self.project(x)
        length = torch.arange(1, x.shape[1] + 1).float().log()[:, None]
        query = query * (self.s * length)
        note(self, lambda: query @ key.mT * self.head_dim**-0.5, hidden=above_diagonal(x.shape[1]))
        return self.merge(F.scaled_dot_product_attention(query, key, value, is_causal=True))


class Disentangled(SelfAttention):
    """DeBERTa's: content to content, content to position, position to content, under one root of 3 d_k."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.table = nn.Parameter(torch.randn(26, self.heads * self.head_dim))
        self.pos_k, self.pos_q = (nn.Linear(self.heads * self.head_dim, self.heads * self.head_dim) for _ in range(2))

    def relative(self, x):
        """(queries, keys): which row of the table stands for their distance."""
        place = torch.arange(x.shape[1])
        return place[:, None] - place[None] + 13


@correct(55, 5, scale=(3 * 11) ** -0.5, seen_dim=None, statistics="none")
class DisentangledGathered(Disentangled):
    """As published: gathered from products with every distance, each divided by the scale."""

    def forward(self, x):
        query, key, value = self.project(x)
        scale, at = math.sqrt(3 * self.head_dim), self.relative(x)
        pos_k, pos_q = (
            p(self.table).unflatten(-1, (self.heads, -1)).transpose(0, 1)[None] for p in (self.pos_k, self.pos_q)
        )
        scores = query @ (key / scale).mT
        to_position = query @ (pos_k / scale).mT
        scores = scores + torch.gather(to_position, -1, at.expand(*scores.shape[:2], -1, -1))
        to_content = key @ (pos_q / scale).mT
        scores = scores + torch.gather(to_content, -1, at.expand(*scores.shape[:2], -1, -1)).mT
        return self.merge(scores.softmax(-1) @ value)


@correct(65, 5, scale=(3 * 13) ** -0.5, seen_dim=None, statistics="none")
class DisentangledEinsum(Disentangled):
    """The same with a position for every pair, and one division at the end."""

    def forward(self, x):
        query, key, value = self.project(x)
        at = self.relative(x)
        pos_k = self.pos_k(self.table)[at].unflatten(-1, (self.heads, -1))
        pos_q = self.pos_q(self.table)[at].unflatten(-1, (self.heads, -1))
        content = torch.einsum("bhqd,bhkd->bhqk", query, key)
        to_position = torch.einsum("bhqd,qkhd->bhqk", query, pos_k)
        to_content = torch.einsum("bhkd,qkhd->bhqk", key, pos_q)
        scores = (content + to_position + to_content) / math.sqrt(3 * self.head_dim)
        return self.merge(scores.softmax(-1) @ value)


class InvariantPoints(nn.Module):
    """AlphaFold's: scalar products under √(3·16), squared distances of points, a pair bias; weights kept."""

    scalars, points = 16, 4

    def __init__(self, d_model, heads, head_dim=None, kv_heads=None):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * heads * self.scalars)
        self.place = nn.Linear(d_model, 2 * heads * self.points * 3)
        self.pair = nn.Linear(7, heads)
        self.head_weights = nn.Parameter(torch.zeros(heads))
        self.out = nn.Linear(heads * self.scalars, d_model)
        self.kept = None

    def forward(self, x, pairs):
        query, key, value = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = query @ key.mT * math.sqrt(1 / (3 * self.scalars))
        scores = scores + math.sqrt(1 / 3) * self.pair(pairs).permute(0, 3, 1, 2)
        there, here = self.place(x).unflatten(-1, (2, self.heads, self.points, 3)).unbind(2)
        apart = (there[:, :, None] - here[:, None]).square().sum(-1).sum(-1)
        gamma = F.softplus(self.head_weights) * math.sqrt(1 / (3 * (self.points * 9 / 2)))
        scores = scores - 0.5 * (gamma * apart).permute(0, 3, 1, 2)
        self.kept = scores.softmax(-1)
        return self.out((self.kept @ value).transpose(1, 2).flatten(2))


correct(
    33, 3, head_dim=16, scale=48**-0.5, seen_dim=None, statistics="none",
    inputs=lambda: (torch.randn(2, 13, 33), torch.randn(2, 13, 13, 7)),
)(InvariantPoints)  # fmt: skip


@correct(38, 2)
class ScaledAlibi(SelfAttention):
    """Falcon's: slopes added to q·k, and both multiplied by 1/√d_k, by a scale the module names."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.inv_norm_factor = 1.0 / math.sqrt(self.head_dim)

    def forward(self, x):
        query, key, value = self.project(x)
        slopes = torch.tensor([2.0 ** -(8 * (head + 1) / self.heads) for head in range(self.heads)])
        alibi = slopes[:, None, None] * torch.arange(x.shape[1])
        scores = query @ key.transpose(-1, -2)
        scores = (scores + alibi) * self.inv_norm_factor
        note(self, scores)
        return self.merge(F.softmax(scores, dim=-1) @ value)


@correct(42, 3, scale=7**-0.5, calls=2, seen_dim=7, statistics="none")
class Differential(SelfAttention):
    """Two softmaxes of half the features each, one taken off the other by a learned λ."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lam = nn.Parameter(torch.tensor(0.8))

    def forward(self, x):
        query, key, value = self.project(x)
        (q1, q2), (k1, k2) = query.chunk(2, -1), key.chunk(2, -1)
        scale = q1.shape[-1] ** -0.5
        first, second = (q1 @ k1.mT * scale).softmax(-1), (q2 @ k2.mT * scale).softmax(-1)
        return self.merge((first - self.lam * second) @ value)


@correct(51, 3, statistics="none")
class OffByOne(SelfAttention):
    """Softmax plus one: a zero among the scores, which takes what no key wants."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.mT / math.sqrt(self.head_dim)
        weights = F.softmax(F.pad(scores, (1, 0)), dim=-1)[..., 1:]
        return self.merge(weights @ value)


@correct(48, 3, statistics="none", **{name: UNREAD[name] for name in ("seen_heads", "seen_dim", "calls", "scale")})
class OffByOneByHand(SelfAttention):
    """e / (1 + Σe), written out."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.mT / math.sqrt(self.head_dim)
        top = scores.amax(-1, keepdim=True).clamp(min=0)
        powers = torch.exp(scores - top)
        weights = powers / (powers.sum(-1, keepdim=True) + torch.exp(-top))
        return self.merge(weights @ value)


@correct(68, 4, statistics="none")
class MemoryKeys(SelfAttention):
    """Learned keys and values beside those of the tokens."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.memory = nn.Parameter(torch.randn(2, 1, self.heads, 3, self.head_dim))

    def forward(self, x):
        query, key, value = self.project(x)
        key, value = (
            torch.cat([mine.expand(x.shape[0], -1, -1, -1), y], 2)
            for mine, y in zip(self.memory, (key, value), strict=True)
        )
        scores = query @ key.mT / math.sqrt(self.head_dim)
        return self.merge(scores.softmax(-1) @ value)


@correct(39, 3, statistics="none")
class GatedByHead(SelfAttention):
    """A sigmoid of the input multiplies what each head mixed."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gate = nn.Linear(self.heads * self.head_dim, self.heads * self.head_dim)

    def forward(self, x):
        query, key, value = self.project(x)
        mixed = (query @ key.mT * self.head_dim**-0.5).softmax(-1) @ value
        return self.merge(mixed * self.split(self.gate(x)).sigmoid())


@correct(57, 3, statistics="none", scale=None)
class Forgetting(SelfAttention):
    """A learned decay: log-sigmoids of the input, summed from key to query, added to the scores."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.forget = nn.Linear(self.heads * self.head_dim, self.heads)

    def forward(self, x):
        query, key, value = self.project(x)
        decay = F.logsigmoid(self.forget(x)).transpose(1, 2).cumsum(-1)
        scores = query @ key.mT / math.sqrt(self.head_dim) + decay[..., :, None] - decay[..., None, :]
        return self.merge(scores.softmax(-1) @ value)


@correct(33, 3, scale=3.3166, statistics="none")
class Hypersphere(SelfAttention):
    """nGPT's: unit vectors with learned gains, multiplied by √d_k."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(self.head_dim))

    def forward(self, x):
        query, key, value = self.project(x)
        query, key = (self.gain * F.normalize(y, dim=-1) for y in (query, key))
        return self.merge(F.scaled_dot_product_attention(query, key, value, scale=math.sqrt(self.head_dim)))


class Attend(SelfAttention):
    """From one set to another."""

    def forward(self, x, other):
        query = self.split(self.q_proj(x))
        key, value = self.split(self.k_proj(other)), self.split(self.v_proj(other))
        scores = torch.einsum("bhid,bhjd->bhij", query, key) / math.sqrt(self.head_dim)
        note(self, scores)
        return self.merge(torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), value))


class InducedSet(nn.Module):
    """Set transformer's: to a few learned points and back; then pooled by a learned seed."""

    def __init__(self):
        super().__init__()
        self.points, self.seed = nn.Parameter(torch.randn(1, 4, 39)), nn.Parameter(torch.randn(1, 1, 39))
        self.first, self.second, self.pool = (Attend(39, 3) for _ in range(3))

    def forward(self, x):
        hidden = self.first(self.points.expand(x.shape[0], -1, -1), x)
        x = x + self.second(x, hidden)
        return self.pool(self.seed.expand(x.shape[0], -1, -1), x)


enter(
    Entry(
        "designs.InducedSet",
        lambda: (InducedSet(), (torch.randn(2, 13, 39),)),
        {name: Expected(3, 13, 13**-0.5, 3) for name in ("first", "second", "pool")},
    )
)


class Linformer(SelfAttention):
    """Keys and values projected to six positions along the length."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.along = nn.Parameter(torch.randn(2, 20, 6) / 20**0.5)

    def forward(self, x):
        query = self.split(self.q_proj(x))
        key = self.split(torch.einsum("bnd,nk->bkd", self.k_proj(x), self.along[0]))
        value = self.split(torch.einsum("bnd,nk->bkd", self.v_proj(x), self.along[1]))
        scores = query @ key.mT / math.sqrt(self.head_dim)
        return self.merge(scores.softmax(-1) @ value)


enter(
    Entry(
        "designs.Linformer",
        lambda: (Block(55, Linformer(55, 5)), (torch.randn(2, 20, 55),)),
        {"attention": Expected(5, 11, 11**-0.5, None)},
        statistics="none",
    )
)


@correct(42, 3, statistics="none", causal=None, calls=None)
class SharedQueriesAndKeys(SelfAttention):
    """Reformer's: the key is the query at unit length, and no token looks at itself."""

    def forward(self, x):
        query, value = self.split(self.q_proj(x)), self.split(self.v_proj(x))
        key = F.normalize(query, dim=-1)
        scores = query @ key.mT * self.head_dim**-0.5
        scores = scores.masked_fill(torch.eye(x.shape[1], dtype=torch.bool), -5e4)
        return self.merge(scores.softmax(-1) @ value)


@correct(63, 3, causal=True, statistics="none", scale=None, seen_dim=None)
class RelativeShift(SelfAttention):
    """Transformer-XL's: (q + u)·k and (q + v)·r, the second shifted into place by a reshape."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.u, self.v = (nn.Parameter(torch.randn(self.heads, 1, self.head_dim)) for _ in range(2))
        self.r_proj = nn.Linear(self.heads * self.head_dim, self.heads * self.head_dim, bias=False)

    def forward(self, x):
        query, key, value = self.project(x)
        place = torch.arange(x.shape[1] - 1, -1, -1.0)[:, None] * 0.9 ** torch.arange(0.0, x.shape[-1])
        relative = self.split(self.r_proj(place.sin())[None])
        content = (query + self.u) @ key.mT
        position = (query + self.v) @ relative.mT
        padded = F.pad(position, (1, 0)).view(*position.shape[:2], x.shape[1] + 1, x.shape[1])
        scores = (content + padded[:, :, 1:]) * self.head_dim**-0.5
        scores = scores.masked_fill(above_diagonal(x.shape[1]), -torch.inf)
        return self.merge(scores.softmax(-1) @ value)


@correct(36, 3, statistics="none", scale=None, calls=None, seen_heads=None, seen_dim=None)
class TriangleAttention(SelfAttention):
    """AlphaFold's over pairs: rows of a square of pairs, a bias from the pairs themselves, gated."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bias, self.gate = nn.Linear(36, self.heads, bias=False), nn.Linear(36, 36)

    def forward(self, x):
        pairs = x[:, :, None] + x[:, None, :]
        query, key, value = (
            p(pairs).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = query * self.head_dim**-0.5 @ key.mT + self.bias(pairs).permute(0, 3, 1, 2)[:, None]
        mixed = (scores.softmax(-1) @ value).transpose(-2, -3).flatten(-2)
        return self.out_proj(mixed * self.gate(pairs).sigmoid()).mean(2)


class Masked(SelfAttention):
    """Half the keys of the second sequence are padding."""

    def scores(self, x):
        query, key, value = self.project(x)
        shown = torch.arange(x.shape[1]) < torch.tensor([x.shape[1], 6])[:, None]
        return query @ key.mT / math.sqrt(self.head_dim), shown[:, None, None], value


@correct(33, 3, statistics="none")
class MaskedThenNormalised(Masked):
    """Weights times the mask, over what is left of their sum."""

    def forward(self, x):
        scores, shown, value = self.scores(x)
        weights = scores.softmax(-1) * shown
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
        return self.merge(weights @ value)


@correct(39, 3, statistics="none")
class MaskedTwice(Masked):
    """Before the softmax, and once more behind it, where nothing is left to hide."""

    def forward(self, x):
        scores, shown, value = self.scores(x)
        weights = scores.masked_fill(~shown, -1e9).softmax(-1)
        return self.merge(weights.masked_fill(~shown, 0.0) @ value)


@correct(51, 3, statistics="none")
class EmptyRowsSetToZero(Masked):
    """Rows without a key are NaN, and set to zero before they meet the values."""

    def forward(self, x):
        scores, shown, value = self.scores(x)
        hidden = ~(shown & shown.transpose(-2, -1))
        weights = torch.nan_to_num(scores.masked_fill(hidden, -torch.inf).softmax(-1))
        return self.merge(weights @ value)


@correct(46, 2, statistics="none")
class RowsOfPaddingSwitchedOff(Masked):
    """Queries that are padding get no weights at all."""

    def forward(self, x):
        scores, shown, value = self.scores(x)
        weights = scores.masked_fill(~shown, -torch.inf).softmax(-1) * shown.transpose(-2, -1)
        return self.merge(weights @ value)


@correct(57, 3, statistics="none", train=True)
class GatedWeights(Masked):
    """A gate of its own for every query and key, learned, on weights that were dropped."""

    def forward(self, x):
        scores, _, value = self.scores(x)
        gate = torch.sigmoid(scores.detach().mean(1, keepdim=True))
        return self.merge((F.dropout(scores.softmax(-1), 0.1, self.training) * gate) @ value)


@correct(68, 4, kv_heads=2, statistics="none")
class TiledKeysAndValues(SelfAttention):
    """Both in whole copies side by side: another order than Llama's, and the same for both."""

    def forward(self, x):
        query, key, value = self.project(x)
        key, value = (y.repeat(1, self.heads // self.kv_heads, 1, 1) for y in (key, value))
        return self.merge((query @ key.mT / math.sqrt(self.head_dim)).softmax(-1) @ value)


@correct(36, 3, statistics="none", causal=True, calls=2)
class Recurrent(SelfAttention):
    """Transformer-XL's: the second half sees the first as a memory through which no gradient goes."""

    def forward(self, x):
        memory, mixed = None, []
        for part in x.split(7, dim=1):
            query = self.split(self.q_proj(part))
            seen = part if memory is None else torch.cat([memory.detach(), part], 1)
            key, value = self.split(self.k_proj(seen)), self.split(self.v_proj(seen))
            scores = query @ key.mT / math.sqrt(self.head_dim)
            scores = scores.masked_fill(above_diagonal(part.shape[1], seen.shape[1]), -torch.inf)
            mixed.append(self.merge(scores.softmax(-1) @ value))
            memory = part
        return torch.cat(mixed, 1)


@correct(48, 4, scale=None, statistics="none")
class Distances(SelfAttention):
    """Minus the squared distance of query and key, over √d: q·k counts twice, and their lengths are added."""

    def forward(self, x):
        query, key, value = self.project(x)
        lengths = query.square().sum(-1, keepdim=True) + key.square().sum(-1)[:, :, None]
        scores = -(lengths - 2 * query @ key.mT) / math.sqrt(self.head_dim)
        return self.merge(scores.softmax(-1) @ value)


@correct(60, 4, statistics="none", calls=None, scale=None, seen_heads=None, seen_dim=None)
class Sinkhorn(SelfAttention):
    """Rows and columns normalised in turns, the rows last."""

    def forward(self, x):
        query, key, value = self.project(x)
        weights = torch.exp(query @ key.mT / math.sqrt(self.head_dim))
        for _ in range(3):
            weights = weights / weights.sum(-2, keepdim=True)
            weights = weights / weights.sum(-1, keepdim=True)
        return self.merge(weights @ value)


@correct(44, 4, statistics="none")
class LargestFive(SelfAttention):
    """Only the five largest scores of a row are kept."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.mT / math.sqrt(self.head_dim)
        fifth = scores.topk(5, dim=-1).values[..., -1:]
        return self.merge(scores.masked_fill(scores < fifth, -torch.inf).softmax(-1) @ value)


@correct(52, 4, causal=True, statistics="none")
class MultipliedAndTakenOff(SelfAttention):
    """GPT-2's first: scores times the mask, less 1e10 where it is zero; and a switch for every head."""

    def forward(self, x):
        query, key, value = self.project(x)
        shown = (~above_diagonal(x.shape[1])).float()
        scores = query @ key.mT / math.sqrt(self.head_dim) * torch.ones(self.heads, 1, 1)
        scores = scores * shown - 1e10 * (1 - shown)
        return self.merge(scores.softmax(-1) @ value)
