"""Product: two activations multiplied, (…, n, d) × (…, d, m); scores perhaps."""

from dataclasses import dataclass

from torch import Tensor

from attnscale.tracing.lineage import Node


@dataclass(eq=False)
class Product:
    """A product of two activations; `node` is that of its result."""

    left: Tensor
    right: Tensor
    left_node: Node
    right_node: Node
    modules: tuple[str, ...]  # that were running, outermost first
    node: Node
    alpha: float = 1.0
    bias: Tensor | None = None  # added by the same operation
    learned_query: bool = False  # one side is a parameter: attention only if its weights go on to mix values
    capped: bool = False  # a tanh was taken of it
    has_softmax: bool = False  # a softmax of it ran
