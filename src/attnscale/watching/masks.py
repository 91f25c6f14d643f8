"""Masks and biases that are added to scores: which keys they hide, and by how much."""

import math

from torch import Tensor

from attnscale.visibility import NEVER_A_SCORE, shown_by


def hiding_gap(mask: Tensor) -> float | None:
    """Return the distance between what a mask shows and what it hides; None where it hides nothing, as a bias does."""
    if not mask.numel():
        return None
    highest, hidden = mask.amax(), mask.masked_fill(shown_by(mask), -math.inf).amax()
    gap = float(highest) - float(hidden)
    return gap if bool((~shown_by(mask)).any()) and not math.isnan(gap) else None


def hidden_by(bias: Tensor, gap: float, highest: float) -> Tensor:
    """Return elements that are about the gap below the highest of their row, or of the mask if it hides a row."""
    return bias < bias.amax(-1, keepdim=True).clamp(min=highest) - 0.5 * min(gap, -NEVER_A_SCORE)


def keys_nobody_sees(mask: Tensor | None) -> Tensor | None:
    """Return which keys a mask (…, queries or 1, keys) hides from every query, (batch or 1, keys); None: unknown."""
    if mask is None or mask.dim() < 2:
        return None
    shown = shown_by(mask).any(-2)
    return ~(shown.any(-2) if shown.dim() > 2 else shown if shown.dim() == 2 else shown.unsqueeze(0))


def is_bias(tensor: Tensor) -> bool:
    """Return True if an added operand is a bias: not a mask, and not zeros."""
    return bool((tensor != 0).any()) and hiding_gap(tensor) is None


def flags_added(bias: Tensor | None) -> float | None:
    """Return what a mask of zeros and ones (or minus ones) adds to scores; None where it is no such mask.

    It has the shape of a mask: a triangle, or the same keys for every query, at one end of them.
    """
    if bias is None or not bias.is_floating_point() or not bias.numel():
        return None
    ends = (float(bias.amin()), float(bias.amax()))
    if ends not in ((0.0, 1.0), (-1.0, 0.0)) or not bool(((bias == ends[0]) | (bias == ends[1])).all()):
        return None
    flags = (bias != 0).reshape(-1, *bias.shape[-2:]) if bias.dim() > 1 else (bias != 0)[None, None]
    return ends[0] or ends[1] if _is_triangle(flags) or _is_padding(flags) else None


def _is_triangle(flags: Tensor) -> bool:
    queries, keys = flags.shape[-2:]
    if queries < 2:
        return False
    past = flags.new_ones(queries, keys)
    offsets = {0, keys - queries}
    shapes = [past.tril(at) for at in offsets] + [past.triu(at + 1) for at in offsets]
    return any(bool((flags == shape).all()) for shape in shapes)


def _is_padding(flags: Tensor) -> bool:
    steps = flags[:, 0].int().diff(dim=-1)
    return bool((flags == flags[:, :1]).all()) and bool((steps.abs().sum(-1) <= 1).all())


def highest_added(bias: Tensor | None) -> float | None:
    """Return the most that a mask of floats adds to what it shows; None where it adds nothing."""
    if bias is None:
        return None
    shown = bias.masked_fill(~shown_by(bias), -math.inf)
    return float(shown.max()) if bool(((shown != 0) & (shown != -math.inf)).any()) else None
