"""SDPA of strided nested tensors: as one operation, or in products of them, where torch has no kernel for them."""

from collections.abc import Iterator
from typing import Any

from attnscale.tracing.coordinates import transposed
from attnscale.tracing.lineage import Node, moved
from attnscale.tracing.nested import NestedTensors, Parts
from attnscale.visibility import Visibility
from attnscale.watching.kernels.kernel_call import KernelCall


def sequences(nested: NestedTensors, given: dict[str, Any]) -> Iterator[KernelCall]:
    """An operation that takes query, key and value: one sequence after the other."""
    query, key, value = (nested.of(given[name]) for name in ("query", "key", "value"))
    scale = given.get("scale")
    scale = query.tensors[0].shape[-1] ** -0.5 if scale is None and query.tensors else scale
    yield from _calls(query, key, value, scale, bool(given.get("is_causal")), bool(given.get("dropout_p")))


def multiplied(weights: Parts, value: Parts) -> Iterator[KernelCall]:
    """A product of the softmax of a product with values; what was a scale is in its operands."""
    if weights.is_weights and weights.product is not None:
        query, turned = weights.product
        key = Parts(tuple(part.mT for part in turned.tensors), tuple(map(_turned, turned.nodes)))
        yield from _calls(query, key, value, 1.0, False, False)


def _calls(query: Parts, key: Parts, value: Parts, scale: Any, is_causal: bool, drops: bool) -> Iterator[KernelCall]:
    seen = Visibility.of(None, is_causal)
    tensors = zip(query.tensors, key.tensors, value.tensors, strict=True)
    nodes = zip(query.nodes, key.nodes, value.nodes, strict=True)
    for (own, theirs, values), (query_node, key_node, value_node) in zip(tensors, nodes, strict=True):
        if own.dim() == 4 and own.numel() and theirs.numel():
            yield KernelCall(
                "sdpa", own, theirs, float(scale), query_node, key_node, seen, value_node=value_node, value=values,
                drops=drops,
            )  # fmt: skip


def _turned(node: Node) -> Node:
    rank, shape = len(node.shape), (*node.shape[:-2], node.shape[-1], node.shape[-2])
    return moved(node, shape, transposed(rank, rank - 2, rank - 1))
