"""The right parts in the wrong place, or in none."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .entry import SelfAttention, above_diagonal, bug


@bug("scale_after_softmax", 96, 3, scale=1.0)
@bug("scale_after_softmax", 51, 3, scale=1.0, init=1.0)
class WeightsScaled(SelfAttention):
    """softmax(q·k)/√d: the weights no longer sum to one."""

    def forward(self, x):
        query, key, value = self.project(x)
        weights = (query @ key.mT).softmax(-1) / math.sqrt(self.head_dim)
        return self.merge(weights @ value)


@bug("scale_after_softmax", 57, 3, scale=1.0, init=1.0)
class OutputScaled(SelfAttention):
    """softmax(q·k)·v/√d."""

    def forward(self, x):
        query, key, value = self.project(x)
        output = (query @ key.mT).softmax(-1) @ value
        return self.merge(output * self.head_dim**-0.5)


@bug("softmax_wrong_axis", 33, 3)
class OverQueries(SelfAttention):
    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.mT / math.sqrt(self.head_dim)
        return self.merge(torch.softmax(scores, dim=-2) @ value)


@bug("softmax_wrong_axis", 69, 3, causal=True)
class OverQueriesMasked(SelfAttention):
    """The same behind a causal mask."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = (query @ key.mT / math.sqrt(self.head_dim)).masked_fill(above_diagonal(x.shape[1]), -1e9)
        return self.merge(torch.softmax(scores, dim=-2) @ value)


@bug("softmax_wrong_axis", 39, 3)
class OverHeads(SelfAttention):
    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.mT / math.sqrt(self.head_dim)
        return self.merge(F.softmax(scores, dim=1) @ value)


@bug("softmax_wrong_axis", 51, 3)
class OverHeadsOfAnEinsum(SelfAttention):
    """'bqhd,bkhd->bqkh' and the last axis, which is the heads'."""

    def forward(self, x):
        query, key, value = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = torch.einsum("bqhd,bkhd->bqkh", query, key) / math.sqrt(self.head_dim)
        return self.out_proj(torch.einsum("bqkh,bkhd->bqhd", scores.softmax(-1), value).flatten(2))


@bug("softmax_wrong_axis", 57, 3)
class OverTheBatch(SelfAttention):
    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.mT / math.sqrt(self.head_dim)
        return self.merge(F.softmax(scores, dim=0) @ value)


@bug("softmax_wrong_axis", 38, 2)
class KeysFirstNotTransposed(SelfAttention):
    """k @ qᵀ, and then all as if it were q @ kᵀ."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = key @ query.mT / math.sqrt(self.head_dim)
        return self.merge(scores.softmax(-1).mT @ value)


class Normed(SelfAttention):
    """Norms for query and key that a subclass forgets."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)


@bug("inert_qk_norm", 33, 3)
class NormsNeverCalled(Normed):
    def forward(self, x):
        return self.merge(F.scaled_dot_product_attention(*self.project(x)))


@bug("inert_qk_norm", 39, 3)
class NormsThrownAway(Normed):
    """Called, and the result not kept."""

    def forward(self, x):
        query, key, value = self.project(x)
        self.q_norm(query)
        self.k_norm(key)
        scores = query @ key.mT / math.sqrt(self.head_dim)
        return self.merge(scores.softmax(-1) @ value)


@bug("inert_qk_norm", 51, 3)
class NormOfTheQueryAlone(Normed):
    """The query is normalised, the key's norm forgotten."""

    def forward(self, x):
        query, key, value = self.project(x)
        return self.merge(F.scaled_dot_product_attention(self.q_norm(query), key, value))


@bug("inert_qk_norm", 57, 3, causal=True)
class NormsUnderOtherNames(SelfAttention):
    """query_layernorm and key_layernorm, of another kind."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.query_layernorm, self.key_layernorm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)

    def forward(self, x):
        return self.merge(F.scaled_dot_product_attention(*self.project(x), is_causal=True))


@bug("inert_softcap", 33, 3)
class KernelIgnoresTheCap(SelfAttention):
    """An attribute that SDPA knows nothing of."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.attn_logit_softcapping = 50.0

    def forward(self, x):
        return self.merge(F.scaled_dot_product_attention(*self.project(x)))


@bug("inert_softcap", 39, 3)
class CapThrownAway(SelfAttention):
    """tanh computed, and its result not kept."""

    softcap = 30.0

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.mT / math.sqrt(self.head_dim)
        torch.tanh(scores / self.softcap) * self.softcap
        return self.merge(scores.softmax(-1) @ value)


@bug("inert_softcap", 51, 3, softcap=1e6)
class CapFarAway(SelfAttention):
    """A cap of a million caps nothing."""

    softcap = 1e6

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.mT / math.sqrt(self.head_dim)
        scores = torch.tanh(scores / self.softcap) * self.softcap
        return self.merge(scores.softmax(-1) @ value)


@bug("softmax_wrong_axis", 55, 5)
class OverQueriesOfBmm(SelfAttention):
    """(batch · heads, queries, keys), and axis 1."""

    def forward(self, x):
        query, key, value = (y.flatten(0, 1) for y in self.project(x))
        scores = torch.bmm(query, key.transpose(1, 2)) / math.sqrt(self.head_dim)
        mixed = torch.bmm(torch.softmax(scores, dim=1), value)
        return self.merge(mixed.view(x.shape[0], self.heads, *mixed.shape[1:]))


@bug("softmax_wrong_axis", 46, 2)
class OverAllPairs(SelfAttention):
    """Queries and keys flattened into one axis: all weights of a head sum to one."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.mT / math.sqrt(self.head_dim)
        weights = scores.flatten(2).softmax(-1).view_as(scores)
        return self.merge(weights @ value)
