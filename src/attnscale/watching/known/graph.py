"""Attention kernels as autograd remembers them: read behind the output of a module, when its forward has run."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from attnscale.watching.kernels.kernel import Kernel

KERNEL = "ScaledDotProduct"  # how autograd names what torch's fused kernels leave: …FlashAttentionBackward0 and others


def is_legible() -> bool:
    """Whether autograd keeps what runs now as it is: nothing that recomputes, and no hook that packs it away."""
    return (
        torch.is_grad_enabled()
        and torch._C._current_graph_task_id() == -1
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


def now() -> int:
    """How many operations autograd has recorded on this thread."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def kernels_behind(output: Any, began: int) -> Iterator[Kernel]:
    """The kernels that an output came from, among operations recorded since `began`; first by way of first operands."""
    nodes = [tensor.grad_fn for tensor in reversed(_tensors(output))]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or node._sequence_nr() < began:
            continue
        seen.add(node)
        if node.name().startswith(KERNEL) and hasattr(node, "_saved_query"):
            yield _kernel(node)
        nodes += [parent for parent, _ in reversed(node.next_functions)]


def _kernel(node: Any) -> Kernel:
    query, scale = node._saved_query, getattr(node, "_saved_scale", None)
    masks = (getattr(node, f"_saved_{name}", None) for name in ("attn_mask", "attn_bias"))
    return Kernel(
        "sdpa",
        query,
        node._saved_key,
        query.shape[-1] ** -0.5 if scale is None else float(scale),
        mask=next((mask for mask in masks if mask is not None), None),
        is_causal=bool(node._saved_is_causal),
    )


def _tensors(output: Any) -> list[Tensor]:
    parts = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else [output]
    )
    return [part for part in parts if isinstance(part, Tensor)]
