"""Multipliers other than 1/√d_k that a paper recommends: a model that has one needs no explanation."""

import math
from collections.abc import Iterator

from attnscale.rules.log_length import SSMAX_S
from attnscale.rules.mup import MUP_BASE
from attnscale.rules.yarn import sharpening
from attnscale.watching.layer import Layer

STRETCHES = (2, 3, 4, 5, 6, 8, 10, 16, 20, 32, 40, 64, 128)  # of a context, by YaRN: 40 is DeepSeek's
# YaRN's factors for s = 64 and a plain 2 lie 0.3% apart, so a rule must be met more closely than a scale.
CLOSER = 0.1


def is_published(layer: Layer, scale: float, tolerance: float) -> bool:
    """Whether a rule of the literature gives this multiplier, for a plausible choice of its parameter."""
    return any(math.isclose(scale, rule, rel_tol=CLOSER * tolerance) for rule in _rules(layer))


def _rules(layer: Layer) -> Iterator[float]:
    usual = layer.head_dim**-0.5
    yield math.sqrt(MUP_BASE) / layer.head_dim
    yield from (usual * sharpening(stretch) for stretch in STRETCHES)
    if not layer.causal:  # else the multiplier differs from row to row, and the slope is none of them
        yield from (usual * s * math.log(layer.key_len) for s in (SSMAX_S, 1.0))
