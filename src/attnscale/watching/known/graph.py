"""Attention kernels as autograd remembers them: read behind the output of a module, when its forward has run."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscale.torch_internals import in_backward, packs_saved_tensors, recorded_as, saved_by
from attnscale.visibility import Visibility
from attnscale.watching.kernels import KernelCall

KERNEL = "ScaledDotProduct"  # how autograd names what torch's fused kernels leave: …FlashAttentionBackward0 and others


def is_legible() -> bool:
    """Whether autograd keeps what runs now as it is: nothing that recomputes, and no hook that packs it away."""
    return torch.is_grad_enabled() and not in_backward() and not packs_saved_tensors()


class Behind(NamedTuple):
    """A kernel behind an output: what autograd recorded of it, and by which operands it was come to."""

    node: Any
    way: tuple[int, ...]  # the number of a tensor of the output, then of an operand at each operation


def kernels_behind(output: Any, began: int) -> Iterator[Behind]:
    """The kernels that an output came from, among operations recorded since `began`; first by way of first operands.

    Only where nothing is packed away: to look at what a checkpoint packed would be to run it again.
    """
    return (behind for behind in _behind(output, began) if _is_kernel(behind.node))


def numbers_behind(output: Any, began: int) -> set[int]:
    """Those of the kernels among operations recorded since `began`, also of such as are packed away."""
    return {recorded_as(each.node) for each in _behind(output, began) if each.node.name().startswith(KERNEL)}


def _behind(output: Any, began: int) -> Iterator[Behind]:
    """Every operation that an output came from."""
    found = [Behind(tensor.grad_fn, (number,)) for number, tensor in enumerate(_tensors(output))]
    waiting, seen = found[::-1], set()
    while waiting:
        node, way = waiting.pop()
        if node is None or node in seen or recorded_as(node) < began:
            continue
        seen.add(node)
        yield Behind(node, way)
        parents = [Behind(parent, (*way, number)) for number, (parent, _) in enumerate(node.next_functions)]
        waiting += reversed(parents)


def kernel_along(output: Any, began: int, way: tuple[int, ...]) -> Any | None:
    """The kernel that is come to by this way; None where there is none."""
    node = _along(output, way)
    return node if node is not None and recorded_as(node) >= began and _is_kernel(node) else None


def _along(output: Any, way: tuple[int, ...]) -> Any | None:
    number, *turns = way
    tensors = _tensors(output)
    node = tensors[number].grad_fn if number < len(tensors) else None
    for turn in turns:
        parents = () if node is None else node.next_functions
        if turn >= len(parents):
            return None
        node = parents[turn][0]
    return node


def _is_kernel(node: Any) -> bool:
    return node.name().startswith(KERNEL) and saved_by(node, "query") is not None


def recorded_call(node: Any, attends_itself: bool = False) -> KernelCall:
    """The call of a kernel that autograd recorded, without its graph."""
    names = ("query", "key", "scale", "is_causal", "attn_mask", "attn_bias")
    query, key, scale, is_causal, mask, bias = (saved_by(node, name) for name in names)
    assert query is not None and key is not None  # noqa: PT018 (a kernel that saved its query saved its key)
    return KernelCall(
        "sdpa",
        query.detach(),
        key.detach(),
        query.shape[-1] ** -0.5 if scale is None else float(scale),
        visibility=Visibility.of(bias if mask is None else mask, bool(is_causal)),
        attends_itself=attends_itself,
    )


def _tensors(output: Any) -> list[Tensor]:
    parts = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else [output]
    )
    return [part for part in parts if isinstance(part, Tensor)]
