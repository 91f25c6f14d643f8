"""The ways to write a product of queries and keys, and the places to put its scale."""

import math

import torch
from torch import nn

from .entry import SelfAttention, correct
from .recording import note


@correct(33, 3)
@correct(39, 3, init=1.0)
class AsPrinted(SelfAttention):
    """softmax(q @ k.transpose(-2, -1) / math.sqrt(d)) @ v."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.transpose(-2, -1) / math.sqrt(self.head_dim)
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value)


@correct(51, 3)
class QueryScaledFirst(SelfAttention):
    """Scaled as it leaves its projection, before heads are split."""

    def add_parts(self):
        self.scaling = self.head_dim**-0.5

    def forward(self, x):
        query = self.split(self.q_proj(x) * self.scaling)
        key, value = self.split(self.k_proj(x)), self.split(self.v_proj(x))
        scores = torch.matmul(query, key.transpose(2, 3))
        note(self, scores)
        return self.merge(torch.matmul(torch.softmax(scores, dim=-1), value))


@correct(57, 3)
class KeyScaled(SelfAttention):
    def forward(self, x):
        query, key, value = self.project(x)
        key = key.transpose(-1, -2).div(self.head_dim**0.5)
        scores = query.matmul(key)
        note(self, scores)
        return self.merge(scores.softmax(dim=-1).matmul(value))


@correct(46, 2)
class FourthRoots(SelfAttention):
    """Each by d to the −1/4: kinder to half precision."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = (query * self.head_dim**-0.25) @ (key * self.head_dim**-0.25).mT
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value)


@correct(69, 3)
class HalfBeforeHalfAfter(SelfAttention):
    def forward(self, x):
        query, key, value = self.project(x)
        scores = (query / self.head_dim**0.25) @ key.mT
        scores = scores * self.head_dim**-0.25
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value)


@correct(35, 5)
class ScaleIsADivisor(SelfAttention):
    """An attribute named scale that holds √d, for dividing by."""

    def add_parts(self):
        self.scale = math.sqrt(self.head_dim)

    def forward(self, x):
        query, key, value = self.project(x)
        scores = torch.matmul(query, key.permute(0, 1, 3, 2)) / self.scale
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value)


@correct(38, 2)
class ScaleIsABuffer(SelfAttention):
    """√d as a tensor that moves with the module."""

    def add_parts(self):
        self.register_buffer("scale", torch.sqrt(torch.tensor([float(self.head_dim)])))

    def forward(self, x):
        query, key, value = self.project(x)
        scores = torch.matmul(query, key.permute(0, 1, 3, 2)) / self.scale
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value)


@correct(52, 4)
class TensorScale(SelfAttention):
    """√d made on the spot, and the division done in place."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = torch.matmul(query, key.transpose(-1, -2))
        scores /= torch.sqrt(torch.tensor(key.size(-1), dtype=torch.float32))
        note(self, scores)
        return self.merge(torch.softmax(scores, -1) @ value)


@correct(44, 4)
class InPlace(SelfAttention):
    def forward(self, x):
        query, key, value = self.project(x)
        scores = torch.matmul(query, key.transpose(-1, -2)).mul_(self.head_dim**-0.5)
        note(self, scores)
        return self.merge(torch.softmax(scores, -1) @ value)


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

    def forward(self, x):
        return self.merge(self.inner(*self.project(x), self))


@correct(33, 3)
class EinsumHeadsLast(SelfAttention):
    """'bqhd,bkhd->bhqk'."""

    def forward(self, x):
        query, key, value = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * self.head_dim**-0.5
        note(self, scores)
        return self.out_proj(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value).flatten(2))


@correct(51, 3)
class EinsumKeysThenHeads(SelfAttention):
    """'bqhd,bkhd->bqkh', softmax over axis 2."""

    def forward(self, x):
        query, key, value = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = torch.einsum("bqhd,bkhd->bqkh", query, key) / self.head_dim**0.5
        note(self, scores, "bqkh")
        return self.out_proj(torch.einsum("bqkh,bkhd->bqhd", scores.softmax(dim=2), value).flatten(2))


@correct(52, 4, shape=(17, 52))
class EinsumUnbatched(SelfAttention):
    """'nhd,mhd->hnm', no batch at all."""

    def forward(self, x):
        query, key, value = (p(x).view(-1, self.heads, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = torch.einsum("nhd,mhd->hnm", query * self.head_dim**-0.5, key)
        note(self, scores, "hqk")
        return self.out_proj(torch.einsum("hnm,mhd->nhd", torch.softmax(scores, 2), value).flatten(1))


@correct(57, 3)
class EinsumMessagesOfKeys(SelfAttention):
    """Keys named first in the output, 'bqhd,bkhd->bhkq', softmax over axis 2, mixed along it."""

    def forward(self, x):
        query, key, value = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = torch.einsum("bqhd,bkhd->bhkq", query, key) / self.head_dim**0.5
        note(self, scores, "bhkq")
        return self.out_proj(torch.einsum("bhkq,bkhd->bqhd", scores.softmax(dim=2), value).flatten(2))


@correct(39, 3)
class KeysFirst(SelfAttention):
    """k @ qᵀ, normalised down the columns, and mixed with the transpose."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = key @ query.transpose(-2, -1) / math.sqrt(self.head_dim)
        note(self, scores, "bhkq")
        return self.merge(scores.softmax(dim=-2).transpose(-2, -1) @ value)


