"""Product: two activations multiplied, (…, n, d) × (…, d, m); scores perhaps."""

from dataclasses import dataclass

from torch import Tensor

from attnscale.tracing.coordinates import Shape
from attnscale.tracing.lineage import Node


@dataclass(eq=False)
class Product:
    """A product of two activations: it lives as long as what is made of it, so it does not hold its result's node."""

    left: Tensor
    right: Tensor
    left_node: Node
    right_node: Node
    modules: tuple[str, ...]  # that were running, outermost first
    shape: Shape  # of the result,
    token: object  # and that of its node
    alpha: float = 1.0
    bias: Tensor | None = None  # added by the same operation
    learned_query: bool = False  # one side is a parameter: attention only if its weights go on to mix values
    capped: bool = False  # a tanh was taken of it
    has_softmax: bool = False  # a softmax of it ran

    def made(self, node: Node) -> bool:
        """Whether this is the node of its result."""
        return node.token is self.token
