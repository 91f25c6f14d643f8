"""Designs whose multiplier is not 1/√d_k, and is not the same in every row or layer; all of them are right.

What cannot be read of them may be said in a note; none gets a warning or an error.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .entry import Entry, Expected, SelfAttention, above_diagonal, correct, enter
from .recording import note


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


@correct(64, 4, scale=0.5, causal=True)
class MaximalUpdate(SelfAttention):
    """muP's √64/d_k, said in the module. With 16 features and 4 heads it is also 1/√heads."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.softmax_scale = 8.0 / self.head_dim

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.mT * self.softmax_scale
        scores = scores.masked_fill(above_diagonal(x.shape[1]), -torch.inf)
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value)


class ScaledByLayer(SelfAttention):
    """GPT-2's: divided by the number of the layer as well; in the second of 16 features that is 1/√64."""

    def __init__(self, *args, layer_idx):
        super().__init__(*args)
        self.layer_idx, self.scale_attn_by_inverse_layer_idx = layer_idx, True

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.mT / math.sqrt(self.head_dim) / (self.layer_idx + 1)
        note(self, scores)
        return self.merge(scores.softmax(-1) @ value)


enter(
    Entry(
        "designs_of_scale.ScaledByLayer",
        lambda: (
            nn.Sequential(*(ScaledByLayer(64, 4, layer_idx=index) for index in range(3))),
            (torch.randn(2, 13, 64),),
        ),
        {str(index): Expected(4, 16, 0.25 / (index + 1), 4) for index in range(3)},
    )
)
