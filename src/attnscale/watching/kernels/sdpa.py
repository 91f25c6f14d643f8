"""torch's scaled_dot_product_attention, by any of its kernels, and attnscale's own."""

from collections.abc import Iterator
from typing import Any

from attnscale.tracing.lineage import Ledger
from attnscale.visibility import Visibility
from attnscale.watching.kernels.kernel_call import KernelCall
from attnscale.watching.kernels.nested import sequences


def sdpa(ledger: Ledger, given: dict[str, Any]) -> Iterator[KernelCall]:
    """(batch, heads, positions, features); causal aligned to the first key."""
    query, key, scale = given["query"], given["key"], given.get("scale")
    mask = given.get("attn_mask") if given.get("attn_mask") is not None else given.get("attn_bias")
    if query.is_nested:
        parts = ([part.unsqueeze(0) for part in given[name].unbind()] for name in ("query", "key", "value"))
        yield from sequences(ledger, given, list(parts))
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
            lse=given.get("logsumexp") if query.device.type == "cpu" else None,
        )


def one_pass(ledger: Ledger, given: dict[str, Any]) -> Iterator[KernelCall]:
    """attention_with_stats on a CPU: what every row sees by its position, its document and a mask."""
    query, key, value = given["query"], given["key"], given["value"]
    own, theirs = given.get("documents_q"), given.get("documents_k")
    documents = None if own is None or theirs is None else (own, theirs)
    yield KernelCall(
        "sdpa",
        query,
        key,
        given["scale"],
        ledger.node(query),
        ledger.node(key),
        Visibility(given.get("last"), given.get("first"), given.get("mask"), documents),
        softcap=given.get("softcap"),
        value_node=ledger.node(value),
        value=value,
    )
