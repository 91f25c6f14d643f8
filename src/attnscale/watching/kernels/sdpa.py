"""torch's scaled_dot_product_attention, by any of its kernels, and attnscale's own.

Of strided nested tensors it runs as one operation, or in products of them where torch has no kernel.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnscale.tracing.coordinates import transposed
from attnscale.tracing.lineage import Ledger, Node, moved
from attnscale.tracing.nested import Operand, Parts
from attnscale.visibility import Visibility
from attnscale.watching.kernels.kernel_call import KernelCall

NESTED_OPERATIONS = (
    "scaled_dot_product_attention", "_scaled_dot_product_attention_math", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class LearningPart:
    """One sequence of a nested tensor as who follows gradients sees it: they pass through the whole of it."""

    operand: Operand
    number: int
    part: Tensor
    given: Callable[[Tensor], Tensor] = lambda gradient: gradient  # that of what SDPA was given

    @property
    def shape(self) -> Any:
        """(1, heads, length, features)."""
        return self.part.shape

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient will pass."""
        return self.operand.nested.requires_grad

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Have the hook called with the gradient of this sequence."""
        self.operand.tell(self.number, lambda gradient: hook(self.given(gradient)))


def sequences(ledger: Ledger, given: dict[str, Any], parts: Sequence[Sequence[Tensor]]) -> Iterator[KernelCall]:
    """An operation with these arguments: of query, key and value, one sequence after the other."""
    scale, operands = given.get("scale"), [Operand(given[name], Parts(())) for name in ("query", "key")]
    for at, (query, key, value) in enumerate(zip(*parts, strict=True)):
        learning = LearningPart(operands[0], at, query), LearningPart(operands[1], at, key)
        yield from _call(
            *(query, key, value, query.shape[-1] ** -0.5 if scale is None else float(scale)),
            *(ledger.node(query), ledger.node(key), ledger.node(value)),
            is_causal=bool(given.get("is_causal")),
            drops=bool(given.get("dropout_p")),
            learning=learning,
        )


def multiplied(ledger: Ledger, weights: Parts, value: Parts) -> Iterator[KernelCall]:
    """A product of the softmax of a product with values; what was a scale is in its operands."""
    if not weights.is_weights or weights.product is None:
        return
    queries, turned = weights.product
    factors = (queries.factor, turned.factor) if weights.by_sdpa else (1.0, 1.0)
    for at, (query, key, values) in enumerate(
        zip(queries.parts.tensors, turned.parts.tensors, value.tensors, strict=True)
    ):
        nodes = ledger.node(query), _turned(ledger.node(key)), ledger.node(values)
        learning = (
            LearningPart(queries, at, query, lambda gradient: gradient * factors[0]),
            LearningPart(turned, at, key.mT, lambda gradient: gradient.mT * factors[1]),
        )
        yield from _call(query, key.mT, values, 1.0, *nodes, is_causal=False, drops=False, learning=learning)


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
    learning: "tuple[LearningPart, LearningPart]",
) -> Iterator[KernelCall]:
    if query.dim() == 4 and query.numel() and key.numel():
        seen = Visibility.of(None, is_causal)
        yield KernelCall(
            *("sdpa", query, key, scale, query_node, key_node, seen),
            value_node=value_node,
            value=value,
            drops=drops,
            learning=learning,
        )


def _turned(node: Node) -> Node:
    rank, shape = len(node.shape), (*node.shape[:-2], node.shape[-1], node.shape[-2])
    return moved(node, shape, transposed(rank, rank - 2, rank - 1))


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
