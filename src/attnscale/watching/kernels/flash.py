"""Readers of flash attention, for batches of one length and for packed sequences.

They cover flash-attn, torch.nn.attention.varlen, and the kernels that SDPA runs for jagged tensors.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from attnscale.tracing.lineage import Lineage, Node, view_of
from attnscale.visibility import Visibility
from attnscale.watching.kernels.kernel_call import KernelCall

SIDES = (("q", "query"), ("k", "key"), ("v", "value"))
STARTS = ("cu_seqlens_{}", "cu_seq_{}", "cum_seq_{}")  # where each packed sequence starts


def flash(lineage: Lineage, args: dict[str, Any]) -> Iterator[KernelCall]:
    """Read flash attention: (batch, positions, heads, features), or packed (total, heads, features).

    Causality is aligned to the last key.
    """
    tensors = [_first(args, *names) for names in SIDES]
    nodes = [lineage.node(tensor) for tensor in tensors]
    query_starts, key_starts = (_first(args, *(name.format(side) for name in STARTS)) for side in "qk")
    if query_starts is None:
        yield _call(args, tensors, nodes)
        return
    ends = [pairwise(each.tolist()) for each in (query_starts, query_starts if key_starts is None else key_starts)]
    for query, key in zip(*ends, strict=True):
        parts = [slice(*query), slice(*key), slice(*key)]
        some = [tensor[None, part] for tensor, part in zip(tensors, parts, strict=True)]
        if some[0].numel() and some[1].numel():
            yield _call(args, some, [_part(node, part) for node, part in zip(nodes, parts, strict=True)])


def efficient(lineage: Lineage, args: dict[str, Any]) -> Iterator[KernelCall]:
    """Read aten::_efficient_attention_forward: packed (1, total, heads, features), or a batch of one length."""
    starts = [args.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    first_key, last_key = (args.get("custom_mask_type") == kind for kind in (1, 2))
    if args.get("bias") is not None or (first_key and not _are_alike(args, starts)):
        return  # flash has no bias, and aligns causality to the last key
    args = args | {"causal": first_key or last_key}
    if starts[0] is not None:
        for name in ("query", "key", "value"):
            node = lineage.node(args[name])
            args[name] = args[name].squeeze(0)
            lineage.write(args[name], view_of(node, "select", 0, 0))
    yield from flash(lineage, args)


def _first(args: dict[str, Any], *names: str) -> Any:
    """Return the first of these arguments that is given."""
    return next((args[name] for name in names if args.get(name) is not None), None)


def _call(args: dict[str, Any], tensors: list[Any], nodes: list[Node]) -> KernelCall:
    query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
    query_node, key_node, value_node = map(_heads_first, nodes)
    scale = _first(args, "softmax_scale", "scale")
    return KernelCall(
        "flash",
        query,
        key,
        float(query.shape[-1] ** -0.5 if scale is None else scale),
        query_node,
        key_node,
        _visibility(args, query.shape[2], key.shape[2]),
        softcap=args.get("softcap") or None,
        value_node=value_node,
        value=value,
    )


def _visibility(args: dict[str, Any], q_len: int, kv_len: int) -> Visibility:
    left, right = args.get("window_size") or (args.get("window_size_left"), args.get("window_size_right"))
    if _first(args, "causal", "is_causal"):
        right = None if q_len == 1 else 0  # the only row is the last, which sees every key
    ahead = kv_len - q_len
    return Visibility(
        last=None if right is None or right < 0 else ahead + right,
        first=None if left is None or left < 0 else ahead - left,
    )


def _part(node: Node, part: slice) -> Node:
    """Return one of the packed sequences, as a batch of one."""
    return view_of(view_of(node, "slice", 0, part.start, part.stop), "unsqueeze", 0)


def _heads_first(node: Node) -> Node:
    return view_of(node, "transpose", 1, 2)


def _are_alike(args: dict[str, Any], starts: list[Any]) -> bool:
    if starts[0] is None:
        return bool(args["query"].shape[1] == args["key"].shape[1])
    return starts[1] is None or bool((starts[0] == starts[1]).all())
