"""Shapes: broadcasting, and the shapes of scores and outputs of attention."""

import torch
from torch import Tensor


def broadcasts_to(shape: torch.Size, target: tuple[int, ...]) -> bool:
    """Return True if a tensor of this shape broadcasts to the target without enlarging it."""
    return len(shape) <= len(target) and all(
        size == 1 or size == wanted  # not `in`, which fails for symbolic sizes under Dynamo
        for size, wanted in zip(reversed(shape), reversed(target), strict=False)
    )


def broadcast(*shapes: torch.Size) -> torch.Size:
    """Return the common broadcast shape; fast for equal shapes."""
    return shapes[0] if all(shape == shapes[0] for shape in shapes) else torch.broadcast_shapes(*shapes)


def scores_shape(query: Tensor, key: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """Return the shape of the scores, (…, heads, q_len, kv_len)."""
    return (*attention_shape(query, key, key, enable_gqa)[:-1], key.shape[-2])


def attention_shape(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """Return the shape of the output, (…, heads, q_len, value_dim), with leading dimensions broadcast together."""
    if enable_gqa and query.dim() > 2:
        lead = (*broadcast(query.shape[:-3], key.shape[:-3], value.shape[:-3]), query.shape[-3])
    else:
        lead = tuple(broadcast(query.shape[:-2], key.shape[:-2], value.shape[:-2]))
    return (*lead, query.shape[-2], value.shape[-1])
