"""The scores are right; what is done around the softmax is not."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .entry import Entry, Expected, SelfAttention, above_diagonal, bug, enter
from .products import AsPrinted


@bug("weights_not_normalised", 33, 3)
class MaskTimesWeights(SelfAttention):
    """The mask multiplies the weights, and nobody divides by what is left."""

    def forward(self, x):
        query, key, value = self.project(x)
        weights = (query @ key.mT / math.sqrt(self.head_dim)).softmax(-1)
        return self.merge((weights * torch.ones(x.shape[1], x.shape[1]).tril()) @ value)


@bug("weights_not_normalised", 39, 3)
class WeightsFilled(SelfAttention):
    """The same by masked_fill, and einsum."""

    def forward(self, x):
        query, key, value = self.project(x)
        weights = torch.softmax(torch.einsum("bhid,bhjd->bhij", query, key) * self.head_dim**-0.5, dim=-1)
        weights = weights.masked_fill(above_diagonal(x.shape[1]), 0.0)
        return self.merge(torch.einsum("bhij,bhjd->bhid", weights, value))


@bug("weights_not_normalised", 51, 3)
class WeightsTril(SelfAttention):
    """The same by tril, batched by hand."""

    def forward(self, x):
        query, key, value = (y.flatten(0, 1) for y in self.project(x))
        weights = F.softmax(torch.bmm(query, key.transpose(1, 2)) / math.sqrt(self.head_dim), dim=2).tril()
        return self.merge(torch.bmm(weights, value).unflatten(0, (x.shape[0], -1)))


@bug("softmax_twice", 33, 3)
class SoftmaxOfSoftmax(SelfAttention):
    def forward(self, x):
        query, key, value = self.project(x)
        weights = (query @ key.mT / math.sqrt(self.head_dim)).softmax(-1)
        return self.merge(F.softmax(weights, dim=-1) @ value)


@bug("softmax_twice", 46, 2, causal=True)
class SoftmaxInAModuleToo(SelfAttention):
    """One by hand, and one in a module that was meant to be the only one."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.softmax, self.dropout = nn.Softmax(dim=-1), nn.Dropout(0.0)

    def forward(self, x):
        query, key, value = self.project(x)
        scores = (query @ key.mT / math.sqrt(self.head_dim)).masked_fill(above_diagonal(x.shape[1]), -torch.inf)
        weights = self.dropout(torch.softmax(scores, -1))
        return self.merge(self.softmax(weights) @ value)


@bug("dropout_before_softmax", 57, 3, train=True)
class DropoutOnScores(SelfAttention):
    """A score of zero is not a weight of zero."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = F.dropout(query @ key.mT / math.sqrt(self.head_dim), 0.2, self.training)
        return self.merge(scores.softmax(-1) @ value)


@bug("dropout_before_softmax", 38, 2, train=True, causal=True)
class DropoutModuleOnScores(SelfAttention):
    """The same, as a module, before the mask."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        query, key, value = self.project(x)
        scores = self.dropout(torch.matmul(query, key.transpose(-2, -1)) * self.head_dim**-0.5)
        return self.merge(scores.masked_fill(above_diagonal(x.shape[1]), -1e9).softmax(-1) @ value)


@bug("undefined_rows", 39, 3, causal=None)
class NobodyToLookAt(SelfAttention):
    """A mask that hides the first key from all, and the diagonal rule that leaves the first query nothing else."""

    def forward(self, x):
        query, key, value = self.project(x)
        hidden = above_diagonal(x.shape[1]).clone()
        hidden[:, 0] = True
        scores = (query @ key.mT / math.sqrt(self.head_dim)).masked_fill(hidden, -torch.inf)
        return self.merge(scores.softmax(-1) @ value)


@bug("undefined_rows", 35, 5, causal=None)
class StrictlyThePast(SelfAttention):
    """triu(0) for triu(1): no token sees itself, and the first sees nothing."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = torch.einsum("bhid,bhjd->bhij", query, key) / self.head_dim**0.5
        scores = scores + torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(0)
        return self.merge(torch.einsum("bhij,bhjd->bhid", F.softmax(scores, dim=-1), value))


@bug("softcap_before_scale", 66, 3, softcap=30 * 22**-0.5)
class CapThenScale(SelfAttention):
    """30·tanh(q·k/30)/√d: capped at 6.4, and bent from there on."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = 30.0 * torch.tanh(query @ key.mT / 30.0)
        return self.merge((scores / math.sqrt(self.head_dim)).softmax(-1) @ value)


