"""Layout: the order of batch, heads, queries and keys in hand-written attention, as constants for a compiled graph.

Batch size and lengths may change between steps; the order of axes may not.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from attnscale.tracing.coordinates import Shape
from attnscale.tracing.lineage import Node
from attnscale.tracing.roles import Product
from attnscale.visibility import HIDING_GAP, NEVER_A_SCORE
from attnscale.watching.rows import is_bias

if TYPE_CHECKING:
    from attnscale.watching.layer import Factors, MeasuredCall
    from attnscale.watching.written_call import WrittenCall

ORDER = (0, 1, 2, 3)  # axes of (batch, heads, queries, keys)


class Layout(NamedTuple):
    """Order of axes in a softmax's input, and in the 3-d operands of the product behind it."""

    order: tuple[int, ...]  # axes of the scores: batch and heads first, then queries, then keys
    heads: int
    heads_are_first: bool  # heads before batch entries
    keys_are_right: bool  # q @ kᵀ, not k @ qᵀ

    @property
    def code(self) -> str:
        """The layout as text without spaces, which a compiled graph can store as a constant."""
        return json.dumps(self, separators=(",", ":"))

    def scores_by_head(self, scores: Tensor) -> Tensor:
        """Return scores as (batch, heads, queries, keys), a view where possible."""
        turned = scores if self.order == tuple(range(scores.dim())) else scores.permute(self.order)
        if turned.dim() == 4 and not self.heads_are_first and turned.shape[1] == self.heads:
            return turned
        return self._by_head(turned.flatten(0, -3) if turned.dim() > 2 else turned.unsqueeze(0))

    def operands(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys, (batch, heads, length, features), of the product or of its gradients."""
        query, key = (left, right.mT) if self.keys_are_right else (right.mT, left)
        return self._by_head(query), self._by_head(key)

    def fits(self, scores: Tensor, left: Tensor, right: Tensor) -> bool:
        """Return True if these tensors can have this layout."""
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
    """Return the layout with this code."""
    order, *others = json.loads(code)
    return Layout(tuple(order), *others)


@dataclass(frozen=True, eq=False)
class WrittenPlan:
    """Plan of a hand-written attention, valid as long as only the values of its tensors change."""

    layout: Layout
    multiplier: "Factors"  # factor between the product and the softmax, one value per head
    is_constant: bool  # the multiplier is a number in the code
    is_uneven: bool  # some rows see fewer keys than others


def written_plan(call: "WrittenCall", seen: "MeasuredCall", shape: Shape) -> WrittenPlan | None:
    """Return the plan of a call with scores of this shape; None if no probe can be placed."""
    layout = layout_of(call) if call.axes.source.shape == shape and is_only_a_product(call, seen) else None
    if layout is None:
        return None
    _, visible = call.rows_at(call.probe)
    return WrittenPlan(layout, call.multiplier.mean(1), call.trace.constant, visible is not None)


def is_only_a_product(call: "WrittenCall", seen: "MeasuredCall") -> bool:
    """Return True if scores are a constant multiple of q·k, perhaps soft-capped, and hidden scores are recognisable."""
    trace, axes = call.trace, call.axes
    if seen.factors is None or trace.blended or trace.dropped or trace.other_scores or trace.learned_terms:
        return False
    if len(trace.caps) > 1 or axes.over_pairs or axes.between_channels or seen.wiring.softcap_discarded:
        return False
    if any(NEVER_A_SCORE < fill <= -HIDING_GAP for fill in trace.fills) or seen.reading.inert_fill is not None:
        return False
    if call.finite_gaps or seen.wiring.biased or any(is_bias(bias) for bias, _ in call.biases):
        return False
    return seen.sinks is None and not call.probed.shift.any()


def layout_of(call: "WrittenCall") -> Layout | None:
    """Return the layout of a call; None if no Layout describes it."""
    axes = call.axes
    if call.product.left.dim() != 3 or not axes.is_in_order or axes.query_axes != 1 or call.sink_columns != (0, 0):
        return None
    batch, heads = axes.groups.shape
    every = np.arange(batch * heads)
    for heads_are_first, groups in ((False, every.reshape(batch, heads)), (True, every.reshape(heads, batch).T)):
        if (axes.groups == groups).all():
            return Layout(axes.order, heads, heads_are_first, not axes.view.is_turned)
    return None


def own_factors(product: Product) -> tuple[float, float] | None:
    """Return the factors by which SDPA multiplied queries and keys: √|scale|, the query's with the sign of the scale.

    None if its operations are not recognised.
    """
    query, key = _multiplied_last(product.left_node), _multiplied_last(product.right_node)
    return None if query is None or key is None or not math.isclose(abs(query), key) else (query, key)


def factors_before(call: "WrittenCall", seen: "MeasuredCall", shape: Shape) -> "tuple[Factors, Factors] | None":
    """Return the factors on queries and keys before SDPA, for scores of this shape.

    None if the call must be traced at every step, for example with axes other than (batch, heads, queries, keys).
    """
    own = own_factors(call.product)
    if own is None or seen.factors is None or not is_only_a_product(call, seen):
        return None
    if call.axes.source.shape != shape or layout_of(call) != Layout(ORDER, shape[1], False, True):
        return None
    query, key = seen.factors
    return query / own[0], key / own[1]


def _multiplied_last(node: Node) -> float | None:
    """Return the last number that multiplied a value before it was only moved; None if it was not a number."""
    while len(node.steps) == 1 and node.steps[0].effect in ("times", "same"):
        step = node.steps[0]
        if step.operand is not None:
            return step.operand if isinstance(step.operand, float) else None
        node = step.parent
    return None
