"""The Rule protocol: a callable from query and key to query, key and a scale."""

import math
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from types import FunctionType
from typing import Protocol, TypeAlias, TypeVar

from torch import Tensor

from attnscale.errors import SettingError, ShapeError
from attnscale.numerics import wide_dtype

Scaled: TypeAlias = tuple[Tensor, Tensor, float]
Visible: TypeAlias = Tensor | int | None
# query and key of each sequence, (1, heads, length, head_dim), to one factor per head, (heads, 1, 1)
OverSequences: TypeAlias = Callable[[list[tuple[Tensor, Tensor]]], Tensor]


class Rule(Protocol):
    """A callable that returns query, key and scale; the scores are scale · q·k.

    `visible` is the number of visible keys of each row, (…, q_len), for the rules that need it; None means all.
    """

    def __call__(self, query: Tensor, key: Tensor, visible: Visible = None) -> Scaled:
        """Scale the scores of query (…, heads, q_len, head_dim) on key (…, kv_heads, kv_len, head_dim)."""
        ...


@dataclass(frozen=True)
class About:
    """Description of a rule in the catalogue."""

    formula: str
    source: str
    use: str
    needs_visible: bool
    over_sequences: OverSequences | None = None  # for packed sequences, if the rule reads all of them


ABOUT: dict[object, About] = {}
Described = TypeVar("Described", bound=Callable[..., object])


def about(
    formula: str, source: str, use: str, *, needs_visible: bool = False, over_sequences: OverSequences | None = None
) -> Callable[[Described], Described]:
    """Decorate a rule, a function or a class, with its catalogue entry."""

    def attach(rule: Described) -> Described:
        ABOUT[rule] = About(formula, source, use, needs_visible, over_sequences)
        if isinstance(rule, type) and is_dataclass(rule):
            rule.__hash__ = _hash_by_kind  # type: ignore[method-assign, assignment]
        return rule

    return attach


def _hash_by_kind(rule: object) -> int:
    """Return the hash of the type; a rule created inside a graph of torch 2.11 has no fields."""
    return hash(type(rule))


def about_rule(rule: object) -> About | None:
    """Return the description of a rule or of its class, or None for a user's own rule."""
    return ABOUT.get(rule if isinstance(rule, FunctionType | type) else type(rule))


def multiply(query: Tensor, factor: Tensor) -> Tensor:
    """Return query · factor, computed in float32 or wider and rounded once to the query's dtype."""
    wide = wide_dtype(query)
    return (query.to(wide) * factor.to(wide)).to(query.dtype)


def per_head(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Shape a parameter (heads, …) so that it broadcasts over the rows of tensor (…, heads, length, head_dim)."""
    heads = parameter.shape[0]
    found = tensor.shape[-3] if tensor.dim() > 2 else 1
    if heads != found:
        raise ShapeError(
            f"This rule was made for {heads} heads, but the tensor of shape {tuple(tensor.shape)} has {found}; "
            f"make the rule with heads={found}."
        )
    shaped = parameter.reshape(heads, 1, -1)
    return shaped if tensor.dim() > 2 else shaped[0]


def require_positive(name: str, value: float) -> None:
    """Raise an error for a parameter that is not a positive, finite number."""
    if not (isinstance(value, (int, float)) and 0 < value < math.inf):
        raise SettingError(f"Expected {name} to be a positive, finite number, got {value!r}.")
