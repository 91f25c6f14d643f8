"""Which scores were hidden by a mask, whatever number the model uses for −∞."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from attnscale.visibility import Visibility

# Below this no score is one: −1e9, −1e20 and the lowest numbers of float32 and bfloat16 lie under it.
NEVER_A_SCORE = -1e8
# A mask of two values this far apart hides the lower: e^−50 is nothing. Swin subtracts 100, old BERTs 10,000.
HIDING_GAP = 50.0


def hiding_gap(mask: Tensor) -> float | None:
    """How far apart the two values of a mask lie; None where it takes others, as a position bias does."""
    low, high = (float(value) for value in mask.aminmax()) if mask.numel() else (0.0, 0.0)
    if math.isnan(low) or not high - low >= HIDING_GAP:
        return None
    two_valued = bool(((mask == low) | (mask == high)).all())
    return high - low if two_valued or low <= NEVER_A_SCORE else None


def hidden_by(bias: Tensor, gap: float) -> Tensor:
    """Which elements of a row are below its highest bias by about the gap."""
    return bias < bias.amax(-1, keepdim=True) - 0.5 * min(gap, -NEVER_A_SCORE)


def shown_by(mask: Tensor) -> Tensor:
    """Which elements a mask shows, of booleans or of floats that are added."""
    if mask.dtype == torch.bool:
        return mask
    gap = hiding_gap(mask)
    if gap is None or math.isinf(gap):
        return mask != -math.inf
    return mask >= mask.amax() - 0.5 * min(gap, -NEVER_A_SCORE)


def keys_nobody_sees(mask: Tensor | None) -> Tensor | None:
    """Which keys a mask (…, queries or 1, keys) hides from every query and head, (batch or 1, keys); None: unknown."""
    if mask is None or mask.dim() < 2:
        return None
    shown = shown_by(mask).any(-2)
    return ~(shown.any(-2) if shown.dim() > 2 else shown if shown.dim() == 2 else shown.unsqueeze(0))


def with_infinite_mask(visibility: Visibility) -> Visibility:
    """The same with −∞ for what its mask hides."""
    mask = visibility.bias
    return visibility if mask is None else replace(visibility, mask=mask.masked_fill(~shown_by(mask), -math.inf))
