"""Readers of SDPA's kernels, attnscale's kernels, torch's fast paths in evaluation mode, and FlexAttention."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
    query, key, scale = args["query"], args["key"], args.get("scale")
    mask = args.get("attn_mask") if args.get("attn_mask") is not None else args.get("attn_bias")
    if query.dim() == 4 and not query.is_nested:
        yield KernelCall(
            "sdpa",
            query,
            key,
            query.shape[-1] ** -0.5 if scale is None else float(scale),
            lineage.node(query),
            lineage.node(key),
            Visibility.of(mask, bool(args.get("is_causal"))),
            value_node=lineage.node(args["value"]),
            value=args["value"],
            drops=bool(args.get("dropout_p")),
            lse=args.get("logsumexp") if query.device.type == "cpu" else None,
        )


def attention_rows(lineage: Lineage, args: dict[str, Any]) -> Iterator[KernelCall]:
    """Read attention_with_stats: visibility by position, document and mask."""
    query, key, value = args["query"], args["key"], args["value"]
    own, theirs = args.get("documents_q"), args.get("documents_k")
    documents = None if own is None or theirs is None else (own, theirs)
    yield KernelCall(
        "sdpa",
        query,
        key,
        args["scale"],
        lineage.node(query),
        lineage.node(key),
        Visibility(0 if args["is_causal"] else args.get("last"), args.get("first"), args.get("mask"), documents),
        softcap=args.get("softcap"),
        value_node=lineage.node(value),
        value=value,
    )


def multi_head_attention(lineage: Lineage, args: dict[str, Any]) -> Iterator[KernelCall]:
    """Read the fast path of nn.MultiheadAttention, which includes the projections."""
    heads, weight, bias = args["num_head"], args["qkv_weight"], args["qkv_bias"]
    width, mask, mask_type = weight.shape[1], args.get("mask"), args.get("mask_type")
    sources = [args["query"], args["key"], args["value"]]
    if args["query"].is_nested:  # then query, key and value are the same
        padded, mask = _padded(args["query"])
        sources, mask_type = [padded] * 3, None
    query, key, value = (
        F.linear(source, weight[start : start + width], bias[start : start + width])
        for source, start in zip(sources, (0, width, 2 * width), strict=True)
    )
    for kernel in _projected_inside(query, key, value, heads, mask, mask_type):
        own = args["query"] is args["key"]
        yield replace(kernel, attends_itself=own, origins=_packed_origins(lineage, weight, bias, heads))


def encoder_layer(lineage: Lineage, args: dict[str, Any]) -> Iterator[KernelCall]:
    """Read the fast path of nn.TransformerEncoderLayer."""
    source, width = args["src"], args["embed_dim"]
    mask, mask_type = args.get("mask"), args.get("mask_type")
    if source.is_nested:
        source, mask = _padded(source)
        mask_type = None
    if args["norm_first"]:
        source = F.layer_norm(source, (width,), args["norm_weight_1"], args["norm_bias_1"], args["eps"])
    packed = F.linear(source, args["qkv_weight"], args["qkv_bias"])
    query, key, value = packed.chunk(3, dim=-1)
    for kernel in _projected_inside(query, key, value, args["num_heads"], mask, mask_type):
        origins = _packed_origins(lineage, args["qkv_weight"], args["qkv_bias"], args["num_heads"])
        yield replace(kernel, inside="self_attn", attends_itself=True, origins=origins)


def _padded(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Return a nested tensor's sequences padded with zeros, and a mask in which True hides padding."""
    lengths = torch.tensor([len(part) for part in nested.unbind()], device=nested.device)
    padded = nested.to_padded_tensor(0.0)
    beyond = torch.arange(padded.shape[1], device=padded.device) >= lengths[:, None]
    return padded, (beyond[:, None, :] | beyond[:, :, None]).unsqueeze(1)


def _packed_origins(lineage: Lineage, weight: Tensor, bias: Tensor | None, heads: int) -> Origins:
    width, added = weight.shape[0] // 3, None if bias is None else lineage.node(bias)
    parts = (projected_origin(lineage.node(weight), added, third * width, heads, width // heads) for third in range(3))
    return Origins(*parts)


def _projected_inside(
    query: Tensor, key: Tensor, value: Tensor, heads: int, mask: Tensor | None, mask_type: int | None
) -> Iterator[KernelCall]:
    width = query.shape[-1]
    query, key, value = (tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (query, key, value))
    if mask is not None:
        shown = ~mask.to(torch.bool)  # True or −∞ hides a key
        mask = shown[:, None, None, :] if mask_type == 1 and shown.dim() == 2 else shown
    scale = query.shape[-1] ** -0.5
    yield KernelCall("fast path", query, key, scale, visibility=Visibility(mask=mask), width=width, value=value)


ARGUMENTS = (
    "query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options", "score_buffers", "mask_buffers",
)  # fmt: skip


def flex(lineage: Lineage, args: dict[str, Any]) -> Iterator[KernelCall]:
    """Read FlexAttention; its two functions are evaluated to find their effect on scores."""
    query, key, value = (args[name] for name in ("query", "key", "value"))
    modify = modified_by(args["score_mod"], args["block_mask"][-1], args["score_buffers"], args["mask_buffers"])
    yield KernelCall(
        "flex", query, key, float(args["scale"]), lineage.node(query), lineage.node(key), score_mod=modify,
        value_node=lineage.node(value), value=value,
    )  # fmt: skip


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
