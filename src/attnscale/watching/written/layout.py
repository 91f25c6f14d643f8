"""Where an attention that is written out has its heads, queries and keys, as numbers alone, which a graph can hold.

Batch and lengths may change from step to step; the order of axes may not.
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from attnscale.tracing.coordinates import Shape
from attnscale.visibility import HIDING_GAP, NEVER_A_SCORE
from attnscale.watching.hiding import is_bias

if TYPE_CHECKING:
    from attnscale.watching.call import Factors, SeenCall
    from attnscale.watching.written.axes import Axes
    from attnscale.watching.written.written_call import WrittenCall
import math
from typing import TYPE_CHECKING, NamedTuple

from attnscale.tracing.lineage import Node
from attnscale.tracing.product import Product

if TYPE_CHECKING:
    from attnscale.watching.call import Factors, SeenCall
    from attnscale.watching.written.written_call import WrittenCall


PARTS = ";"  # between what a code says
AXES = ","


@dataclass(frozen=True)
class Layout:
    """The input of a softmax, and the operands (entries, …, …) of the product that it is an image of."""

    order: tuple[int, ...]  # axes of the scores: those of entries and heads, then queries, then keys
    heads: int
    heads_are_first: bool  # before the entries of a batch
    keys_are_right: bool  # q @ kᵀ, not k @ qᵀ

    @property
    def code(self) -> str:
        """All of it as text, which a graph holds as a constant, in whichever process it runs."""
        flags = (int(flag) for flag in (self.heads_are_first, self.keys_are_right))
        return PARTS.join(map(str, (AXES.join(map(str, self.order)), self.heads, *flags)))

    def scores_by_head(self, scores: Tensor) -> Tensor:
        """(batch, heads, queries, keys), a view where that can be."""
        turned = scores if self.order == tuple(range(scores.dim())) else scores.permute(self.order)
        if turned.dim() == 4 and not self.heads_are_first and turned.shape[1] == self.heads:
            return turned
        return self._by_head(turned.flatten(0, -3) if turned.dim() > 2 else turned.unsqueeze(0))

    def operands(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, (batch, heads, length, features), of the product or of its gradients."""
        query, key = (left, right.mT) if self.keys_are_right else (right.mT, left)
        return self._by_head(query), self._by_head(key)

    def fits(self, scores: Tensor, left: Tensor, right: Tensor) -> bool:
        """Whether tensors are such as this is the layout of."""
        if (scores.dim(), left.dim(), right.dim()) != (len(self.order), 3, 3) or len(left) % self.heads:
            return False
        queries, keys = (scores.shape[axis] for axis in self.order[-2:])
        product = (left.shape[1], right.shape[2])
        sizes = (queries, keys) if self.keys_are_right else (keys, queries)
        return product == sizes and scores.numel() == len(left) * queries * keys

    def _by_head(self, entries: Tensor) -> Tensor:
        sizes = (self.heads, -1) if self.heads_are_first else (-1, self.heads)
        apart: Tensor = entries.unflatten(0, sizes)
        return apart.transpose(0, 1) if self.heads_are_first else apart


@cache
def layout_from(code: str) -> Layout:
    """The layout that a code says."""
    order, heads, *flags = code.split(PARTS)
    first, right = (bool(int(flag)) for flag in flags)
    return Layout(tuple(map(int, order.split(AXES))), int(heads), first, right)


@dataclass(frozen=True, eq=False)
class WrittenPlan:
    """What a plan says of an attention that is written out: nothing but the numbers of its tensors may change."""

    layout: Layout
    multiplier: "Factors"  # of the product on its way to the softmax, a value a head
    is_constant: bool  # which the code gives as a number
    is_uneven: bool  # some rows see less than others


