"""SDPA that ran as the operations it is made of, as on a CPU where it drops weights: what is its own, taken out again.

It multiplies queries and keys by the root of its scale each, and then them by each other. Inside a model's run the
function is seen with what it was given, so such a call is known there as that of a kernel.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

from attnscale.tracing.coordinates import Shape
from attnscale.tracing.lineage import Node
from attnscale.tracing.product import Product
from attnscale.watching.written.layout import Layout, is_only_a_product, layout_of

if TYPE_CHECKING:
    from attnscale.watching.call import Factors, SeenCall
    from attnscale.watching.written.written_call import WrittenCall

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
