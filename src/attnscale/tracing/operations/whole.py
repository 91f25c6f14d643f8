"""Operations that are made of others and read as one.

In inference mode they arrive whole. Taken apart, a layer of BERT has twice as many operations to read, a product of
heads eight, and a dropout that drops nothing copies its operand.
"""

from collections.abc import Callable

from torch import Tensor

from attnscale.tracing.operations.operation import Operation


def _is_one_product(op: Operation) -> bool:
    """Whether a matmul is a bmm of its operands but for a view of each."""
    left, right = op.args[:2]
    is_of_heads = left.dim() == right.dim() == 4 and left.shape[:2] == right.shape[:2]
    return is_of_heads and _folds(left) and _folds(right)


def _folds(tensor: Tensor) -> bool:
    batch, heads = tensor.shape[:2]
    return batch == 1 or heads == 1 or tensor.stride(0) == heads * tensor.stride(1)


WHOLE: dict[str, Callable[[Operation], bool]] = {
    "linear": lambda op: op.node(1).parameter and len(op.node(1).shape) == 2,  # else a product of two activations
    "layer_norm": lambda op: True,
    "matmul": _is_one_product,
    "dropout": lambda op: not op.argument(2, "train"),
}
