"""The right parts in the wrong place, or in none."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .bases import Bare, Divided, HeadsAsBatch, HeadsLast, Kernel, Normed, SelfAttention, above_diagonal
from .entry import bug


@bug("scale_after_softmax", 96, 3, scale=1.0)
@bug("scale_after_softmax", 51, 3, scale=1.0, init=1.0)
class WeightsScaled(Bare):
    """softmax(q·k)/√d: the weights no longer sum to one."""

    def weigh(self, scores):
        return scores.softmax(-1) / math.sqrt(self.head_dim)


@bug("scale_after_softmax", 57, 3, scale=1.0, init=1.0)
class OutputScaled(Bare):
    """softmax(q·k)·v/√d."""

    def mix(self, weights, value):
        return weights @ value * self.head_dim**-0.5


@bug("softmax_wrong_axis", 33, 3)
class OverQueries(Divided):
    def weigh(self, scores):
        return torch.softmax(scores, dim=-2)


@bug("softmax_wrong_axis", 69, 3, causal=True, step="adjust", base=OverQueries)
def over_queries_masked(self, scores):
    """Behind a causal mask."""
    return scores.masked_fill(above_diagonal(scores.shape[-1]), -1e9)


@bug("softmax_wrong_axis", 39, 3, step="weigh", base=Divided)
def over_heads(self, scores):
    return F.softmax(scores, dim=1)


@bug("softmax_wrong_axis", 51, 3)
class OverHeadsOfAnEinsum(Divided, HeadsLast):
    """The last axis, which is the heads'."""

    scored, mixed = "bqhd,bkhd->bqkh", "bqkh,bkhd->bqhd"


@bug("softmax_wrong_axis", 57, 3, step="weigh", base=Divided)
def over_the_batch(self, scores):
    return F.softmax(scores, dim=0)


@bug("softmax_wrong_axis", 38, 2)
class KeysFirstNotTransposed(Divided):
    """k @ qᵀ, and then all as if it were q @ kᵀ."""

    def product(self, query, key):
        return key @ query.mT

    def mix(self, weights, value):
        return weights.mT @ value


class Forgetful(Normed):
    """Norms for query and key that a subclass forgets."""

    prepare = SelfAttention.prepare


@bug("inert_qk_norm", 33, 3)
class NormsNeverCalled(Forgetful, Kernel):
    pass


@bug("inert_qk_norm", 39, 3, step="prepare", base=(Forgetful, Divided))
def norms_thrown_away(self, query, key):
    """Called, and the result not kept."""
    self.q_norm(query)
    self.k_norm(key)
    return query, key


@bug("inert_qk_norm", 51, 3, step="prepare", base=(Forgetful, Kernel))
def norm_of_the_query_alone(self, query, key):
    """The query is normalised, the key's norm forgotten."""
    return self.q_norm(query), key


@bug("inert_qk_norm", 57, 3, causal=True)
class NormsUnderOtherNames(SelfAttention):
    """query_layernorm and key_layernorm, of another kind."""

    def add_parts(self):
        self.query_layernorm, self.key_layernorm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)

    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@bug("inert_softcap", 33, 3)
class KernelIgnoresTheCap(Kernel):
    """An attribute that SDPA knows nothing of."""

    attn_logit_softcapping = 50.0


@bug("inert_softcap", 39, 3)
class CapThrownAway(Divided):
    """tanh computed, and its result not kept."""

    softcap = 30.0

    def adjust(self, scores):
        torch.tanh(scores / self.softcap) * self.softcap
        return scores


@bug("inert_softcap", 51, 3, softcap=1e6)
class CapFarAway(Divided):
    """A cap of a million caps nothing."""

    softcap = 1e6

    def adjust(self, scores):
        return torch.tanh(scores / self.softcap) * self.softcap


@bug("softmax_wrong_axis", 55, 5, step="weigh", base=(Divided, HeadsAsBatch))
def over_queries_of_bmm(self, scores):
    """(batch · heads, queries, keys), and axis 1."""
    return torch.softmax(scores, dim=1)


@bug("softmax_wrong_axis", 46, 2, step="weigh", base=Divided)
def over_all_pairs(self, scores):
    """Queries and keys flattened into one axis: all weights of a head sum to one."""
    return scores.flatten(2).softmax(-1).view_as(scores)