@correct(38, 2)
class KeysFirstChannelsFirst(SelfAttention):
    """Everything as (…, head_dim, length): kᵀq, then v times the weights."""

    def forward(self, x):
        query, key, value = (x.mT for x in self.project(x))
        scores = key.mT @ query * self.head_dim**-0.5
        note(self, scores, "bhkq")
        return self.merge((value @ scores.softmax(2)).mT)


@correct(55, 5)
class Bmm(SelfAttention):
    """(batch · heads, length, head_dim) and torch.bmm."""

    def forward(self, x):
        query, key, value = (x.flatten(0, 1) for x in self.project(x))
        scores = torch.bmm(query, key.transpose(1, 2)) / self.head_dim**0.5
        note(self, scores, "nqk")
        mixed = torch.bmm(torch.softmax(scores, dim=-1), value)
        return self.merge(mixed.view(x.shape[0], self.heads, *mixed.shape[1:]))


@correct(65, 5)
class BaddbmmAlibi(SelfAttention):
    """BLOOM's: the bias, the product and its scale in one call."""

    def forward(self, x):
        query, key, value = (x.reshape(-1, *x.shape[2:]) for x in self.project(x))
        slopes = (2.0 ** -torch.arange(1, self.heads + 1)).repeat(x.shape[0])
        alibi = slopes[:, None, None] * torch.arange(x.shape[1])
        scores = alibi.baddbmm(query, key.transpose(1, 2), beta=1.0, alpha=self.head_dim**-0.5)
        note(self, scores, "nqk")
        mixed = torch.bmm(scores.softmax(-1), value)
        return self.merge(mixed.view(x.shape[0], self.heads, *mixed.shape[1:]))


@correct(68, 4)
class BaddbmmEmpty(SelfAttention):
    """Megatron's: an empty bias with beta 0, for the sake of alpha."""

    def forward(self, x):
        query, key, value = (x.reshape(-1, *x.shape[2:]) for x in self.project(x))
        nothing = torch.zeros(query.shape[0], query.shape[1], key.shape[1])
        scores = torch.baddbmm(nothing, query, key.transpose(1, 2), beta=0.0, alpha=1.0 / self.head_dim**0.5)
        note(self, scores, "nqk")
        mixed = torch.bmm(scores.softmax(-1), value)
        return self.merge(mixed.view(x.shape[0], self.heads, *mixed.shape[1:]))


@correct(23, 1, shape=(17, 23))
class Matrices(SelfAttention):
    """No batch and no heads: torch.mm."""

    def forward(self, x):
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        scores = torch.mm(query, key.t()) / self.head_dim**0.5
        note(self, scores, "qk")
        return self.out_proj(torch.mm(scores.softmax(-1), value))


@correct(29, 1, shape=(3, 17, 29))
class OneHead(SelfAttention):
    """(batch, length, dim): the head dimension is the model's."""

    def forward(self, x):
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        scores = query @ key.transpose(1, 2) * x.shape[-1] ** -0.5
        note(self, scores, "bqk")
        return self.out_proj(scores.softmax(-1) @ value)


@correct(34, 2)
class BroadcastAndSum(SelfAttention):
    """No product at all: multiply every pair, and sum."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = (query.unsqueeze(3) * key.unsqueeze(2)).sum(-1) / self.head_dim**0.5
        note(self, scores)
        return self.merge((scores.softmax(-1).unsqueeze(-1) * value.unsqueeze(2)).sum(3))


@correct(51, 3)
class ReciprocalRoot(SelfAttention):
    """torch.rsqrt of the key's last size, and a residual branch that is damped by a constant of its own."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.mT * torch.rsqrt(torch.tensor(float(key.shape[-1])))
        note(self, scores)
        return 0.22 * self.merge(scores.softmax(-1) @ value)
