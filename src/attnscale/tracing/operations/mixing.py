"""Weights of a softmax that meet values: along which axis, what a row of them sums to, whose values they are."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnscale.numerics import is_surely_finite
from attnscale.tracing.following import Trail, channels, follow
from attnscale.tracing.lineage import Node
from attnscale.tracing.parameters import Origin
from attnscale.tracing.roles import Softmax, Weights

MOST_ENTRIES = 256  # heads of batch entries whose key and value are looked up
NOTHING = 1e-6  # a row that weighs less was hidden as a whole


class Mixture(NamedTuple):
    """Weights as they met values, and what they made of them."""

    weights: Tensor
    output: Tensor


def mix(
    softmax: Softmax, weights: Node, axis: int, values: Origin | None = None, mixture: Mixture | None = None
) -> None:
    """Values are summed along `axis` of these weights: note whether that is the axis which sums to one."""
    softmax.meets_values(values)
    if weights.shape[axis] < 2:
        return
    points = np.zeros((2, len(weights.shape)), dtype=np.int64)
    points[1, axis] = 1
    for trail in follow(weights, points):
        role = trail.node.role
        if len(trail.points) == 2 and isinstance(role, Weights) and role.softmax is softmax:
            moves = (trail.points[0] != trail.points[1]).nonzero()[0]
            softmax.mixes(bool((moves == softmax.axis).any()) or trail.blended, float(trail.factor[0]))
            softmax.is_masked |= bool(trail.fills)
            softmax.drops |= trail.dropped
            softmax.is_obscure |= trail.blended or trail.added
            if mixture is not None and not softmax.is_short and _are_untouched(weights):
                softmax.measured(None, _undefined(mixture))
            elif mixture is not None:
                softmax.measured(*_measured(mixture.weights.detach(), axis, weights.shape[axis], trail, softmax))


def _undefined(mixture: Mixture) -> Tensor:
    """Whether any of the weights is NaN; what they mixed, which is less, would then be NaN too."""
    return torch.tensor(False) if is_surely_finite(mixture.output) else mixture.weights.detach().isnan().any()


def _measured(weights: Tensor, axis: int, length: int, trail: Trail, softmax: Softmax) -> tuple[Tensor | None, Tensor]:
    """How far the sum of a row of weights is from one, at most, where nothing but a mask explains it; any NaN."""
    sums = weights.sum(axis, dtype=torch.promote_types(weights.dtype, torch.float32))
    undefined = torch.isnan(sums).any()
    if trail.blended or trail.added or trail.dropped or trail.node.shape[softmax.axis] != length:
        return None, undefined
    sums = sums / float(trail.factor[0])
    off = torch.where(sums.abs() > NOTHING, (sums - 1).abs(), 0.0)
    return off.nan_to_num(0.0).amax(), undefined


def _are_untouched(weights: Node) -> bool:
    """Whether nothing but moving happened to the weights of a softmax, which was seen to sum to one."""
    while len(weights.steps) == 1 and weights.steps[0].moves:
        weights = weights.steps[0].parent
    return not weights.steps


def pair_heads(softmax: Softmax, weights: Node, values: Node) -> None:
    """Note whether heads that share a key share its value as well, where both are shared by as many."""
    keys_of, softmax.keys_of = softmax.keys_of, None  # which holds on to the product
    if keys_of is None or len(weights.shape) != 3 or len(values.shape) != 3 or weights.shape[0] < 4:
        return
    points = np.zeros((min(weights.shape[0], MOST_ENTRIES), 3), dtype=np.int64)
    points[:, 0] = np.arange(len(points))
    found: list[tuple[object, ...]] = [()] * len(points)
    for trail in follow(weights, points):
        if isinstance(trail.node.role, Weights) and trail.node.role.softmax is softmax:
            for at, key in zip(trail.index, keys_of(trail.points), strict=True):
                found[at] = key
    softmax.pairs_differ |= are_paired_otherwise(found, channels(values, points))


def are_paired_otherwise(keys: list[tuple[object, ...]], values: list[tuple[object, ...]]) -> bool:
    """Whether heads are grouped by their keys in one way and by their values in another, into as many groups."""
    if () in keys or () in values:
        return False
    groups = len(set(keys))
    return 1 < groups == len(set(values)) < len(set(zip(keys, values, strict=True)))
