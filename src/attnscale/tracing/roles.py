"""Role: the function of a tensor between a product and mixed values, such as scores or weights.

A role lists the effects it survives. After any other effect, a tensor made from scores is a statistic of them.
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
ELEMENTWISE = EVERY - {"norm", "exp"}  # each element of the result comes from one of the operand
MOVED: frozenset[Effect] = frozenset(("same", "detach"))


@dataclass(eq=False)
class Product:
    """A product of two activations, (…, n, d) × (…, d, m), which may be scores.

    Nodes made from its result refer to it, so it stores no reference to that result's node.
    """

    left: Tensor
    right: Tensor
    left_node: "Node"
    right_node: "Node"
    modules: tuple[str, ...]  # running modules, outermost first
    shape: Shape  # shape of the result
    token: object  # token of the result's node
    alpha: float = 1.0
    bias: Tensor | None = None  # added by the same operation
    learned_query: bool = False  # one side is a parameter: attention only if its weights mix values
    capped: bool = False  # a tanh was applied to it
    times_own_tanh: bool = False  # multiplied by a tanh of itself, which does not bound it
    has_softmax: bool = False  # a softmax was applied to it

    def made(self, node: "Node") -> bool:
        """Return True if this node is the product's result."""
        return node.token is self.token


@dataclass(frozen=True, eq=False)
class Role:
    """Role of a tensor; `is_image` if each element comes from one score, weight or mixed value."""

    survives: ClassVar[frozenset[Effect]] = EVERY
    is_image: ClassVar[bool] = False

    @property
    def product(self) -> Product | None:
        """The product it was made from; None after the softmax."""
        return None

    def after(self, effect: Effect) -> "Role | None":
        """Return the role of the result of an operation on a tensor with this role."""
        return self if effect in self.survives else statistic_of(self)


@dataclass(frozen=True, eq=False)
class _ProductRole(Role):
    of: Product

    @property
    def product(self) -> Product:
        """The product it was made from."""
        return self.of


@dataclass(frozen=True, eq=False)
class Scores(_ProductRole):
    """An elementwise image of the product."""

    survives, is_image = ELEMENTWISE, True


@dataclass(frozen=True, eq=False)
class ScoreStatistic(_ProductRole):
    """Any other function of the product, such as its row maximum."""


@dataclass(frozen=True, eq=False)
class Exponentials(_ProductRole):
    """Exponentials of the scores; some may be set to zero."""

    survives: ClassVar[frozenset[Effect]] = MOVED | {"fill"}
    is_image = True
    exponent: "Node"


@dataclass(frozen=True, eq=False)
class ExponentialSum(_ProductRole):
    """Sum of exponentials over an axis, its logarithm or inverse; a small number may be added."""

    survives: ClassVar[frozenset[Effect]] = MOVED | {"plus"}
    axis: int
    exponent: "Node | None" = None  # None for the logarithm
    form: Literal["sum", "log", "inverse"] = "sum"


@dataclass(frozen=True, eq=False)
class LogWeights(Role):
    """Logarithm of a softmax's output; `softmax` is None if it was not followed to a product."""

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
    """Any other function of a softmax's output, such as its sum over another axis."""

    softmax: "Softmax"


@dataclass(frozen=True, eq=False)
class UnknownWeights(Role):
    """Output of a softmax that was not followed to a product, in this module."""

    survives = ELEMENTWISE
    module: str
    over_outputs: bool = False  # over outputs of one projection, like a router's softmax


@dataclass(frozen=True, eq=False)
class DropoutMask(Role):
    """Random zeros and ones that dropout multiplies by."""

    survives: ClassVar[frozenset[Effect]] = MOVED | {"times", "over"}


@dataclass(frozen=True, eq=False)
class MixedValues(Role):
    """Values summed with the weights of a softmax."""

    survives: ClassVar[frozenset[Effect]] = MOVED | {"times", "over"}
    is_image = True
    softmax: "Softmax"


@dataclass(frozen=True, eq=False)
class UnnormalisedMix(_ProductRole):
    """Values summed with exponentials that are not divided by their sum yet."""

    survives, is_image = MOVED, True
    exponentials: Tensor
    exponent: "Node"


@dataclass(frozen=True, eq=False)
class PairwiseProduct(Role):
    """Products of all pairs of elements of two tensors; one of the two may be the weights of `softmax`."""

    survives: ClassVar[frozenset[Effect]] = frozenset()
    left: Tensor
    right: Tensor
    softmax: "Softmax | None" = None


def statistic_of(role: Role | None) -> ScoreStatistic | WeightStatistic | None:
    """Return the role after an operation that the given role does not survive."""
    if isinstance(role, (Weights, WeightStatistic)):
        return WeightStatistic(role.softmax)
    return None if role is None or role.product is None else ScoreStatistic(role.product)


def role_of_parts(roles: Iterable[Role | None]) -> Role | None:
    """Return the role of a concatenation, such as scores with a sink or pieces of the weights."""
    parts = [role for role in roles if role is not None]
    images = [role for kind in (Scores, Weights) for role in parts if isinstance(role, kind)]
    return next(iter(images), None) or next(filter(None, map(statistic_of, parts)), None)


@dataclass(eq=False)
class Softmax:
    """A softmax that ran over an axis of its input, and how its weights were used."""

    axis: int
    attends: Callable[[], None] | None = None  # called when it proves to be attention
    waits: bool = False  # it is attention only if its weights mix values
    mixes_along_axis: bool = True  # values are summed over the axis that sums to one
    rank: int = 0  # rank of its input
    axis_of_keys: int | None = None  # axis over which values are summed, if it differs
    factor_after: float = 1.0  # constant factor on the weights or the mixed values
    values: "Origin | None" = None  # values that its weights mix
    keep_values: "Callable[[Node, Tensor, int], None] | None" = (
        None  # called with (weights, values, side of the weights)
    )
    has_mixed: bool = False  # pieces of the weights may mix several times with the same factor
    keys_of: Callable[[Points], list[tuple[object, ...]]] | None = None  # maps points of weights to channels of keys
    taken_twice: bool = False  # another softmax was applied to its weights
    renormalised: bool = False  # the weights or mixed values were divided by the weights' sum
    is_short: bool = False  # weights of keys sum to less than one, as in softmax-off-by-one
    is_masked: bool = False  # some of its weights were replaced
    drops: bool = False  # some of its weights were set to zero at random
    is_obscure: bool = False  # its weights were combined with others before the values
    pairs_differ: bool = False  # heads that share a key do not share its value
    off_one: Tensor | None = None  # largest distance from one of a row sum of the weights on the values
    undefined: Tensor | None = None  # True if any weight on the values is NaN

    def ran(self) -> None:
        """Record that its weights exist."""
        if not self.waits:
            self.proves_attention()

    def proves_attention(self) -> None:
        """Record that this is attention, because its weights multiply values."""
        attends, self.attends = self.attends, None
        if attends is not None:
            attends()

    def mixes(self, along_axis: bool, factor: float, axis: int | None = None) -> None:
        """Record the axis of the weights over which values were summed, and the factor on the weights."""
        self.mixes_along_axis &= along_axis
        self.axis_of_keys = axis
        self.factor_after *= 1.0 if self.has_mixed else factor
        self.has_mixed = True

    def measured(self, off_one: Tensor | None, undefined: Tensor) -> None:
        """Record the largest distance of a row's sum from one, and whether a weight is NaN."""
        self.undefined = undefined if self.undefined is None else self.undefined | undefined
        if off_one is not None:
            self.off_one = off_one if self.off_one is None else torch.maximum(self.off_one, off_one)
