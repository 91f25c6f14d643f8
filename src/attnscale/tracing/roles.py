"""Role: what a tensor is on the way from a product to the values it mixes, and one rule of how that is passed on.

A role says which effects it survives; under any other, what is left of it takes its place: of anything made from
scores, that it is about them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attnscale.tracing.coordinates import Points
    from attnscale.tracing.lineage import Node
    from attnscale.tracing.parameters import Origin
    from attnscale.tracing.product import Product

Effect = Literal[
    "same", "detach", "drop", "times", "over", "plus", "shift", "fill", "tanh", "norm", "exp", "pair", "other",
]  # fmt: skip
EVERY: frozenset[Effect] = frozenset(get_args(Effect))
ELEMENTWISE = EVERY - {"norm", "exp"}  # a value of the result is still told from one of the operand
MOVED: frozenset[Effect] = frozenset(("same", "detach"))


@dataclass(frozen=True, eq=False)
class Role:
    """What a tensor is; `is_image`: each of its elements stands for one score, weight or mixed value."""

    survives: ClassVar[frozenset[Effect]] = EVERY
    is_image: ClassVar[bool] = False

    @property
    def product(self) -> "Product | None":
        """The product it was made from, where it is not past its softmax."""
        return None

    def after(self, effect: Effect) -> "Role | None":
        """What a result is whose operand is this."""
        return self if effect in self.survives else about(self)


@dataclass(frozen=True, eq=False)
class _OfProduct(Role):
    of: "Product"

    @property
    def product(self) -> "Product":
        """The product it was made from."""
        return self.of


@dataclass(frozen=True, eq=False)
class Scores(_OfProduct):
    """An elementwise image of the product."""

    survives, is_image = ELEMENTWISE, True


@dataclass(frozen=True, eq=False)
class AboutScores(_OfProduct):
    """Any other function of the product, its row maximum for instance."""


@dataclass(frozen=True, eq=False)
class Exponential(_OfProduct):
    """e to scores, some of them set to zero perhaps."""

    survives: ClassVar[frozenset[Effect]] = MOVED | {"fill"}
    is_image = True
    exponent: "Node"


@dataclass(frozen=True, eq=False)
class ExponentialSum(_OfProduct):
    """The sum of such exponentials over an axis of their exponent, plus a small number perhaps."""

    survives: ClassVar[frozenset[Effect]] = MOVED | {"plus"}
    exponent: "Node"
    axis: int


@dataclass(frozen=True, eq=False)
class InverseSum(_OfProduct):
    """One over such a sum."""

    survives = MOVED
    exponent: "Node"
    axis: int


@dataclass(frozen=True, eq=False)
class LogSum(_OfProduct):
    """The logarithm of a sum of exponentials over an axis of the scores; the maximum that was taken off is added."""

    survives: ClassVar[frozenset[Effect]] = MOVED | {"plus"}
    axis: int


@dataclass(frozen=True, eq=False)
class LogWeights(Role):
    """The logarithm of the output of a softmax; None: of one that was not followed to a product."""

    survives, is_image = MOVED, True
    softmax: "Softmax | None"
    over_outputs: bool = False


@dataclass(frozen=True, eq=False)
class Weights(Role):
    """An elementwise image of the output of a softmax."""

    survives, is_image = ELEMENTWISE, True
    softmax: "Softmax"


@dataclass(frozen=True, eq=False)
class AboutWeights(Role):
    """Any other function of the output of a softmax, its sum over another axis for instance."""

    softmax: "Softmax"


@dataclass(frozen=True, eq=False)
class Noise(Role):
    """Zeros and ones drawn at random: what dropout multiplies by."""

    survives: ClassVar[frozenset[Effect]] = MOVED | {"times", "over"}


@dataclass(frozen=True, eq=False)
class LostWeights(Role):
    """The output of a softmax that was not followed to a product, in this module."""

    survives = ELEMENTWISE
    module: str
    over_outputs: bool = False  # of one projection, as those of a router are, which mix outputs of experts


@dataclass(frozen=True, eq=False)
class Mixed(Role):
    """Values, summed with the weights of a softmax."""

    survives: ClassVar[frozenset[Effect]] = MOVED | {"times", "over"}
    is_image = True
    softmax: "Softmax"


@dataclass(frozen=True, eq=False)
class MixedByPowers(_OfProduct):
    """Values, summed with exponentials that are not normalised yet."""

    survives, is_image = MOVED, True
    powers: Tensor
    exponent: "Node"


@dataclass(frozen=True, eq=False)
class Outer(Role):
    """Every pair of elements of two tensors, multiplied; `softmax`: one of the two is its weights."""

    survives: ClassVar[frozenset[Effect]] = frozenset()
    left: Tensor
    right: Tensor
    softmax: "Softmax | None" = None


def about(role: Role | None) -> AboutScores | AboutWeights | None:
    """What is left of a role under an operation that it does not survive."""
    if isinstance(role, (Weights, AboutWeights)):
        return AboutWeights(role.softmax)
    return None if role is None or role.product is None else AboutScores(role.product)


def of_parts(roles: Iterable[Role | None]) -> Role | None:
    """The role of what is put together of parts: of keys and a sink, of pieces of the weights."""
    known = [role for role in roles if role is not None]
    images = [role for kind in (Scores, Weights) for role in known if isinstance(role, kind)]
    return next(iter(images), None) or next(filter(None, map(about, known)), None)


@dataclass(eq=False)
class Softmax:
    """A softmax that ran, over an axis of its input, and what became of its weights."""

    axis: int
    attends: Callable[[], None] | None = None  # told once it is known to be attention
    waits: bool = False  # which it is only if its weights go on to mix values
    mixes_along_axis: bool = True  # values are summed over the axis that sums to one
    factor_after: float = 1.0  # constants that multiply the weights, or the mixed values
    values: "Origin | None" = None  # what its weights mix
    keep: "Callable[[Softmax, Node, Tensor, int], None] | None" = None  # told of weights, values, which stands left
    has_mixed: bool = False  # pieces of the weights may mix several times, multiplied by the same constant
    keys_of: "Callable[[Points], list[tuple[object, ...]]] | None" = None  # of its weights: which channel made the key
    taken_twice: bool = False  # another softmax was taken of its weights
    renormalised: bool = False  # its weights, or what they mixed, were divided by a sum of them
    is_short: bool = False  # by its making: something beside the keys takes a share, as in softmax off by one
    is_masked: bool = False  # some of its weights were replaced
    drops: bool = False  # some of its weights were set to zero at random
    is_obscure: bool = False  # its weights were mixed with others before they met the values
    pairs_differ: bool = False  # heads that share a key do not share its value
    off_one: Tensor | None = None  # of a row of weights where it meets the values: how far its sum is from one
    undefined: Tensor | None = None  # whether weights are NaN where they meet the values

    def ran(self) -> None:
        """Its weights exist."""
        if not self.waits:
            self._tell()

    def meets_values(self, values: "Origin | None") -> None:
        """Its weights are multiplied with values: this is attention."""
        self._tell()
        self.values = values

    def keep_values(self, weights: "Node", values: Tensor, side: int) -> None:
        """These values meet its weights; of several, the first are kept."""
        keep, self.keep = self.keep, None
        if keep is not None:
            keep(self, weights, values, side)

    def mixes(self, along_axis: bool, factor: float) -> None:
        """Values were summed with its weights, which a factor had multiplied."""
        self.mixes_along_axis &= along_axis
        self.factor_after *= 1.0 if self.has_mixed else factor
        self.has_mixed = True

    def measured(self, off_one: Tensor | None, undefined: Tensor) -> None:
        """Its weights met values: the largest distance of a row's sum from one, and whether any are NaN."""
        self.undefined = undefined if self.undefined is None else self.undefined | undefined
        if off_one is not None:
            self.off_one = off_one if self.off_one is None else torch.maximum(self.off_one, off_one)

    def scaled(self, factor: float) -> None:
        """The mixed values were multiplied by a constant: the scores should have been."""
        self.factor_after *= factor

    def _tell(self) -> None:
        tell, self.attends = self.attends, None
        if tell is not None:
            tell()
