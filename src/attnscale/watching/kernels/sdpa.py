"""torch's scaled_dot_product_attention, by any of its kernels, and attnscale's own."""

from collections.abc import Iterator
from typing import Any

from attnscale.tracing.lineage import Ledger
from attnscale.visibility import Visibility
from attnscale.watching.kernels.kernel_call import KernelCall


def sdpa(ledger: Ledger, given: dict[str, Any]) -> Iterator[KernelCall]:
    """(batch, heads, positions, features); causal aligned to the first key."""
    query, key, scale = given["query"], given["key"], given.get("scale")
    mask = given.get("attn_mask") if given.get("attn_mask") is not None else given.get("attn_bias")
    if query.is_nested:
        yield from _nested(given)
    elif query.dim() == 4:
        yield KernelCall(
            "sdpa",
            query,
            key,
            query.shape[-1] ** -0.5 if scale is None else float(scale),
            ledger.node(query),
            ledger.node(key),
            Visibility.of(mask, bool(given.get("is_causal"))),
            value_node=ledger.node(given["value"]),
            value=given["value"],
            drops=bool(given.get("dropout_p")),
        )


def _nested(given: dict[str, Any]) -> Iterator[KernelCall]:
    """Strided nested tensors, one sequence after the other: of what is inside them no lineage is known."""
    scale, causal = given.get("scale"), bool(given.get("is_causal"))
    for query, key, value in zip(*(given[name].unbind() for name in ("query", "key", "value")), strict=True):
        if query.dim() == 3 and query.numel() and key.numel():
            yield KernelCall(
                "sdpa",
                query.unsqueeze(0),
                key.unsqueeze(0),
                query.shape[-1] ** -0.5 if scale is None else float(scale),
                visibility=Visibility.of(None, causal),
                value=value.unsqueeze(0),
                drops=bool(given.get("dropout_p")),
            )
