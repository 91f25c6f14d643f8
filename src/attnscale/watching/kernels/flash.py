"""Readers of flash attention, for batches of one length and for packed sequences.

They cover flash-attn, torch.nn.attention.varlen, and the kernels that SDPA runs for jagged tensors.
"""

from collections.abc import Iterator
from typing import Any

from attnscale.tracing.lineage import Lineage, Node, view_of
from attnscale.visibility import Visibility
from attnscale.watching.kernels.kernel_call import KernelCall


def flash(lineage: Lineage, args: dict[str, Any]) -> Iterator[KernelCall]:
    """Read flash-attn: (batch, positions, heads, features), causal aligned to the last key."""
    yield _flash_kernel(args, *(lineage.node(args[name]) for name in ("q", "k", "v")))


def flash_varlen(lineage: Lineage, args: dict[str, Any]) -> Iterator[KernelCall]:
    """Read flash-attn over packed sequences."""
    starts = {name: args[f"cu_seqlens_{name}"].tolist() for name in ("q", "k")}
    starts["v"] = starts["k"]
    for number in range(len(starts["q"]) - 1):
        parts = {name: slice(*starts[name][number : number + 2]) for name in starts}
        one = {**args, **{name: args[name][None, part] for name, part in parts.items()}}
        if one["q"].numel() and one["k"].numel():
            yield _flash_kernel(one, *(_part(lineage.node(args[name]), part) for name, part in parts.items()))


def varlen(lineage: Lineage, args: dict[str, Any]) -> Iterator[KernelCall]:
    """Read _varlen_attn and _flash_attention_forward: packed (total, heads, features), or a batch of one length."""
    left, right = args.get("window_size") or (args.get("window_size_left"), args.get("window_size_right"))
    starts = [args.get(name) for name in ("cu_seq_q", "cu_seq_k")]
    starts = [args.get(name) for name in ("cum_seq_q", "cum_seq_k")] if starts[0] is None else starts
    arguments = _as_flash(args, starts, bool(args.get("is_causal")), left, right)
    yield from (flash if starts[0] is None else flash_varlen)(lineage, arguments)


def efficient(lineage: Lineage, args: dict[str, Any]) -> Iterator[KernelCall]:
    """Read aten::_efficient_attention_forward: packed (1, total, heads, features), or a batch of one length."""
    starts = [args.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    first_key, last_key = (args.get("custom_mask_type") == kind for kind in (1, 2))
    if args.get("bias") is not None or (first_key and not _are_alike(args, starts)):
        return  # flash has no bias, and aligns causality to the last key
    if starts[0] is None:
        yield from flash(lineage, _as_flash(args, starts, first_key or last_key, None, None))
        return
    squeezed = {name: args[name].squeeze(0) for name in ("query", "key", "value")}
    for name, tensor in squeezed.items():
        lineage.write(tensor, _squeezed(lineage.node(args[name])))
    yield from flash_varlen(lineage, _as_flash(args | squeezed, starts, first_key or last_key, None, None))


def _flash_kernel(args: dict[str, Any], query: Node, key: Node, value: Node) -> KernelCall:
    turned = {name: args[name].transpose(1, 2) for name in ("q", "k")}
    return KernelCall(
        "flash",
        turned["q"],
        turned["k"],
        float(args["softmax_scale"]),
        _turned(query),
        _turned(key),
        _visibility(args),
        softcap=args.get("softcap") or None,
        value_node=_turned(value),
        value=args["v"].transpose(1, 2),
    )


def _part(node: Node, part: slice) -> Node:
    """Return one of the packed sequences, as a batch of one."""
    return view_of(view_of(node, "slice", 0, part.start, part.stop), "unsqueeze", 0)


def _turned(node: Node) -> Node:
    return view_of(node, "transpose", 1, 2)


def _visibility(args: dict[str, Any]) -> Visibility:
    left = args.get("window_size_left")
    right = 0 if args.get("causal") else args.get("window_size_right")
    q_len, kv_len = args["q"].shape[1], args["k"].shape[1]
    if args.get("causal") and q_len == 1:
        right = None  # the only row is the last, which sees every key
    ahead = kv_len - q_len
    return Visibility(
        last=None if right is None or right < 0 else ahead + right,
        first=None if left is None or left < 0 else ahead - left,
    )


def _as_flash(args: dict[str, Any], starts: list[Any], causal: bool, left: Any, right: Any) -> dict[str, Any]:
    query, scale = args["query"], args.get("scale")
    return {
        "q": query,
        "k": args["key"],
        "v": args["value"],
        "cu_seqlens_q": starts[0],
        "cu_seqlens_k": starts[0] if starts[1] is None else starts[1],
        "softmax_scale": query.shape[-1] ** -0.5 if scale is None else scale,
        "causal": causal,
        "window_size_left": left,
        "window_size_right": right,
    }


def _are_alike(args: dict[str, Any], starts: list[Any]) -> bool:
    if starts[0] is None:
        return bool(args["query"].shape[1] == args["key"].shape[1])
    return starts[1] is None or bool((starts[0] == starts[1]).all())


def _squeezed(node: Node) -> Node:
    return view_of(node, "select", 0, 0)
