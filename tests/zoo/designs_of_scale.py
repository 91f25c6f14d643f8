"""Designs whose multiplier is not 1/√d_k, and is not the same in every row or layer; all of them are right.

What cannot be read of them may be said in a note; none gets a warning or an error.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .bases import Causal, SelfAttention, note
from .entry import Expected, correct, enter


@correct(46, 2, scale=None)
class ScalableSoftmax(SelfAttention):
    """SSMax by hand: scores times s·ln n, s learned for each head."""

    def add_parts(self):
        self.s = nn.Parameter(torch.full((self.heads, 1, 1), 0.43))

    def scale_product(self, product):
        return self.s * math.log(product.shape[-1]) * product / math.sqrt(self.head_dim)


@correct(69, 3, scale=None, causal=True)
class ScalableSoftmaxCausal(Causal):
    """SSMax by row: n is what each row sees, and the query is multiplied."""

    def add_parts(self):
        self.s = nn.Parameter(torch.full((self.heads, 1, 1), 0.43))

    def prepare(self, query, key):
        length = torch.arange(1, query.shape[2] + 1).float().log()[:, None]
        return query * (self.s * length), key


@correct(34, 2, scale=None, causal=True, step="attend", base=ScalableSoftmaxCausal)
def scalable_softmax_in_a_kernel(self, query, key, value):
    note(self, lambda: self.adjust(query @ key.mT * self.head_dim**-0.5))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@correct(38, 2)
class ScaledAlibi(SelfAttention):
    """Falcon's: slopes added to q·k, and both multiplied by 1/√d_k, by a scale the module names."""

    def add_parts(self):
        self.inv_norm_factor = 1.0 / math.sqrt(self.head_dim)

    def scale_product(self, product):
        slopes = torch.tensor([2.0 ** -(8 * (head + 1) / self.heads) for head in range(self.heads)])
        alibi = slopes[:, None, None] * torch.arange(product.shape[-1])
        scores = product + alibi
        return scores * self.inv_norm_factor


@correct(64, 4, scale=0.5, causal=True, step="multiplier", base=Causal, kept_as="softmax_scale")
def maximal_update(self):
    """muP's √64/d_k, said in the module. With 16 features and 4 heads it is also 1/√heads."""
    return 8.0 / self.head_dim


class ScaledByLayer(SelfAttention):
    """GPT-2's: divided by the number of the layer as well; in the second of 16 features that is 1/√64."""

    def __init__(self, *args, layer_idx):
        super().__init__(*args)
        self.layer_idx, self.scale_attn_by_inverse_layer_idx = layer_idx, True

    def scale_product(self, product):
        return product / math.sqrt(self.head_dim) / (self.layer_idx + 1)


enter(
    "designs_of_scale.ScaledByLayer",
    lambda: (
        nn.Sequential(*(ScaledByLayer(64, 4, layer_idx=index) for index in range(3))),
        (torch.randn(2, 13, 64),),
    ),
    {str(index): Expected(4, 16, 0.25 / (index + 1), 4) for index in range(3)},
)