def written_plan(call: "WrittenCall", seen: "SeenCall", shape: Shape) -> WrittenPlan | None:
    """Return the plan of a call whose scores have this shape; None where no probe can be placed."""
    if not all(way.constant for way in call.ways) or not is_only_a_product(call, seen):
        return None
    layout = layout_of(call.axes) if call.axes.shape == shape else None
    if layout is None or not layout.fits(call.scores, call.axes.product.left, call.axes.product.right):
        return None
    at = call.probed.arrival.at.reshape(call.heads, -1, 3)
    row = at[..., 1 if layout.keys_are_right else 2]
    if (at[:, 0, 0] != call.axes.groups[0]).any() or (row != call.probe.numpy()).any():
        return None  # the product has its entries, or its rows, in another order
    _, visible = call.rows_at(call.probe)
    return WrittenPlan(layout, call.probed.multiplier.mean(1), call.trail.constant, visible is not None)


def is_only_a_product(call: "WrittenCall", seen: "SeenCall") -> bool:
    """Whether scores are a multiple of q·k, soft-capped perhaps, and what is hidden is so by a number like no other."""
    trail, axes = call.trail, call.axes
    if trail.blended or trail.dropped or trail.other_scores or trail.learned_terms or len(trail.caps) > 1:
        return False
    if axes.over_pairs or axes.between_channels or seen.softcap_discarded or call.finite_gaps:
        return False
    if any(NEVER_A_SCORE < fill <= -HIDING_GAP for fill in trail.fills) or seen.reading.inert_fill is not None:
        return False
    if seen.biased or any(is_bias(bias) for bias, _ in call.biases):
        return False
    return seen.sinks is None and not call.probed.arrival.shift.any()


def layout_of(axes: "Axes") -> Layout | None:
    """Where heads, queries and keys stand; None where they have no such order."""
    if axes.product.left.dim() != 3 or len(axes.query_axes) != 1:
        return None
    if (axes.columns != np.arange(len(axes.columns))).any():
        return None
    last = (*axes.query_axes, axes.key_axis)
    lead = [axis for axis in range(len(axes.shape)) if axis not in (*axes.other_axes, *last)] + list(axes.other_axes)
    batch, heads = axes.groups.shape
    every = np.arange(batch * heads)
    if (axes.groups == every.reshape(batch, heads)).all():
        return Layout((*lead, *last), heads, False, axes.keys_are_right)
    if (axes.groups == every.reshape(heads, batch).T).all():
        return Layout((*lead, *last), heads, True, axes.keys_are_right)
    return None


ORDER = (0, 1, 2, 3)  # of batch, heads, queries and keys


class OwnFactors(NamedTuple):
    """By what SDPA multiplied the queries, and the keys, that it was given: √|scale|, the first with its sign."""

    query: float
    key: float


def own_factors(product: Product) -> OwnFactors | None:
    """Of a product that SDPA made; None where its operations are others than is known of it."""
    query, key = _multiplied_last(product.left_node), _multiplied_last(product.right_node)
    return None if query is None or key is None or not math.isclose(abs(query), key) else OwnFactors(query, key)


def factors_before(call: "WrittenCall", seen: "SeenCall", shape: Shape) -> "tuple[Factors, Factors] | None":
    """What multiplied queries and keys until SDPA was given them, its scores of this shape.

    None where it must be followed every time: of other axes than (batch, heads, queries, keys) among them.
    """
    own = own_factors(call.axes.product)
    if own is None or not all(way.constant for way in call.ways) or not is_only_a_product(call, seen):
        return None
    if call.axes.shape != shape or layout_of(call.axes) != Layout(ORDER, shape[1], False, True):
        return None
    query, key = (way.factor.mean(1) for way in call.ways)
    return query / own.query, key / own.key


def _multiplied_last(node: Node) -> float | None:
    """The number, one perhaps, by which a value was multiplied, and only moved since."""
    while len(node.steps) == 1 and node.steps[0].effect in ("times", "same"):
        step = node.steps[0]
        if step.operand is not None:
            return step.operand if isinstance(step.operand, float) else None
        node = step.parent
    return None
