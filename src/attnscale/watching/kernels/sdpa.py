"""Readers of SDPA's kernels, attnscale's kernels, torch's fast paths in evaluation mode, and FlexAttention."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnscale.tracing.lineage import Lineage
from attnscale.tracing.parameters import Origins, projected_origin
from attnscale.visibility import Visibility
from attnscale.watching.kernels.kernel_call import KernelCall, ScoreMod


def sdpa(lineage: Lineage, args: dict[str, Any]) -> Iterator[KernelCall]:
    """Read SDPA: (batch, heads, positions, features), causal aligned to the first key."""
    query = args["query"]
    if query.dim() == 4 and not query.is_nested:
        mask = args.get("attn_mask") if args.get("attn_mask") is not None else args.get("attn_bias")
        lse = args.get("logsumexp") if query.device.type == "cpu" else None
        visibility = Visibility.of(mask, bool(args.get("is_causal")))
        yield _call("sdpa", lineage, args, visibility=visibility, drops=bool(args.get("dropout_p")), lse=lse)


def attention_rows(lineage: Lineage, args: dict[str, Any]) -> Iterator[KernelCall]:
    """Read attention_with_stats: visibility by position, document and mask."""
    own, theirs = args.get("documents_q"), args.get("documents_k")
    documents = None if own is None or theirs is None else (own, theirs)
    last = 0 if args["is_causal"] else args.get("last")
    visibility = Visibility(last, args.get("first"), args.get("mask"), documents)
    yield _call("sdpa", lineage, args, visibility=visibility, softcap=args.get("softcap"))


def _call(kind: str, lineage: Lineage, args: dict[str, Any], **options: Any) -> KernelCall:
    query, key, value, scale = args["query"], args["key"], args["value"], args.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    nodes = lineage.node(query), lineage.node(key)
    return KernelCall(kind, query, key, scale, *nodes, value=value, value_node=lineage.node(value), **options)


def multi_head_attention(lineage: Lineage, args: dict[str, Any]) -> Iterator[KernelCall]:
    """Read the fast path of nn.MultiheadAttention, which includes the projections."""
    sources = [args["query"], args["key"], args["value"]]
    yield _fast_path(lineage, args, sources, args["num_head"], attends_itself=sources[0] is sources[1])


def encoder_layer(lineage: Lineage, args: dict[str, Any]) -> Iterator[KernelCall]:
    """Read the fast path of nn.TransformerEncoderLayer."""
    yield _fast_path(lineage, args, [args["src"]] * 3, args["num_heads"], attends_itself=True, inside="self_attn")


def _fast_path(lineage: Lineage, args: dict[str, Any], sources: list[Tensor], heads: int, **options: Any) -> KernelCall:
    weight, bias, mask, mask_type = args["qkv_weight"], args["qkv_bias"], args.get("mask"), args.get("mask_type")
    width = weight.shape[1]
    if sources[0].is_nested:  # then query, key and value are the same
        padded, mask = _padded(sources[0])
        sources, mask_type = [padded] * 3, None
    if args.get("norm_first"):
        norm = args["norm_weight_1"], args["norm_bias_1"], args["eps"]
        sources = [F.layer_norm(sources[0], (width,), *norm)] * 3
    query, key, value = (
        F.linear(source, rows, added).unflatten(-1, (heads, -1)).transpose(1, 2)
        for source, rows, added in zip(sources, weight.chunk(3), bias.chunk(3), strict=True)
    )
    if mask is not None:
        shown = ~mask.to(torch.bool)  # True or −∞ hides a key
        mask = shown[:, None, None, :] if mask_type == 1 and shown.dim() == 2 else shown
    nodes = lineage.node(weight), lineage.node(bias)
    origins = Origins(*(projected_origin(*nodes, third * width, heads, width // heads) for third in range(3)))
    visibility, scale = Visibility(mask=mask), query.shape[-1] ** -0.5
    return KernelCall(
        "fast path", query, key, scale, visibility=visibility, width=width, value=value, origins=origins, **options
    )


def _padded(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Return a nested tensor's sequences padded with zeros, and a mask in which True hides padding."""
    lengths = torch.tensor([len(part) for part in nested.unbind()], device=nested.device)
    padded = nested.to_padded_tensor(0.0)
    beyond = torch.arange(padded.shape[1], device=padded.device) >= lengths[:, None]
    return padded, (beyond[:, None, :] | beyond[:, :, None]).unsqueeze(1)


ARGUMENTS = (
    "query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options", "score_buffers", "mask_buffers",
)  # fmt: skip


def flex(lineage: Lineage, args: dict[str, Any]) -> Iterator[KernelCall]:
    """Read FlexAttention; its two functions are evaluated to find their effect on scores."""
    modify = modified_by(args["score_mod"], args["block_mask"][-1], args["score_buffers"], args["mask_buffers"])
    yield _call("flex", lineage, args, score_mod=modify)


def modified_by(score_mod: Any, mask_mod: Any, score_buffers: Sequence[Any], mask_buffers: Sequence[Any]) -> ScoreMod:
    """Return a function that applies score_mod to a tensor of scores and returns which scores mask_mod shows."""

    def modify(scores: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        batch, heads, _, keys = scores.shape
        at = [torch.arange(size, device=scores.device) for size in (batch, heads, 0, keys)]
        at[2] = positions.to(scores.device)
        score = _one_by_one(lambda s, b, h, i, j: score_mod(s, b, h, i, j, *score_buffers), scored=True)
        shown = _one_by_one(lambda b, h, i, j: mask_mod(b, h, i, j, *mask_buffers), scored=False)
        visible = shown(*at).expand(batch, heads, -1, -1)
        changed = score(scores, *at)
        return changed, visible & (changed != -math.inf)

    return modify


def _one_by_one(function: Callable[..., Tensor], scored: bool) -> Callable[..., Tensor]:
    lead = (0,) if scored else ()
    for axis in range(3, -1, -1):
        indices = tuple(0 if at == axis else None for at in range(4))
        function = torch.vmap(function, in_dims=(*lead, *indices), out_dims=0)
    return function
