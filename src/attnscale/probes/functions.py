"""The functions that attend: what each was given, and how to call it again."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnscale.visibility import Visibility
from attnscale.watching.kernels.flex import ARGUMENTS as FLEX_ARGUMENTS
from attnscale.watching.masks import keys_nobody_sees
from attnscale.watching.sdpa_names import SDPA

FLEX = "flex_attention"  # the name of torch's higher-order operator; importing it loads the compiler
SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclass(frozen=True)
class Modification:
    """FlexAttention's two functions, by their number in MODIFICATIONS, and the tensors that they take."""

    functions: int
    score_buffers: tuple[Tensor, ...]
    mask_buffers: tuple[Tensor, ...]


MODIFICATIONS: list[tuple[Any, Any]] = []  # score_mod and mask_mod of each traced call, where an op finds them


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of a function that attends: query (batch, heads, q_len, d), key (batch, kv_heads, kv_len, d)."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    hidden_keys: Tensor | None  # keys that the mask hides from every query; a graph computes it once for all layers
    is_causal: bool
    scale: float
    run: Callable[[Tensor, Tensor], Any]  # the call itself, on a query and a key
    modification: Modification | None = None
    run_with_maxima: Callable[[Tensor, Tensor], tuple[Any, Tensor]] | None = None  # also returns each row's maximum


Reader = Callable[[Any, tuple[Any, ...], dict[str, Any]], AttentionCall | None]


def read_sdpa(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall | None:
    """Read the arguments of SDPA; None where no probe takes them."""
    given = dict(zip(SDPA_ARGUMENTS, args, strict=False)) | kwargs
    query, key, mask, scale = given["query"], given["key"], given.get("attn_mask"), given.get("scale")
    if query.dim() != 4 or query.is_nested or key.is_nested:
        return None
    return AttentionCall(
        query,
        key,
        mask,
        None if mask is None else keys_nobody_sees(Visibility.of(mask, is_causal=False).mask),
        bool(given.get("is_causal")),
        query.shape[-1] ** -0.5 if scale is None else float(scale),
        lambda query, key: function(**(given | {"query": query, "key": key})),
    )


def read_flex(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall | None:
    """Read the arguments of FlexAttention as it is traced: an eager run compiles it by itself, where no probe is."""
    given = dict(zip(FLEX_ARGUMENTS, args, strict=False)) | kwargs
    buffers = [tuple(given.get(name, ())) for name in ("score_buffers", "mask_buffers")]
    if not all(isinstance(buffer, Tensor) for some in buffers for buffer in some):
        return None
    MODIFICATIONS.append((given["score_mod"], given["block_mask"][-1]))

    def run(query: Tensor, key: Tensor, **options: bool) -> Any:
        changed = {"query": query, "key": key, "kernel_options": {**given["kernel_options"], **options}}
        return function(*((given | changed)[name] for name in FLEX_ARGUMENTS if name in given))

    def run_with_maxima(query: Tensor, key: Tensor) -> tuple[Any, Tensor]:
        returned = run(query, key, OUTPUT_MAX=True)
        return returned, returned[2] * math.log(2)  # the kernel counts in powers of two

    modification = Modification(len(MODIFICATIONS) - 1, *buffers)
    scale = float(given["scale"])
    return AttentionCall(given["query"], given["key"], None, None, False, scale, run, modification, run_with_maxima)


def reader_of(function: Any) -> Reader | None:
    """Return the reader of a function's arguments; None where it does not attend."""
    if function is SDPA:
        return read_sdpa
    return read_flex if str(function) == FLEX else None