@bug("softcap_before_scale", 57, 3, softcap=50 * 19**-0.5, causal=True)
class CapThenScaleInSteps(SelfAttention):
    softcap = 50.0

    def forward(self, x):
        query, key, value = self.project(x)
        scores = torch.einsum("bhid,bhjd->bhij", query, key)
        scores = scores / self.softcap
        scores = torch.tanh(scores)
        scores = scores * self.softcap
        scores = scores * self.head_dim**-0.5
        return self.merge(scores.masked_fill(above_diagonal(x.shape[1]), -torch.inf).softmax(-1) @ value)


class Grouped(SelfAttention):
    """Keys and values shared by heads; a subclass spreads them in two ways."""

    def spread(self, key, value):
        group = self.heads // self.kv_heads
        return key.repeat_interleave(group, dim=1), value.repeat(1, group, 1, 1)


@bug("heads_mispaired", 66, 6, kv_heads=2)
class KeysInterleavedValuesTiled(Grouped):
    def forward(self, x):
        query, key, value = self.project(x)
        key, value = self.spread(key, value)
        return self.merge((query @ key.mT / math.sqrt(self.head_dim)).softmax(-1) @ value)


@bug("heads_mispaired", 78, 6, kv_heads=3, causal=True)
class KeysInterleavedValuesTiledInAKernel(Grouped):
    def forward(self, x):
        query, key, value = self.project(x)
        return self.merge(F.scaled_dot_product_attention(query, *self.spread(key, value), is_causal=True))


@bug("heads_mispaired", 52, 4, kv_heads=2)
class ValuesExpandedTheOtherWay(Grouped):
    """expand before the key heads for the keys, after them for the values."""

    def spread(self, key, value):
        group = self.heads // self.kv_heads
        key = key[:, None].expand(-1, group, -1, -1, -1).flatten(1, 2)
        return key, value[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)

    def forward(self, x):
        query, key, value = self.project(x)
        key, value = self.spread(key, value)
        scores = torch.einsum("bhid,bhjd->bhij", query, key) / math.sqrt(self.head_dim)
        return self.merge(torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), value))


@bug("no_gradient", 33, 3)
class QueriesDetached(SelfAttention):
    def forward(self, x):
        query, key, value = self.project(x)
        return self.merge((query.detach() @ key.mT / math.sqrt(self.head_dim)).softmax(-1) @ value)


@bug("no_gradient", 39, 3, causal=True)
class KeysDetachedForAKernel(SelfAttention):
    def forward(self, x):
        query = self.split(self.q_proj(x))
        key, value = self.split(self.k_proj(x).detach()), self.split(self.v_proj(x))
        return self.merge(F.scaled_dot_product_attention(query, key, value, is_causal=True))


@bug("qk_norm_freezes", 128, 2, scale=1.0)
class NormedAndNotScaled(AsPrinted):
    """RMSNorm makes vectors of length √d: without a scale the scores spread by √d, whatever the weights."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)

    def forward(self, x):
        query, key, value = self.project(x)
        scores = self.q_norm(query) @ self.k_norm(key).mT
        return self.merge(scores.softmax(-1) @ value)


@bug("qk_norm_freezes", 48, 3, scale=100.0)
class CosineTimesAHundred(SelfAttention):
    """CLIP's last logit scale, as the first of an attention."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.logit_scale = nn.Parameter(torch.tensor(100.0).log())

    def forward(self, x):
        query, key, value = self.project(x)
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        return self.merge((self.logit_scale.exp() * (query @ key.mT)).softmax(-1) @ value)


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

    def forward(self, x):
        return self.merge(F.scaled_dot_product_attention(*self.project(x), is_causal=self.is_causal))


enter(
    Entry(
        "bugs_of_weights.OneLayerSeesTheFuture",
        lambda: (Stack(), (torch.randn(2, 13, 33),)),
        {f"blocks.{index}": Expected(3, 11, 11**-0.5, 3, causal=index != 1) for index in range(4)},
        code="attends_to_future",
    )
)


@bug("dropout_in_evaluation", 33, 3)
class FunctionalDropout(SelfAttention):
    """F.dropout drops in evaluation too, unless it is told not to."""

    def forward(self, x):
        query, key, value = self.project(x)
        return self.merge(F.dropout((query @ key.mT / self.head_dim**0.5).softmax(-1), 0.1) @ value)


@bug("dropout_in_evaluation", 39, 3)
class KernelDropout(SelfAttention):
    """As does SDPA."""

    def forward(self, x):
        query, key, value = self.project(x)
        return self.merge(F.scaled_dot_product_attention(query, key, value, dropout_p=0.1))
