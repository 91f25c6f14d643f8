"""The ways to write a product of queries and keys, and the places to put its scale."""

import math

import torch
from torch import nn

from .bases import Bare, Divided, HeadsAsBatch, HeadsLast, SelfAttention, note
from .entry import correct


@correct(33, 3)
@correct(39, 3, init=1.0)
class AsPrinted(Divided):
    """softmax(q @ kᵀ / math.sqrt(d)) @ v."""


@correct(51, 3)
class QueryScaledFirst(Bare):
    """Scaled as it leaves its projection, before heads are split."""

    def add_parts(self):
        self.scaling = self.head_dim**-0.5

    def project(self, x):
        query = self.split(self.q_proj(x) * self.scaling)
        return query, self.split(self.k_proj(x)), self.split(self.v_proj(x))


@correct(57, 3, step="product", base=Bare)
def key_scaled(self, query, key):
    return query.matmul(key.transpose(-1, -2).div(self.head_dim**0.5))


@correct(46, 2, step="prepare", base=Bare)
def fourth_roots(self, query, key):
    """Each by d to the −1/4: kinder to half precision."""
    return query * self.head_dim**-0.25, key * self.head_dim**-0.25


@correct(69, 3)
class HalfBeforeHalfAfter(SelfAttention):
    def prepare(self, query, key):
        return query / self.head_dim**0.25, key

    def multiplier(self):
        return self.head_dim**-0.25


class Permuted(SelfAttention):
    """Divided by an attribute, and the key transposed by a permutation."""

    def product(self, query, key):
        return torch.matmul(query, key.permute(0, 1, 3, 2))

    def scale_product(self, product):
        return product / self.scale


@correct(35, 5)
class ScaleIsADivisor(Permuted):
    """An attribute named scale that holds √d, for dividing by."""

    def add_parts(self):
        self.scale = math.sqrt(self.head_dim)


@correct(38, 2)
class ScaleIsABuffer(Permuted):
    """√d as a tensor that moves with the module."""

    def add_parts(self):
        self.register_buffer("scale", torch.sqrt(torch.tensor([float(self.head_dim)])))


@correct(52, 4, step="scale_product")
def tensor_scale(self, product):
    """√d made on the spot, and the division done in place."""
    product /= torch.sqrt(torch.tensor(self.head_dim, dtype=torch.float32))
    return product


@correct(44, 4, step="scale_product")
def in_place(self, product):
    return product.mul_(self.head_dim**-0.5)


class ScaledDotProduct(nn.Module):
    """The part that knows its temperature and no heads."""

    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature
        self.dropout = nn.Dropout(0.1)

    def forward(self, query, key, value, owner):
        scores = torch.matmul(query / self.temperature, key.transpose(2, 3))
        note(owner, scores)
        return torch.matmul(self.dropout(scores.softmax(-1)), value)


@correct(63, 3, train=True)
class OwnTemperatureModule(SelfAttention):
    """The scores are formed by a module without projections, inside the attention."""

    def add_parts(self):
        self.inner = ScaledDotProduct(temperature=self.head_dim**0.5)

    def attend(self, query, key, value):
        return self.inner(query, key, value, self)


@correct(33, 3)
class EinsumHeadsLast(HeadsLast):
    """'bqhd,bkhd->bhqk'."""


@correct(51, 3)
class EinsumKeysThenHeads(Divided, HeadsLast):
    """Softmax over axis 2."""

    scored, mixed, axis, layout = "bqhd,bkhd->bqkh", "bqkh,bkhd->bqhd", 2, "bqkh"


@correct(52, 4, shape=(17, 52))
class EinsumUnbatched(Bare, HeadsLast):
    """No batch at all, and the query scaled."""

    scored, mixed, axis, layout = "nhd,mhd->hnm", "hnm,mhd->nhd", 2, "hqk"

    def prepare(self, query, key):
        return query * self.head_dim**-0.5, key


@correct(57, 3)
class EinsumMessagesOfKeys(Divided, HeadsLast):
    """Keys named first in the output, softmax over axis 2, mixed along it."""

    scored, mixed, axis, layout = "bqhd,bkhd->bhkq", "bhkq,bkhd->bqhd", 2, "bhkq"


@correct(39, 3)
class KeysFirst(Divided):
    """k @ qᵀ, normalised down the columns, and mixed with the transpose."""

    layout = "bhkq"

    def product(self, query, key):
        return key @ query.transpose(-2, -1)

    def weigh(self, scores):
        return scores.softmax(dim=-2).transpose(-2, -1)


@correct(38, 2, step="attend")
def keys_first_channels_first(self, *heads):
    """Everything as (…, head_dim, length): kᵀq, then v times the weights."""
    query, key, value = (x.mT for x in heads)
    scores = key.mT @ query * self.head_dim**-0.5
    note(self, scores, "bhkq")
    return (value @ scores.softmax(2)).mT


@correct(55, 5)
class Bmm(Divided, HeadsAsBatch):
    """(batch · heads, length, head_dim) and torch.bmm."""


@correct(65, 5)
class BaddbmmAlibi(Bare, HeadsAsBatch):
    """BLOOM's: the bias, the product and its scale in one call."""

    def product(self, query, key):
        slopes = (2.0 ** -torch.arange(1, self.heads + 1)).repeat(len(query) // self.heads)
        alibi = slopes[:, None, None] * torch.arange(key.shape[1])
        return alibi.baddbmm(query, key.transpose(1, 2), beta=1.0, alpha=self.head_dim**-0.5)


@correct(68, 4)
class BaddbmmEmpty(Bare, HeadsAsBatch):
    """Megatron's: an empty bias with beta 0, for the sake of alpha."""

    def product(self, query, key):
        nothing = torch.zeros(query.shape[0], query.shape[1], key.shape[1])
        return torch.baddbmm(nothing, query, key.transpose(1, 2), beta=0.0, alpha=1.0 / self.head_dim**0.5)


class NoHeads(SelfAttention):
    """One head without an axis of its own."""

    def split(self, x, heads=None):
        return x

    def merge(self, x):
        return self.out_proj(x)


@correct(23, 1, shape=(17, 23))
class Matrices(NoHeads, Divided):
    """No batch and no heads: torch.mm."""

    layout = "qk"

    def product(self, query, key):
        return torch.mm(query, key.t())

    def mix(self, weights, value):
        return torch.mm(weights, value)


@correct(29, 1, shape=(3, 17, 29))
class OneHead(NoHeads):
    """(batch, length, dim): the head dimension is the model's."""

    layout = "bqk"


@correct(34, 2)
class BroadcastAndSum(Divided):
    """No product at all: multiply every pair, and sum."""

    def product(self, query, key):
        return (query.unsqueeze(3) * key.unsqueeze(2)).sum(-1)

    def mix(self, weights, value):
        return (weights.unsqueeze(-1) * value.unsqueeze(2)).sum(3)


@correct(51, 3)
class ReciprocalRoot(SelfAttention):
    """torch.rsqrt of the head dimension, and a residual branch that is damped by a constant of its own."""

    def multiplier(self):
        return torch.rsqrt(torch.tensor(float(self.head_dim)))

    def merge(self, x):
        return 0.22 * super().merge(x)
