"""Attention written out between two marks: products of activations, and the softmax that one of them comes to.

A mode below autograd sees each operation as it runs or is traced. What is made of a product is followed, however it is
changed on the way, up to the next product; where a softmax is taken of it, the frame is told of both.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from attnscale.torch_internals import DispatchMode
from attnscale.tracing.operations.softmaxes import PLAIN
from attnscale.watching.op_traits import traits_of

PRODUCTS = {"bmm": (0, 1), "baddbmm": (1, 2)}  # which arguments are the operands
PROJECTIONS = frozenset(("mm", "addmm", "convolution", "linear"))  # beyond which nothing is followed


@dataclass(frozen=True, eq=False)
class Written:
    """What a softmax is taken of, over an axis, and the two operands of the product that it was made from."""

    scores: Tensor
    left: Tensor
    right: Tensor
    layout: str  # its code


@dataclass(frozen=True, eq=False)
class _Product:
    left: Tensor
    right: Tensor


class Following(DispatchMode):  # type: ignore[misc]  # torch's own, untyped
    """Sees what runs in a frame, and tells it of every softmax of a product."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, frame: Any) -> None:
        super().__init__()
        self._frame = frame
        self._products: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of what was made of one

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, traits_of(function).name
        if not self._frame.is_innermost:
            return function(*args, **kwargs)
        if name == PLAIN:
            product = self._products.get(args[0])
            if product is not None:
                self._frame.takes_softmax(args[0], args[1], product.left, product.right)
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        if name in PRODUCTS:
            self._products[result] = _Product(*(args[at] for at in PRODUCTS[name]))
        elif name not in PROJECTIONS and isinstance(result, Tensor):
            found = {id(product): product for product in self._products_among((*args, *kwargs.values()))}
            if len(found) == 1:
                self._products[result] = next(iter(found.values()))
        return result

    def _products_among(self, given: tuple[Any, ...]) -> Iterator[_Product]:
        for each in given:
            if isinstance(each, Tensor):
                product = self._products.get(each)
                if product is not None:
                    yield product
            elif isinstance(each, (tuple, list)):
                yield from self._products_among(tuple(each))
