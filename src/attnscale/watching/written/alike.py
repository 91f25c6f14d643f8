"""Axes that were found before: layers that are alike move their scores alike from the product to the softmax."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from attnscale.tracing.coordinates import Map
from attnscale.tracing.following import is_image_of
from attnscale.tracing.lineage import Node
from attnscale.tracing.product import Product
from attnscale.watching.written.axes import Axes, find_axes

OF_ONE_CALL = ("product", "node")  # which hold tensors, and are not kept
Likeness = tuple[object, ...]


class AlikeAxes:
    """find_axes() for the softmaxes of one run."""

    def __init__(self) -> None:
        self._found: dict[Likeness, dict[str, Any]] = {}

    def find(self, product: Product, node: Node, axis: int) -> Axes | None:
        """The axes of a softmax over this axis of an image of the product; None where it cannot be followed."""
        likeness = _likeness(product, node, axis)
        known = None if likeness is None else self._found.get(likeness)
        if known is not None:
            return Axes(product, node, **known)
        axes = find_axes(product, node, axis)
        if axes is not None and likeness is not None and axes.node is node:
            own = (each.name for each in fields(axes) if each.name not in OF_ONE_CALL)
            self._found[likeness] = {name: getattr(axes, name) for name in own}
        return axes


def _likeness(product: Product, node: Node, axis: int) -> Likeness | None:
    """All that the axes are told by, where no tensor was put together of several on the way; None elsewhere."""
    scores = _moves(node, lambda each: not product.made(each) and is_image_of(product, each))
    sides = _operand(product.left_node), _operand(product.right_node)
    if scores is None or None in sides or not product.made(scores[1]):
        return None
    return axis, node.shape, product.shape, scores[0], *sides


def _operand(node: Node) -> Likeness | None:
    """How queries, or keys, came from their projection, and which of its outputs are which."""
    found = _moves(node, lambda each: True)
    if found is None:
        return None
    moves, beginning = found
    if beginning.projection is None:
        return moves, node.shape, beginning.shape
    weight = beginning.projection.weight
    return None if weight.steps else (moves, node.shape, beginning.shape, beginning.projection.channel, weight.shape)


def _moves(node: Node, goes_on: Callable[[Node], bool]) -> tuple[tuple[Map | None, ...], Node] | None:
    """What moved the elements of a node, the last first, and where from; None where they come from several."""
    maps = list[Map | None]()
    while node.steps and goes_on(node):
        if len(node.steps) > 1:
            return None
        maps.append(node.steps[0].back)
        node = node.steps[0].parent
    return tuple(maps), node
