"""SDPA of strided nested tensors: as one operation, or in products of them, where torch has no kernel for them."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from attnscale.tracing.coordinates import transposed
from attnscale.tracing.lineage import Ledger, Node, moved
from attnscale.tracing.nested import Parts
from attnscale.visibility import Visibility
from attnscale.watching.kernels.kernel_call import KernelCall

OPERATIONS = (
    "scaled_dot_product_attention", "_scaled_dot_product_attention_math", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip


def sequences(ledger: Ledger, given: dict[str, Any], parts: Sequence[Sequence[Tensor]]) -> Iterator[KernelCall]:
    """An operation with these arguments: of query, key and value, one sequence after the other."""
    scale = given.get("scale")
    for query, key, value in zip(*parts, strict=True):
        yield from _call(
            *(query, key, value, query.shape[-1] ** -0.5 if scale is None else float(scale)),
            *(ledger.node(query), ledger.node(key), ledger.node(value)),
            is_causal=bool(given.get("is_causal")),
            drops=bool(given.get("dropout_p")),
        )


def multiplied(ledger: Ledger, weights: Parts, value: Parts) -> Iterator[KernelCall]:
    """A product of the softmax of a product with values; what was a scale is in its operands."""
    if not weights.is_weights or weights.product is None:
        return
    queries, turned = weights.product
    for query, key, values in zip(queries.tensors, turned.tensors, value.tensors, strict=True):
        nodes = ledger.node(query), _turned(ledger.node(key)), ledger.node(values)
        yield from _call(query, key.mT, values, 1.0, *nodes, is_causal=False, drops=False)


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    query_node: Node,
    key_node: Node,
    value_node: Node,
    *,
    is_causal: bool,
    drops: bool,
) -> Iterator[KernelCall]:
    if query.dim() == 4 and query.numel() and key.numel():
        seen = Visibility.of(None, is_causal)
        yield KernelCall(
            "sdpa", query, key, scale, query_node, key_node, seen, value_node=value_node, value=value, drops=drops
        )


def _turned(node: Node) -> Node:
    rank, shape = len(node.shape), (*node.shape[:-2], node.shape[-1], node.shape[-2])
    return moved(node, shape, transposed(rank, rank - 2, rank - 1))
