"""A small training run to watch."""

import torch
import torch.nn.functional as F

from attnscale.models import CausalTransformer

VOCABULARY, LENGTH = 31, 13


def small_model(**options):
    torch.manual_seed(0)
    return CausalTransformer(VOCABULARY, d_model=24, layers=2, heads=3, **options)


def batch(size=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (size, LENGTH + 1), generator=generator)


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
