"""How surely an attention written out was read: what its operations say, held to the scores themselves."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnscale.numerics import HALF_DTYPES
from attnscale.tracing.following import Trail
from attnscale.visibility import HIDING_GAP
from attnscale.watching.hiding import flags_added
from attnscale.watching.reading import (
    Reading,
    detached_sides,
    differs_by_row,
    lost_on_the_way,
    rescaled_sides,
    scale_after_cap,
)

if TYPE_CHECKING:
    from attnscale.watching.written.written_call import WrittenCall

EXPLAINED = 0.9  # of the variance of scores by q·k, where nothing else is said to be in them


class Fit(NamedTuple):
    """Of scores on what was predicted of them, a value a head."""

    slope: Tensor
    explained: Tensor  # R²


def reading_of(call: "WrittenCall", fitted: Fit | None, fill: float | None) -> Reading:
    """What is known of the way to the softmax; `fitted` where nothing but q·k should be in the probed rows."""
    query, key = call.ways
    return Reading(
        _unread(call, fitted),
        call.trail.learned_terms,
        query.learned_factor or key.learned_factor or call.trail.learned_factor,
        detached_sides(query, key),
        call.trail.dropped,
        fill,
        next((added * by for bias, by in call.biases if (added := flags_added(bias)) is not None), None),
        scale_after_cap(call.trail.after_caps) if call.trail.caps else None,
        rescaled_sides(query, key),
    )


def inert_fill(trail: Trail, scores: Tensor, shown: Tensor) -> float | None:
    """What a mask put in the place of some keys of a row, not of all, and is a score like any other."""
    for fill in trail.fills:
        filled = (scores == scores.new_tensor(fill)) & shown
        if abs(fill) < HIDING_GAP and bool((filled.any(-1) & ~filled.all(-1)).any()):
            return fill
    return None


def fit(predicted: Tensor, scores: Tensor, shown: Tensor) -> Fit:
    """Slope of scores (heads, rows, keys) on what was predicted of them, each row with its own intercept, and R²."""
    both = torch.stack([predicted, scores]).double()
    if shown.device.type == "cpu" and bool(shown.all()):  # of a GPU it is not asked: that would be to wait for it
        both -= both.mean(-1, keepdim=True)
    else:
        count = shown.sum(-1, keepdim=True).clamp(min=1)
        both = both.masked_fill(~shown, 0.0)
        both = (both - both.sum(-1, keepdim=True) / count).masked_fill(~shown, 0.0)
    x, y = both.flatten(2)
    together, own, total = (x * y).sum(-1), x.square().sum(-1), y.square().sum(-1)
    return Fit(_or_one(together / own), _or_one(together.square() / (own * total)))


def _or_one(values: Tensor) -> Tensor:
    return torch.where(torch.isfinite(values), values, 1.0)


def _unread(call: "WrittenCall", fitted: Fit | None) -> str:
    """Why the multiplier cannot be judged; empty where it can."""
    if call.axes.between_channels:
        return "its product sums over positions: channels attend to channels, and d_k is the length"
    if call.trail.blended:
        return "an operation between its product and its softmax was not understood"
    if call.trail.shared_out:
        return "q·k is one of several terms, by a learned share"
    why = lost_on_the_way(*call.ways) or differs_by_row(call.stated)
    if why or fitted is None or call.axes.product.left.dtype in HALF_DTYPES:
        return why
    explained = float(fitted.explained.min())
    return f"q·k as it was read explains {explained:.0%} of the scores" if explained < EXPLAINED else ""
