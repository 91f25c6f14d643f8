"""Attention kernels as autograd remembers them: read behind the output of a module, when its forward has run."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from attnscale.torch_internals import in_backward, packs_saved_tensors, recorded_as, saved_by
from attnscale.visibility import Visibility
from attnscale.watching.kernels import KernelCall

KERNEL = "ScaledDotProduct"  # how autograd names what torch's fused kernels leave: …FlashAttentionBackward0 and others


def is_legible() -> bool:
    """Whether autograd keeps what runs now as it is: nothing that recomputes, and no hook that packs it away."""
    return torch.is_grad_enabled() and not in_backward() and not packs_saved_tensors()


def kernels_behind(output: Any, began: int) -> Iterator[KernelCall]:
    """The kernels that an output came from, among operations recorded since `began`; first by way of first operands."""
    nodes = [tensor.grad_fn for tensor in reversed(_tensors(output))]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or recorded_as(node) < began:
            continue
        seen.add(node)
        if node.name().startswith(KERNEL) and saved_by(node, "query") is not None:
            yield _kernel(node)
        nodes += [parent for parent, _ in reversed(node.next_functions)]


def _kernel(node: Any) -> KernelCall:
    query, key, scale, is_causal = (saved_by(node, name) for name in ("query", "key", "scale", "is_causal"))
    mask = saved_by(node, "attn_mask") if saved_by(node, "attn_mask") is not None else saved_by(node, "attn_bias")
    assert query is not None and key is not None  # noqa: PT018 (a kernel that saved its query saved its key)
    return KernelCall(
        "sdpa",
        query,
        key,
        query.shape[-1] ** -0.5 if scale is None else float(scale),
        visibility=Visibility.of(mask, bool(is_causal)),
    )


def _tensors(output: Any) -> list[Tensor]:
    parts = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else [output]
    )
    return [part for part in parts if isinstance(part, Tensor)]
