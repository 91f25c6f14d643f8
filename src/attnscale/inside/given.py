"""What a function that attends was given, and how to call it again; one function a line."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from attnscale.visibility import Visibility
from attnscale.watching.hiding import keys_nobody_sees
from attnscale.watching.kernels.flex import ARGUMENTS as FLEX_ARGUMENTS

SDPA = F.scaled_dot_product_attention
FLEX = "flex_attention"  # torch's higher-order operator of that name, which loads its compiler
SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclass(frozen=True)
class Modified:
    """FlexAttention's two functions, in a place where an operator finds them, and the tensors that they take."""

    functions: int
    score_buffers: tuple[Tensor, ...]
    mask_buffers: tuple[Tensor, ...]


@dataclass(frozen=True)
class Given:
    """Queries (batch, heads, length, d) and keys, what hides some of them, and what multiplies their products."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    hidden_keys: Tensor | None  # by the mask from every query; told once for all layers of a graph that share it
    is_causal: bool
    scale: float
    again: Callable[[Tensor, Tensor], Any]  # the call itself, on these queries and keys
    modified: Modified | None = None
    with_row_maxima: Callable[[Tensor, Tensor], tuple[Any, Tensor]] | None = None  # the same, and what it tells of rows


FUNCTIONS: list[tuple[Any, Any]] = []  # of FlexAttention: how a score is changed, and which are shown


def _sdpa(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
    given = dict(zip(SDPA_ARGUMENTS, args, strict=False)) | kwargs
    query, key, mask, scale = given["query"], given["key"], given.get("attn_mask"), given.get("scale")
    if query.dim() != 4 or query.is_nested or key.is_nested:
        return None
    return Given(
        query,
        key,
        mask,
        None if mask is None else keys_nobody_sees(Visibility.of(mask, is_causal=False).mask),
        bool(given.get("is_causal")),
        query.shape[-1] ** -0.5 if scale is None else float(scale),
        lambda query, key: function(**(given | {"query": query, "key": key})),
    )


def _flex(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
    """Only where it is traced: an eager run compiles it by itself."""
    given = dict(zip(FLEX_ARGUMENTS, args, strict=False)) | kwargs
    buffers = [tuple(given.get(name, ())) for name in ("score_buffers", "mask_buffers")]
    if not all(isinstance(buffer, Tensor) for some in buffers for buffer in some):
        return None
    FUNCTIONS.append((given["score_mod"], given["block_mask"][-1]))

    def again(query: Tensor, key: Tensor, **options: bool) -> Any:
        changed = {"query": query, "key": key, "kernel_options": {**given["kernel_options"], **options}}
        return function(*((given | changed)[name] for name in FLEX_ARGUMENTS if name in given))

    def with_row_maxima(query: Tensor, key: Tensor) -> tuple[Any, Tensor]:
        returned = again(query, key, OUTPUT_MAX=True)
        return returned, returned[2] * math.log(2)  # the kernel counts in powers of two

    return Given(
        given["query"],
        given["key"],
        None,
        None,
        False,
        float(given["scale"]),
        again,
        Modified(len(FUNCTIONS) - 1, *buffers),
        with_row_maxima,
    )


Reader = Callable[[Any, tuple[Any, ...], dict[str, Any]], Given | None]
READERS: dict[Any, Reader] = {SDPA: _sdpa, FLEX: _flex}


def reader_of(function: Any) -> Reader | None:
    """Who reads the arguments of a function; None where it does not attend."""
    if function is SDPA:
        return READERS[SDPA]
    return READERS[FLEX] if str(function) == FLEX else None
