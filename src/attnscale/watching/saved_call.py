"""SavedCall: the tensors of one call, stored to try other scales on it."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attnscale.numerics import wide_dtype
from attnscale.tracing.coordinates import NOWHERE, grid
from attnscale.tracing.following import ProjectionPath, follow
from attnscale.tracing.lineage import Node
from attnscale.visibility import EVERYTHING, Visibility
from attnscale.watching.axes import Axes, Operands

if TYPE_CHECKING:
    from attnscale.watching.kernels.kernel_call import KernelCall
    from attnscale.watching.layer import Factors
    from attnscale.watching.written_call import WrittenCall

ROUNDING = 1e-5  # relative to the largest score; a larger remainder is a bias


@dataclass(eq=False)
class SavedCall:
    """One call. Scores are scales · q·k, soft-capped, plus the bias and mask in `visibility`.

    If each query has its own keys, each query is a batch entry.
    """

    query: Tensor  # (batch, heads, queries, features), straight from the projection
    key: Tensor  # (batch, key heads, keys, features)
    scales: Tensor  # one value per head
    visibility: Visibility = EVERYTHING
    softcap: float | None = None
    value: Tensor | None = None  # None if it could not be identified

    def weights(self, head: int) -> Tensor:
        """Return a head's weights in the first batch entry, (queries, keys); zeros for rows that see no key."""
        query, key = self.query[0, head], self.key[0, head // (self.query.shape[1] // self.key.shape[1])]
        scores = query.to(wide_dtype(query)) @ key.to(wide_dtype(key)).mT * float(self.scales[head])
        scores = scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)
        seen = self.visibility.at(0, slice(head, head + 1))
        added = seen.added(slice(0, scores.shape[-2]), slice(0, scores.shape[-1]), scores)
        scores = scores if added is None else scores + added.reshape(-1, *added.shape[-2:])[0]
        return scores.softmax(-1).nan_to_num(0.0)


def save_kernel_call(
    call: "KernelCall", scales: "Factors", paths: tuple[ProjectionPath, ProjectionPath], softcap: float | None
) -> SavedCall:
    """Save a kernel call.

    `scales` apply to queries and keys straight from their projections; `paths` describe the operations since.
    """
    query_factor, key_factor = (path.signed_factor for path in paths)
    seen = _visibility(call, scales / (query_factor * np.repeat(key_factor, call.group)), softcap)
    return SavedCall(
        call.query.detach() / _by_head(query_factor, call.query),
        call.key.detach() / _by_head(key_factor, call.key),
        torch.from_numpy(scales),
        seen if call.padding is None else seen.without_rows(call.padding),
        softcap,
        None if call.value is None else call.value.detach(),
    )


def _visibility(call: "KernelCall", multiplier: "Factors", softcap: float | None) -> Visibility:
    if call.score_mod is None:
        seen = call.visibility.with_infinite_mask()
        return seen if seen.mask is None else replace(seen, mask=seen.mask[(None,) * (4 - seen.mask.dim())])
    every = torch.arange(call.query.shape[-2])
    plain = call.scores(every)
    predicted = plain * _by_head(multiplier / call.scale, plain)
    predicted = predicted if softcap is None else softcap * torch.tanh(predicted / softcap)
    return added_to(predicted, *call.score_mod(plain, every))


def save_written_call(call: "WrittenCall", scales: Tensor, padding: Tensor | None) -> SavedCall | None:
    """Save a hand-written call; its visibility holds all parts of the scores besides scales · q·k.

    Return None if its softmax covers more than one query's keys, or has sinks between keys.
    """
    axes, every = call.axes, torch.arange(call.axes.length)
    if axes.over_pairs or sum(_sinks(axes)) != int((axes.columns == NOWHERE).sum()):
        return None
    whole = Operands.of(axes, axes.groups.ravel(), every.numpy())
    query, key = (
        vectors.unflatten(0, axes.groups.shape) / _by_head(path.signed_factor.mean(1), vectors)
        for vectors, path in zip((whole.queries(), whole.keys()), call.paths, strict=True)
    )
    key = F.pad(key, (0, 0, *_sinks(axes))) if _sinks(axes) != (0, 0) else key
    predicted = query @ key.mT * _by_head(scales.numpy(), query)
    predicted = predicted if call.softcap is None else call.softcap * torch.tanh(predicted / call.softcap)
    scores, visible = call.rows_at(every)
    seen = added_to(predicted, scores, visible)
    seen = seen if padding is None else seen.without_rows(padding)
    return SavedCall(query, key, scales, seen, call.softcap)


def save_values(axes: Axes, kept: SavedCall, weights: Node, values: Tensor, side: int) -> None:
    """Save the values that a call's weights multiply; `side` as in values_met()."""
    found = values_met(axes, weights, values, side)
    if found is not None and found.shape[-2] < len(axes.columns):
        found = F.pad(found, (0, 0, *_sinks(axes)))  # sinks have no value
    kept.value = None if found is None or found.shape[-2] != len(axes.columns) else found.to(kept.query.dtype)


def _sinks(axes: Axes) -> tuple[int, int]:
    """Return the number of sinks before and after the keys."""
    shown = np.flatnonzero(axes.columns != NOWHERE)
    return int(shown[0]), int(len(axes.columns) - 1 - shown[-1])


def added_to(predicted: Tensor, scores: Tensor, visible: Tensor | None) -> Visibility:
    """Return the mask or bias that turns predicted scores into scores, (batch, heads, rows, keys)."""
    rest = scores - predicted
    shown = rest if visible is None else rest.masked_fill(~visible, 0.0)
    if bool(shown.abs().amax() > ROUNDING * predicted.abs().amax()) if shown.numel() else False:
        return Visibility(mask=rest if visible is None else rest.masked_fill(~visible, -math.inf))
    return EVERYTHING if visible is None else Visibility(mask=visible)


def values_met(axes: Axes, weights: Node, values: Tensor, side: int) -> Tensor | None:
    """Return the values that weights (…, rows, keys) multiply, as (batch, heads, keys, features); None if unknown.

    `side` is 0 for weights @ values, 1 for valuesᵀ @ weightsᵀ.
    """
    values = values.mT if side else values
    if values.dim() != 3 or len(weights.shape) != 3:
        return None
    entries, *sizes = weights.shape
    rows = sizes[side]
    points = grid(entries, 1, rows) if side else grid(entries, rows, 1)
    place = np.full(math.prod(axes.shape[at] for at in axes.other_axes), NOWHERE)
    for trace in follow(weights, points):
        if trace.node.role is not weights.role:
            return None
        at = np.unravel_index(np.ravel_multi_index(tuple(trace.points.T), trace.node.shape), axes.shape)
        other = np.zeros_like(at[0])
        for axis in axes.other_axes:
            other = other * axes.shape[axis] + at[axis]
        place[other] = points[trace.index, 0]
    found = place[axes.groups]
    return None if (found == NOWHERE).any() else values.detach()[found]


def _by_head(factor: "Factors", like: Tensor) -> Tensor:
    return torch.from_numpy(factor).to(like)[:, None, None]
