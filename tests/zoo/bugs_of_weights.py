"""The scores are right; what is done around the softmax is not."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .bases import Bare, Causal, Divided, Einsum, HeadsAsBatch, Normed, SelfAttention, Unit, above_diagonal
from .entry import Expected, bug, enter


@bug("weights_not_normalised", 33, 3, step="weigh", base=Divided)
def mask_times_weights(self, scores):
    """The mask multiplies the weights, and nobody divides by what is left."""
    return scores.softmax(-1) * torch.ones(scores.shape[-2:]).tril()


@bug("weights_not_normalised", 39, 3, step="weigh", base=Einsum)
def weights_filled(self, scores):
    """Weights hidden by masked_fill, and einsum."""
    return torch.softmax(scores, dim=-1).masked_fill(above_diagonal(scores.shape[-1]), 0.0)


@bug("weights_not_normalised", 51, 3, step="weigh", base=(Divided, HeadsAsBatch))
def weights_tril(self, scores):
    """Weights hidden by tril, batched by hand."""
    return F.softmax(scores, dim=2).tril()


@bug("softmax_twice", 33, 3, step="weigh", base=Divided)
def softmax_of_softmax(self, scores):
    return F.softmax(scores.softmax(-1), dim=-1)


@bug("softmax_twice", 46, 2, causal=True)
class SoftmaxInAModuleToo(Divided, Causal):
    """One by hand, and one in a module that was meant to be the only one."""

    def add_parts(self):
        self.softmax, self.dropout = nn.Softmax(dim=-1), nn.Dropout(0.0)

    def weigh(self, scores):
        return self.softmax(self.dropout(torch.softmax(scores, -1)))


@bug("dropout_before_softmax", 57, 3, train=True, step="adjust", base=Divided)
def dropout_on_scores(self, scores):
    """A score of zero is not a weight of zero."""
    return F.dropout(scores, 0.2, self.training)


@bug("dropout_before_softmax", 38, 2, train=True, causal=True)
class DropoutModuleOnScores(SelfAttention):
    """Dropout of scores as a module, before the mask."""

    def add_parts(self):
        self.dropout = nn.Dropout(0.1)

    def adjust(self, scores):
        return self.dropout(scores).masked_fill(above_diagonal(scores.shape[-1]), -1e9)


@bug("undefined_rows", 39, 3, causal=None, step="adjust", base=Divided)
def nobody_to_look_at(self, scores):
    """A mask that hides the first key from all, and the diagonal rule that leaves the first query nothing else."""
    hidden = above_diagonal(scores.shape[-1]).clone()
    hidden[:, 0] = True
    return scores.masked_fill(hidden, -torch.inf)


@bug("undefined_rows", 35, 5, causal=None, step="adjust", base=(Divided, Einsum))
def strictly_the_past(self, scores):
    """triu(0) for triu(1): no token sees itself, and the first sees nothing."""
    return scores + torch.full(scores.shape[-2:], -torch.inf).triu(0)


@bug("softcap_before_scale", 66, 3, softcap=30 * 22**-0.5, step="scale_product")
def cap_then_scale(self, product):
    """30·tanh(q·k/30)/√d: capped at 6.4, and bent from there on."""
    return 30.0 * torch.tanh(product / 30.0) / math.sqrt(self.head_dim)


@bug("softcap_before_scale", 57, 3, softcap=50 * 19**-0.5, causal=True)
class CapThenScaleInSteps(Causal):
    softcap = 50.0

    def product(self, query, key):
        return torch.einsum("bhid,bhjd->bhij", query, key)

    def scale_product(self, product):
        scores = product / self.softcap
        scores = torch.tanh(scores)
        scores = scores * self.softcap
        return scores * self.head_dim**-0.5


class Grouped(SelfAttention):
    """Spreads shared keys and values over heads in two ways."""

    def attend(self, query, key, value):
        return super().attend(query, *self.spread(key, value))

    def spread(self, key, value):
        group = self.heads // self.kv_heads
        return key.repeat_interleave(group, dim=1), value.repeat(1, group, 1, 1)


@bug("heads_mispaired", 66, 6, kv_heads=2)
class KeysInterleavedValuesTiled(Grouped, Divided):
    pass


@bug("heads_mispaired", 78, 6, kv_heads=3, causal=True, step="attend", base=Grouped)
def keys_interleaved_values_tiled_in_a_kernel(self, query, key, value):
    return F.scaled_dot_product_attention(query, *self.spread(key, value), is_causal=True)


@bug("heads_mispaired", 52, 4, kv_heads=2, step="spread", base=(Grouped, Divided, Einsum))
def values_expanded_the_other_way(self, key, value):
    """expand before the key heads for the keys, after them for the values."""
    group = self.heads // self.kv_heads
    key = key[:, None].expand(-1, group, -1, -1, -1).flatten(1, 2)
    return key, value[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)


@bug("no_gradient", 33, 3, step="prepare", base=Divided)
def queries_detached(self, query, key):
    return query.detach(), key


@bug("no_gradient", 39, 3, causal=True)
class KeysDetachedForAKernel(SelfAttention):
    def forward(self, x):
        query = self.split(self.q_proj(x))
        key, value = self.split(self.k_proj(x).detach()), self.split(self.v_proj(x))
        return self.merge(F.scaled_dot_product_attention(query, key, value, is_causal=True))


@bug("qk_norm_freezes", 128, 2, scale=1.0)
class NormedAndNotScaled(Normed, Bare):
    """RMSNorm makes vectors of length √d: without a scale the scores spread by √d, whatever the weights."""


@bug("qk_norm_freezes", 48, 3, scale=100.0)
class CosineTimesAHundred(Unit):
    """CLIP's last logit scale, as the first of an attention."""

    def add_parts(self):
        self.logit_scale = nn.Parameter(torch.tensor(100.0).log())

    def scale_product(self, product):
        return self.logit_scale.exp() * product


class Stack(nn.Module):
    """Causal blocks, one of which forgets its mask."""

    def __init__(self, careless=1, layers=4):
        super().__init__()
        self.blocks = nn.ModuleList(OneOfMany(33, 3, is_causal=index != careless) for index in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(33) for _ in range(layers))

    def forward(self, x):
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + block(norm(x))
        return x


class OneOfMany(SelfAttention):
    def __init__(self, *args, is_causal):
        super().__init__(*args)
        self.is_causal = is_causal

    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)


enter(
    "bugs_of_weights.OneLayerSeesTheFuture",
    lambda: (Stack(), (torch.randn(2, 13, 33),)),
    {f"blocks.{index}": Expected(3, 11, 11**-0.5, 3, causal=index != 1) for index in range(4)},
    code="attends_to_future",
)


@bug("dropout_in_evaluation", 33, 3, step="weigh", base=Divided)
def functional_dropout(self, scores):
    """F.dropout drops in evaluation too, unless it is told not to."""
    return F.dropout(scores.softmax(-1), 0.1)


@bug("dropout_in_evaluation", 39, 3, step="attend")
def kernel_dropout(self, query, key, value):
    """As does SDPA."""
    return F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
