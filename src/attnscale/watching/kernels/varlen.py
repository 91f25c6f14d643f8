"""torch's kernels for sequences laid end to end: torch.nn.attention.varlen, and what SDPA runs of jagged tensors."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from attnscale.tracing.lineage import Ledger, Node, moved
from attnscale.watching.kernels import flash
from attnscale.watching.kernels.kernel_call import KernelCall


def varlen(ledger: Ledger, given: dict[str, Any]) -> Iterator[KernelCall]:
    """torch_attn::_varlen_attn, aten::_flash_attention_forward: (total, heads, features), or a batch of one length."""
    left, right = given.get("window_size") or (given.get("window_size_left"), given.get("window_size_right"))
    starts = [given.get(name) for name in ("cu_seq_q", "cu_seq_k")]
    starts = [given.get(name) for name in ("cum_seq_q", "cum_seq_k")] if starts[0] is None else starts
    arguments = _as_flash(given, starts, bool(given.get("is_causal")), left, right)
    yield from (flash.flash if starts[0] is None else flash.flash_varlen)(ledger, arguments)


def efficient(ledger: Ledger, given: dict[str, Any]) -> Iterator[KernelCall]:
    """aten::_efficient_attention_forward: (1, total, heads, features) of sequences, or a batch of one length."""
    starts = [given.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    first_key, last_key = (given.get("custom_mask_type") == kind for kind in (1, 2))
    if given.get("bias") is not None or (first_key and not _are_alike(given, starts)):
        return  # what flash's arguments cannot say: its causality is aligned to the last key
    if starts[0] is None:
        yield from flash.flash(ledger, _as_flash(given, starts, first_key or last_key, None, None))
        return
    squeezed = {name: given[name].squeeze(0) for name in ("query", "key", "value")}
    for name, tensor in squeezed.items():
        ledger.write(tensor, _squeezed(ledger.node(given[name])))
    yield from flash.flash_varlen(ledger, _as_flash(given | squeezed, starts, first_key or last_key, None, None))


def _as_flash(given: dict[str, Any], starts: list[Any], causal: bool, left: Any, right: Any) -> dict[str, Any]:
    """The arguments by flash-attn's names."""
    query, scale = given["query"], given.get("scale")
    return {
        "q": query,
        "k": given["key"],
        "v": given["value"],
        "cu_seqlens_q": starts[0],
        "cu_seqlens_k": starts[0] if starts[1] is None else starts[1],
        "softmax_scale": query.shape[-1] ** -0.5 if scale is None else scale,
        "causal": causal,
        "window_size_left": left,
        "window_size_right": right,
    }


def _are_alike(given: dict[str, Any], starts: list[Any]) -> bool:
    """Whether every sequence has as many keys as queries."""
    if starts[0] is None:
        return bool(given["query"].shape[1] == given["key"].shape[1])
    return starts[1] is None or bool((starts[0] == starts[1]).all())


def _squeezed(node: Node) -> Node:
    return moved(node, node.shape[1:], lambda points: np.pad(points, ((0, 0), (1, 0))))
