"""The ids of the tokens that a layer attends to, found among the inputs of its model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnscale.watching.layer import Layer

IDS = (torch.int64, torch.int32)
FLAGS = 2  # values that a mask has, or the types of tokens: no ids


def with_tokens(layers: Mapping[str, Layer], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Layer]:
    """The layers, each with the ids of its keys in the first sequence, where the inputs leave no doubt which they are.

    >>> with_tokens({}, (torch.tensor([[5, 3, 5, 9]]),), {})
    {}
    """
    given = [ids for ids in _integers((*args, kwargs)) if _may_be_tokens(ids)]
    return {name: replace(layer, tokens=_of_length(given, layer.key_len)) for name, layer in layers.items()}


def _of_length(given: Sequence[Tensor], length: int) -> Tensor | None:
    fitting = [ids for ids in given if len(ids) == length]
    return fitting[0] if fitting and all(torch.equal(ids, fitting[0]) for ids in fitting) else None


def _integers(value: Any) -> Iterator[Tensor]:
    """The first sequence of every tensor of integers, (batch, length) or (length,)."""
    if isinstance(value, Tensor):
        if value.dtype in IDS and value.dim() in (1, 2) and len(value) and not value.is_meta:
            yield value[0] if value.dim() == 2 else value
    elif isinstance(value, Mapping):
        yield from _integers(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _integers(each)


def _may_be_tokens(ids: Tensor) -> bool:
    """Some recur, which positions do not, and they have more values than a mask."""
    return FLAGS < len(ids.unique()) < len(ids)
