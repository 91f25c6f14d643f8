"""Shared keys, compressed keys, remembered keys, windows, and modules inside and around the attention."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .bases import Block, Causal, Divided, SelfAttention, note
from .entry import Expected, correct, enter
from .fused import dense, sdpa
from .positions import rotate_halves
from .products import AsPrinted


@correct(66, 6, kv_heads=2)
class RepeatInterleave(Divided):
    def attend(self, query, *shared):
        return super().attend(query, *(y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in shared))


@correct(78, 6, kv_heads=3, causal=True, step="attend")
def expanded(self, query, *shared):
    """Llama's repeat_kv, into a fused kernel."""
    group = self.heads // self.kv_heads
    key, value = (y[:, :, None].expand(-1, -1, group, -1, -1).reshape(query.shape) for y in shared)
    return sdpa(self, query, key, value, is_causal=True)


@correct(85, 5, kv_heads=1)
class MultiQuery(SelfAttention):
    """One key for all heads, by broadcasting."""

    def project(self, x):
        return self.split(self.q_proj(x)), self.k_proj(x), self.v_proj(x)

    def product(self, query, key):
        return torch.einsum("bhqd,bkd->bhqk", query, key)

    def mix(self, weights, value):
        return torch.einsum("bhqk,bkd->bhqd", weights, value)


@correct(102, 6, kv_heads=2)
class GroupedEinsum(SelfAttention):
    """(batch, groups, heads of a group, …), nothing repeated."""

    layout = "bghqk"

    def product(self, query, key):
        return torch.einsum("bgrqd,bgkd->bgrqk", query.unflatten(1, (self.kv_heads, -1)), key)

    def mix(self, weights, value):
        return torch.einsum("bgrqk,bgkd->bgrqd", weights, value).flatten(1, 2)


