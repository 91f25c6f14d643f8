"""What a function that attends was given, and how to call it again; one function a line."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

SDPA = F.scaled_dot_product_attention
SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclass(frozen=True)
class Given:
    """Queries (batch, heads, length, d) and keys, what hides some of them, and what multiplies their products."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    again: Callable[[Tensor, Tensor], Any]  # the call itself, on these queries and keys


def _sdpa(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
    given = dict(zip(SDPA_ARGUMENTS, args, strict=False)) | kwargs
    query, key, scale = given["query"], given["key"], given.get("scale")
    if query.dim() != 4 or query.is_nested or key.is_nested:
        return None
    return Given(
        query,
        key,
        given.get("attn_mask"),
        bool(given.get("is_causal")),
        query.shape[-1] ** -0.5 if scale is None else float(scale),
        lambda query, key: SDPA(**(given | {"query": query, "key": key})),
    )


READERS: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], Given | None]] = {SDPA: _sdpa}
