"""The formula is right, the numbers are not."""

import math

import torch
from torch import nn

from .entry import SelfAttention, bug
from .products import AsPrinted


@bug("non_finite", 33, 3, scale=None)
class NanWeights(AsPrinted):
    """One weight of the key's projection is not a number."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        with torch.no_grad():
            self.k_proj.weight[5, 7] = torch.nan


@bug("non_finite", 51, 3, scale=None)
class InfiniteWeights(AsPrinted):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        with torch.no_grad():
            self.q_proj.weight[5, 7] = torch.inf


@bug("exploding", 39, 3, init=150.0)
class Exploding(AsPrinted):
    """Scores beyond 10,000, after which no published run recovered."""


@bug("sharp", 57, 3, init=6.0)
class Saturated(AsPrinted):
    """Projections six times too wide: a spread of 36, one key a row."""


@bug("sharp", 69, 3, init=5.0)
class SaturatedBmm(SelfAttention):
    """The same behind other code."""

    def forward(self, x):
        query, key, value = (y.flatten(0, 1) for y in self.project(x))
        scores = torch.bmm(query, key.mT) / math.sqrt(self.head_dim)
        mixed = torch.bmm(nn.functional.softmax(scores, -1), value)
        return self.merge(mixed.unflatten(0, (x.shape[0], -1)))
