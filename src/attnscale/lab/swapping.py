"""Swapping: another scale for a model of the lab, for a while or for good."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from attnscale.models.transformer import CausalSelfAttention
from attnscale.rules import get_rule

SCALES = {"none": "unscaled", "1/√d_k": "inverse_sqrt", "1/d_k": "inverse_dim"}


def swap_scale(model: nn.Module, scale: str) -> None:
    """Let every attention of the model multiply by this, one of SCALES, from now on; its weights stay."""
    for module in model.modules():
        if isinstance(module, CausalSelfAttention):
            module.scale = get_rule(SCALES[scale])


@contextmanager
def swapped(model: nn.Module, scale: str) -> Iterator[None]:
    """The same, and what each had before comes back."""
    attentions = [module for module in model.modules() if isinstance(module, CausalSelfAttention)]
    before = [module.scale for module in attentions]
    swap_scale(model, scale)
    try:
        yield
    finally:
        for module, scale_before in zip(attentions, before, strict=True):
            module.scale = scale_before
