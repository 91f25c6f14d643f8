"""Kept: a call as a whole, so that other scales can be tried on what it really did."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnscale.numerics import wide_dtype
from attnscale.tracing.coordinates import NOWHERE, grid
from attnscale.tracing.following import follow
from attnscale.tracing.lineage import Node
from attnscale.tracing.roles import Softmax, Weights
from attnscale.visibility import EVERYTHING, Visibility
from attnscale.watching.written.axes import Axes

ROUNDING = 1e-5  # of the largest score: what is left of scores beyond it was added to them


@dataclass(eq=False)
class Kept:
    """One call: its scores are scales · q·k, soft-capped, and what its visibility adds and hides.

    Where every query has keys of its own, each is an entry of the batch.
    """

    query: Tensor  # (batch, heads, queries, features), as it left its projection
    key: Tensor  # (batch, key heads, keys, features)
    scales: Tensor  # a value a head
    visibility: Visibility = EVERYTHING
    softcap: float | None = None
    value: Tensor | None = None  # None where it is not known which one met the weights

    def weights(self, head: int) -> Tensor:
        """What softmax made of the scores of the first entry, (queries, keys); zeros where a query sees nothing."""
        query, key = self.query[0, head], self.key[0, head // (self.query.shape[1] // self.key.shape[1])]
        scores = query.to(wide_dtype(query)) @ key.to(wide_dtype(key)).mT * float(self.scales[head])
        scores = scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)
        seen = self.visibility.at(0, slice(head, head + 1))
        added = seen.added(slice(0, scores.shape[-2]), slice(0, scores.shape[-1]), scores)
        scores = scores if added is None else scores + added.reshape(-1, *added.shape[-2:])[0]
        return scores.softmax(-1).nan_to_num(0.0)


def added_to(predicted: Tensor, scores: Tensor, visible: Tensor | None) -> Visibility:
    """What made scores, (batch, heads, rows, keys), of those that were predicted: a mask, or all that was added."""
    rest = scores - predicted
    shown = rest if visible is None else rest.masked_fill(~visible, 0.0)
    if bool(shown.abs().amax() > ROUNDING * predicted.abs().amax()) if shown.numel() else False:
        return Visibility(mask=rest if visible is None else rest.masked_fill(~visible, -math.inf))
    return EVERYTHING if visible is None else Visibility(mask=visible)


def values_met(axes: Axes, softmax: Softmax, weights: Node, values: Tensor, side: int) -> Tensor | None:
    """The values of every head, (batch, heads, keys, features), where weights (…, rows, keys) of it meet them.

    `side` is 0 where the weights stand left of the values, 1 where they stand right of their transpose.
    """
    values = values.mT if side else values
    if values.dim() != 3 or len(weights.shape) != 3:
        return None
    entries, *sizes = weights.shape
    rows = sizes[side]
    points = grid(entries, 1, rows) if side else grid(entries, rows, 1)
    place = np.full(math.prod(axes.shape[at] for at in axes.other_axes), NOWHERE)
    for trail in follow(weights, points):
        if not isinstance(trail.node.role, Weights) or trail.node.role.softmax is not softmax:
            return None
        element = np.ravel_multi_index(tuple(trail.points.T), trail.node.shape)
        at = np.unravel_index(element, axes.shape)
        other = np.ravel_multi_index(
            tuple(at[axis] for axis in axes.other_axes) or (np.zeros_like(element),),
            tuple(axes.shape[axis] for axis in axes.other_axes) or (1,),
        )
        place[other] = points[trail.index, 0]
    found = place[axes.groups]
    return None if (found == NOWHERE).any() else values.detach()[found]
