"""flash-attn: the functions of the package of that name, for one length and for sequences laid end to end."""

from collections.abc import Iterator
from typing import Any

from attnscale.tracing.coordinates import sliced, transposed
from attnscale.tracing.lineage import Ledger, Node, moved
from attnscale.visibility import Visibility
from attnscale.watching.kernels.kernel_call import KernelCall


def flash(ledger: Ledger, given: dict[str, Any]) -> Iterator[KernelCall]:
    """flash-attn: (batch, positions, heads, features), causal aligned to the last key."""
    yield _flash_kernel(given, *(ledger.node(given[name]) for name in ("q", "k", "v")))


def flash_varlen(ledger: Ledger, given: dict[str, Any]) -> Iterator[KernelCall]:
    """flash-attn over sequences laid end to end."""
    starts = {name: given[f"cu_seqlens_{name}"].tolist() for name in ("q", "k")}
    starts["v"] = starts["k"]
    for number in range(len(starts["q"]) - 1):
        parts = {name: slice(*starts[name][number : number + 2]) for name in starts}
        one = {**given, **{name: given[name][None, part] for name, part in parts.items()}}
        if one["q"].numel() and one["k"].numel():
            yield _flash_kernel(one, *(_part(ledger.node(given[name]), part) for name, part in parts.items()))


def _flash_kernel(given: dict[str, Any], query: Node, key: Node, value: Node) -> KernelCall:
    turned = {name: given[name].transpose(1, 2) for name in ("q", "k")}
    return KernelCall(
        "flash",
        turned["q"],
        turned["k"],
        float(given["softmax_scale"]),
        _turned(query),
        _turned(key),
        _visibility(given),
        softcap=given.get("softcap") or None,
        value_node=_turned(value),
        value=given["v"].transpose(1, 2),
    )


def _part(node: Node, part: slice) -> Node:
    """One sequence of those laid end to end, as a batch of its own."""
    back = sliced(0, part.start)
    return moved(node, (1, part.stop - part.start, *node.shape[1:]), lambda points: back(points[:, 1:]))


def _turned(node: Node) -> Node:
    batch, length, heads, width = node.shape
    return moved(node, (batch, heads, length, width), transposed(4, 1, 2))


def _visibility(given: dict[str, Any]) -> Visibility:
    """Causal, and its windows, are aligned to the last key."""
    left = given.get("window_size_left")
    right = 0 if given.get("causal") else given.get("window_size_right")
    q_len, kv_len = given["q"].shape[1], given["k"].shape[1]
    if given.get("causal") and q_len == 1:
        right = None  # one row, which is the last, sees every key
    ahead = kv_len - q_len
    return Visibility(
        last=None if right is None or right < 0 else ahead + right,
        first=None if left is None or left < 0 else ahead - left,
    )
