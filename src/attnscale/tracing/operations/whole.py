"""Operations that are made of others and read as one.

In inference mode they arrive whole. Taken apart, a layer of BERT has twice as many operations to read, a product of
heads eight, and a dropout that drops nothing copies its operand.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from attnscale.tracing.lineage import Ledger

Condition = Callable[[Ledger, Sequence[Any], Mapping[str, Any]], bool]


def _has_weight(ledger: Ledger, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a linear layer is one, and not a product of two activations."""
    weight = ledger.node(args[1])
    return weight.parameter and len(weight.shape) == 2


def _drops_nothing(ledger: Ledger, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return not (args[2] if len(args) > 2 else kwargs.get("train"))


def _is_one_product(ledger: Ledger, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a matmul is a bmm of its operands but for a view of each."""
    left, right = args[:2]
    is_of_heads = left.dim() == right.dim() == 4 and left.shape[:2] == right.shape[:2]
    return is_of_heads and _folds(left) and _folds(right)


def _folds(tensor: Tensor) -> bool:
    batch, heads = tensor.shape[:2]
    return batch == 1 or heads == 1 or tensor.stride(0) == heads * tensor.stride(1)


WHOLE: dict[str, Condition] = {
    "linear": _has_weight,
    "layer_norm": lambda ledger, args, kwargs: True,
    "matmul": _is_one_product,
    "dropout": _drops_nothing,
}
