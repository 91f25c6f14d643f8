"""Operations that are made of others and read as one.

In inference mode they arrive whole. Taken apart, a layer of BERT has twice as many operations to read, and a dropout
that drops nothing copies its operand.
"""

from collections.abc import Callable

from attnscale.tracing.operations.operation import Operation

WHOLE: dict[str, Callable[[Operation], bool]] = {
    "linear": lambda op: op.node(1).parameter and len(op.node(1).shape) == 2,  # else a product of two activations
    "layer_norm": lambda op: True,
    "dropout": lambda op: not op.argument(2, "train"),
}
