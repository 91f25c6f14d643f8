"""A plugin of pytest: attnscale.attention in the place of F.scaled_dot_product_attention, for who imports it then."""

import types

import torch.nn.functional as F

import attnscale
from attnscale.attending import sdpa

BEFORE = types.ModuleType("functional_before")
vars(BEFORE).update(vars(F))


def pytest_configure() -> None:
    """Ours calls what was there before."""
    sdpa.F = BEFORE
    F.scaled_dot_product_attention = attnscale.attention