class Latent(SelfAttention):
    """DeepSeek's: keys and values out of a narrow latent, and positions in components of their own."""

    plain, rotated, value_dim, rank = 13, 6, 11, 17

    def __init__(self, d_model, heads, head_dim=None, kv_heads=None):
        nn.Module.__init__(self)
        self.heads, self.head_dim = heads, self.plain + self.rotated
        self.q_proj = nn.Linear(d_model, heads * self.head_dim, bias=False)
        self.kv_a = nn.Linear(d_model, self.rank + self.rotated, bias=False)
        self.kv_norm = nn.RMSNorm(self.rank)
        self.kv_b = nn.Linear(self.rank, heads * (self.plain + self.value_dim), bias=False)
        self.out_proj = nn.Linear(heads * self.value_dim, d_model, bias=False)

    def project(self, x):
        """Query and key as pairs of their plain and turned components, and the value."""
        query = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q_plain, q_rotated = query.split([self.plain, self.rotated], dim=-1)
        latent, k_rotated = self.kv_a(x).split([self.rank, self.rotated], dim=-1)
        both = self.kv_b(self.kv_norm(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_plain, value = both.split([self.plain, self.value_dim], dim=-1)
        return (q_plain, rotate_halves(q_rotated)), (k_plain, rotate_halves(k_rotated[:, None])), value


@correct(57, 3, head_dim=19, causal=True)
class CompressedKeys(Latent, Causal):
    """The two kinds of components joined, the turned key shared by all heads."""

    def prepare(self, query, key):
        return torch.cat(query, -1), torch.cat([key[0], key[1].expand(-1, self.heads, -1, -1)], -1)


@correct(57, 3, head_dim=19, seen_dim=None, step="product", base=Latent)
def two_products(self, query, key):
    """The two kinds of components multiplied apart, and the products added."""
    return query[0] @ key[0].mT + query[1] @ key[1].mT


@correct(33, 3, inputs=lambda: (torch.randn(2, 7, 33), torch.randn(2, 17, 33)))
class CrossAttention(Divided):
    """Queries from here, keys and values from a longer memory."""

    def forward(self, x, memory):
        query = self.split(self.q_proj(x))
        return self.merge(self.attend(query, self.split(self.k_proj(memory)), self.split(self.v_proj(memory))))


class Decoding(SelfAttention):
    """Eight tokens at once and then one by one, each seeing all before it."""

    def forward(self, x):
        self.reset(x)
        return torch.cat([self.step(x[:, :8], 0), *(self.step(x[:, i : i + 1], i) for i in range(8, x.shape[1]))], 1)

    def step(self, x, start):
        query, key, value = self.project(x)
        key, value = self.remember(key, value, start)
        scores = query @ key.mT * self.head_dim**-0.5
        place = torch.arange(key.shape[2])
        scores = scores.masked_fill(place > torch.arange(start, start + x.shape[1])[:, None], -torch.inf)
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value)


@correct(39, 3, causal=None, calls=6)
class GrowingCache(Decoding):
    """The past joined by torch.cat."""

    def reset(self, x):
        self.past = None

    def remember(self, key, value, start):
        if self.past is not None:
            key, value = torch.cat([self.past[0], key], 2), torch.cat([self.past[1], value], 2)
        self.past = key, value
        return key, value


@correct(51, 3, causal=None, calls=6, gradients=False)
class PreallocatedCache(Decoding):
    """A buffer as long as it will ever be, filled by index_copy_, the rest masked."""

    def reset(self, x):
        self.keys, self.values = (torch.zeros(x.shape[0], self.heads, 19, self.head_dim) for _ in range(2))

    def remember(self, key, value, start):
        place = torch.arange(start, start + key.shape[2])
        self.keys.index_copy_(2, place, key.detach())
        self.values.index_copy_(2, place, value.detach())
        return self.keys, self.values


@correct(57, 3, shape=(2, 21, 57))
class Blocks(SelfAttention):
    """Windows of seven that do not overlap, by a reshape."""

    layout = "bhwqk"

    def project(self, x):
        return [y.unflatten(2, (-1, 7)) for y in super().project(x)]

    def mix(self, weights, value):
        return (weights @ value).flatten(2, 3)


@correct(46, 2, shape=(2, 17, 46))
class SlidingWindows(Divided):
    """Each query its own five neighbours, by unfold."""

    def attend(self, query, *kept):
        return super().attend(query, *(F.pad(y, (0, 0, 2, 2)).unfold(2, 5, 1) for y in kept))  # (…, head_dim, 5)

    def product(self, query, key):
        return torch.einsum("bhqd,bhqdk->bhqk", query, key)

    def adjust(self, scores):
        length = scores.shape[2]
        place = torch.arange(length)[:, None] + torch.arange(-2, 3)
        return scores.masked_fill((place < 0) | (place >= length), -torch.inf)

    def mix(self, weights, value):
        return torch.einsum("bhqk,bhqdk->bhqd", weights, value)


@correct(52, 4)
class TalkingHeads(SelfAttention):
    """Scores, and weights, mixed over heads by small linear maps that begin as the identity."""

    def add_parts(self):
        self.before, self.after = (nn.Linear(self.heads, self.heads, bias=False) for _ in range(2))
        nn.init.eye_(self.before.weight)
        nn.init.eye_(self.after.weight)

    def product(self, query, key):
        return (query * self.head_dim**-0.5) @ key.transpose(-2, -1)

    def scale_product(self, product):
        return self.before(product.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def weigh(self, scores):
        return self.after(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@correct(55, 5, seen_heads=1, layers=5, statistics="none")
class HeadLoop(SelfAttention):
    """A loop over heads in Python."""

    def forward(self, x):
        mixed = []
        for head in range(self.heads):
            mine = slice(head * self.head_dim, (head + 1) * self.head_dim)
            mixed.append(self.attend(*(p(x)[..., mine] for p in (self.q_proj, self.k_proj, self.v_proj))))
        return self.out_proj(torch.cat(mixed, -1))

    def attend(self, query, key, value):
        return (query @ key.mT / self.head_dim**0.5).softmax(-1) @ value


@correct(55, 5, seen_heads=1, layers=5, statistics="none")
class HeadLoopOfSDPA(HeadLoop):
    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(*(each.unsqueeze(1) for each in (query, key, value))).squeeze(1)


class LayersInOneModule(nn.Module):
    """Parameters in lists, and a loop over layers."""

    def __init__(self, d_model, heads, layers=3):
        super().__init__()
        self.heads = heads
        self.qkv = nn.ParameterList(torch.randn(d_model, 3 * d_model) * d_model**-0.5 for _ in range(layers))
        self.out = nn.ParameterList(torch.randn(d_model, d_model) * d_model**-0.5 for _ in range(layers))

    def forward(self, x):
        for qkv, out in zip(self.qkv, self.out, strict=True):
            normed = F.layer_norm(x, x.shape[-1:])
            query, key, value = (normed @ qkv).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2) @ out
        return x


enter(
    "structures.LayersInOneModule",
    lambda: (LayersInOneModule(44, 4), (torch.randn(2, 13, 44),)),
    {f"LayersInOneModule{number}": Expected(4, 11, 11**-0.5, 4) for number in ("", "#2", "#3")},
    statistics="none",
)


@correct(65, 5, calls=None)
class QueriesInChunks(Divided):
    """Five queries at a time, to save memory."""

    def attend(self, query, key, value):
        attend = super().attend
        return torch.cat([attend(chunk, key, value) for chunk in query.split(5, dim=2)], 2)


@correct(68, 4, step="attend")
def vmap_over_heads(self, query, key, value):
    note(self, lambda: dense(query, key))

    def one_head(query, key, value):
        return torch.softmax(query @ key.mT / self.head_dim**0.5, -1) @ value

    return torch.vmap(one_head, in_dims=1, out_dims=1)(query, key, value)


@correct(34, 2, calls=None, train=True)
class Checkpointed(Divided):
    """Recomputed in the backward pass."""

    def attend(self, *heads):
        return checkpoint(super().attend, *heads, use_reentrant=False)


class Head(nn.Module):
    """One head, a module of its own."""

    def __init__(self, d_model, head_dim):
        super().__init__()
        self.heads = 1
        self.query, self.key, self.value = (nn.Linear(d_model, head_dim, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(13, 13)))

    def forward(self, x):
        key, query = self.key(x), self.query(x)
        scores = query @ key.transpose(-2, -1) * key.shape[-1] ** -0.5
        scores = scores.masked_fill(self.tril[: x.shape[1], : x.shape[1]] == 0, float("-inf"))
        note(self, scores, "bqk")
        return F.softmax(scores, dim=-1) @ self.value(x)


class ManyHeads(nn.Module):
    """Heads side by side in a list."""

    def __init__(self, d_model, heads, head_dim, head=Head):
        super().__init__()
        self.heads = nn.ModuleList(head(d_model, head_dim) for _ in range(heads))
        self.proj = nn.Linear(heads * head_dim, d_model)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


enter(
    "structures.ManyHeads",
    lambda: (Block(39, ManyHeads(39, 3, 13)), (torch.randn(2, 13, 39),)),
    {f"attention.heads.{index}": Expected(1, 13, 13**-0.5, 1, causal=True) for index in range(3)},
)


class Shared(nn.Module):
    """ALBERT's: one block, three times."""

    def __init__(self):
        super().__init__()
        self.block = Block(33, AsPrinted(33, 3))

    def forward(self, x):
        for _ in range(3):
            x = self.block(x)
        return x


enter(
    "structures.Shared",
    lambda: (Shared(), (torch.randn(2, 13, 33),)),
    {f"block.attention[{depth}]": Expected(3, 11, 11**-0.5, 3) for depth in range(3)},
    statistics="none",
)


class Deep(nn.Module):
    """An embedding, blocks in a list in a module, each unlike the other, and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(101, 33)
        self.body = nn.ModuleDict(
            {"blocks": nn.ModuleList([Block(33, AsPrinted(33, 3)), Block(33, CrossToItself(33, 1))])}
        )
        self.head = nn.Linear(33, 101)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.body["blocks"]:
            x = block(x)
        return self.head(x)


class CrossToItself(CrossAttention):
    def forward(self, x):
        return super().forward(x, x)


enter(
    "structures.Deep",
    lambda: (Deep(), (torch.randint(0, 101, (2, 13)),)),
    {
        "body.blocks.0.attention": Expected(3, 11, 11**-0.5, 3),
        "body.blocks.1.attention": Expected(1, 33, 33**-0.5, 1),
    },
)
