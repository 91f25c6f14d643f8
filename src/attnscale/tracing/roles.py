"""Role: what a tensor is on the way from a product to the values that its weights mix, and how that is passed on.

A role says which effects it survives. Under any other effect, a tensor made from scores is a statistic of them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from torch import Tensor

from attnscale.tracing.coordinates import Points, Shape

if TYPE_CHECKING:
    from attnscale.tracing.lineage import Node
    from attnscale.tracing.parameters import Origin

Effect = Literal[
    "same", "detach", "drop", "times", "over", "plus", "shift", "fill", "tanh", "norm", "exp", "pair", "other",
]  # fmt: skip
EVERY: frozenset[Effect] = frozenset(get_args(Effect))
ELEMENTWISE = EVERY - {"norm", "exp"}  # each element of the result belongs to one of the operand
MOVED: frozenset[Effect] = frozenset(("same", "detach"))


@dataclass(eq=False)
class Product:
    """Two activations multiplied, (…, n, d) × (…, d, m): scores perhaps.

    It lives as long as what is made of it, so it does not hold the node of its result.
    """

    left: Tensor
    right: Tensor
    left_node: "Node"
    right_node: "Node"
    modules: tuple[str, ...]  # that were running, outermost first
    shape: Shape  # of the result,
    token: object  # and that of its node
    alpha: float = 1.0
    bias: Tensor | None = None  # added by the same operation
    learned_query: bool = False  # one side is a parameter: attention only if its weights go on to mix values
    capped: bool = False  # a tanh was taken of it
    times_own_tanh: bool = False  # it was multiplied by a tanh of itself, which is no cap
    has_softmax: bool = False  # a softmax of it ran

    def made(self, node: "Node") -> bool:
        """Return True if this is the node of its result."""
        return node.token is self.token


@dataclass(frozen=True, eq=False)
class Role:
    """The role of a tensor; `is_image`: each of its elements belongs to one score, weight or mixed value."""

    survives: ClassVar[frozenset[Effect]] = EVERY
    is_image: ClassVar[bool] = False

    @property
    def product(self) -> Product | None:
        """The product that it was made from; None behind the softmax."""
        return None

    def after(self, effect: Effect) -> "Role | None":
        """Return the role of a result whose operand has this one."""
        return self if effect in self.survives else statistic_of(self)


@dataclass(frozen=True, eq=False)
class _OfProduct(Role):
    of: Product

    @property
    def product(self) -> Product:
        """The product that it was made from."""
        return self.of


@dataclass(frozen=True, eq=False)
class Scores(_OfProduct):
    """An elementwise image of the product."""

    survives, is_image = ELEMENTWISE, True


@dataclass(frozen=True, eq=False)
class ScoreStatistic(_OfProduct):
    """Any other function of the product, its row maximum for instance."""


@dataclass(frozen=True, eq=False)
class Exponentials(_OfProduct):
    """e to the scores; some may be set to zero."""

    survives: ClassVar[frozenset[Effect]] = MOVED | {"fill"}
    is_image = True
    exponent: "Node"


@dataclass(frozen=True, eq=False)
class ExponentialSum(_OfProduct):
    """The sum of exponentials over an axis, its logarithm, or its inverse; a small number may be added."""

    survives: ClassVar[frozenset[Effect]] = MOVED | {"plus"}
    axis: int
    exponent: "Node | None" = None  # None: of the logarithm
    form: Literal["sum", "log", "inverse"] = "sum"


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
class WeightStatistic(Role):
    """Any other function of the output of a softmax, its sum over another axis for instance."""

    softmax: "Softmax"


@dataclass(frozen=True, eq=False)
class UnknownWeights(Role):
    """The output of a softmax that was not followed to a product, in this module."""

    survives = ELEMENTWISE
    module: str
    over_outputs: bool = False  # of one projection, as the softmax of a router is


@dataclass(frozen=True, eq=False)
class DropoutMask(Role):
    """Zeros and ones drawn at random, which dropout multiplies by."""

    survives: ClassVar[frozenset[Effect]] = MOVED | {"times", "over"}


@dataclass(frozen=True, eq=False)
class MixedValues(Role):
    """Values, summed with the weights of a softmax."""

    survives: ClassVar[frozenset[Effect]] = MOVED | {"times", "over"}
    is_image = True
    softmax: "Softmax"


@dataclass(frozen=True, eq=False)
class UnnormalisedMix(_OfProduct):
    """Values, summed with exponentials that are not divided by their sum yet."""

    survives, is_image = MOVED, True
    exponentials: Tensor
    exponent: "Node"


@dataclass(frozen=True, eq=False)
class PairwiseProduct(Role):
    """Every pair of elements of two tensors, multiplied; `softmax`: one of the two is its weights."""

    survives: ClassVar[frozenset[Effect]] = frozenset()
    left: Tensor
    right: Tensor
    softmax: "Softmax | None" = None


def statistic_of(role: Role | None) -> ScoreStatistic | WeightStatistic | None:
    """Return the role of a tensor made from one with this role by an operation that the role does not survive."""
    if isinstance(role, (Weights, WeightStatistic)):
        return WeightStatistic(role.softmax)
    return None if role is None or role.product is None else ScoreStatistic(role.product)


def role_of_parts(roles: Iterable[Role | None]) -> Role | None:
    """Return the role of a concatenation: of keys and a sink, of pieces of the weights."""
    known = [role for role in roles if role is not None]
    images = [role for kind in (Scores, Weights) for role in known if isinstance(role, kind)]
    return next(iter(images), None) or next(filter(None, map(statistic_of, known)), None)


@dataclass(eq=False)
class Softmax:
    """A softmax that ran, over an axis of its input, and what became of its weights."""

    axis: int
    attends: Callable[[], None] | None = None  # called once it is known to be attention
    waits: bool = False  # it is attention only if its weights go on to mix values
    mixes_along_axis: bool = True  # values are summed over the axis that sums to one
    rank: int = 0  # of its input
    axis_of_keys: int | None = None  # over which values are summed, where that is another
    factor_after: float = 1.0  # constants that multiply the weights, or the mixed values
    values: "Origin | None" = None  # what its weights mix
    keep_values: "Callable[[Node, Tensor, int], None] | None" = None  # called with weights, values, the weights' side
    has_mixed: bool = False  # pieces of the weights may mix several times, multiplied by the same constant
    keys_of: Callable[[Points], list[tuple[object, ...]]] | None = None  # points of weights -> outputs that made keys
    taken_twice: bool = False  # another softmax was taken of its weights
    renormalised: bool = False  # its weights, or what they mixed, were divided by a sum of them
    is_short: bool = False  # something beside the keys takes a share, as in softmax off by one
    is_masked: bool = False  # some of its weights were replaced
    drops: bool = False  # some of its weights were set to zero at random
    is_obscure: bool = False  # its weights were mixed with others before they met the values
    pairs_differ: bool = False  # heads that share a key do not share its value
    off_one: Tensor | None = None  # how far the sum of a row of weights is from one where it meets the values
    undefined: Tensor | None = None  # True where weights are NaN as they meet the values

    def ran(self) -> None:
        """Note that its weights exist."""
        if not self.waits:
            self._is_attention()

    def meets_values(self, values: "Origin | None") -> None:
        """Note that its weights are multiplied with values: this is attention."""
        self._is_attention()
        self.values = values

    def mixes(self, along_axis: bool, factor: float, axis: int | None = None) -> None:
        """Note that values were summed with its weights over an axis of them, and what had multiplied the weights."""
        self.mixes_along_axis &= along_axis
        self.axis_of_keys = axis
        self.factor_after *= 1.0 if self.has_mixed else factor
        self.has_mixed = True

    def measured(self, off_one: Tensor | None, undefined: Tensor) -> None:
        """Note the largest distance of a row's sum from one, and whether any weight is NaN."""
        self.undefined = undefined if self.undefined is None else self.undefined | undefined
        if off_one is not None:
            self.off_one = off_one if self.off_one is None else torch.maximum(self.off_one, off_one)

    def _is_attention(self) -> None:
        attends, self.attends = self.attends, None
        if attends is not None:
            attends()
