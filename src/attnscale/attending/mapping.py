"""Operators under torch.vmap: one entry after the other."""

from typing import Any

import torch
from torch import Tensor


def entry_by_entry(operator: Any) -> None:
    """Let torch.vmap map over an operator, which gives every entry what it gives it alone."""

    def mapped(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> tuple[Any, Any]:
        alone = (_entry(given, in_dims, index) for index in range(info.batch_size))
        found = [operator(*each) for each in alone]
        if isinstance(found[0], Tensor):
            return torch.stack(found), 0
        stacked = [torch.stack(each) for each in zip(*found, strict=True)]
        return (stacked, [0] * len(stacked)) if isinstance(found[0], list) else (tuple(stacked), (0,) * len(stacked))

    operator.register_vmap(mapped)


def _entry(given: tuple[Any, ...], in_dims: tuple[int | None, ...], index: int) -> list[Any]:
    pairs = zip(given, in_dims, strict=True)
    return [value if axis is None else value.select(axis, index) for value, axis in pairs]
