"""The formula is right, the numbers are not."""

import torch

from .bases import Divided, HeadsAsBatch
from .entry import bug
from .products import AsPrinted


@bug("non_finite", 33, 3, scale=None)
class NanWeights(AsPrinted):
    """One weight of the key's projection is not a number."""

    @torch.no_grad
    def add_parts(self):
        self.k_proj.weight[5, 7] = torch.nan


@bug("non_finite", 51, 3, scale=None)
class InfiniteWeights(AsPrinted):
    @torch.no_grad
    def add_parts(self):
        self.q_proj.weight[5, 7] = torch.inf


@bug("exploding", 39, 3, init=150.0)
class Exploding(AsPrinted):
    """Scores beyond 10,000, after which no published run recovered."""


@bug("sharp", 57, 3, init=6.0)
class Saturated(AsPrinted):
    """Projections six times too wide: a spread of 36, one key a row."""


@bug("sharp", 69, 3, init=5.0)
class SaturatedBmm(Divided, HeadsAsBatch):
    """Behind other code."""
