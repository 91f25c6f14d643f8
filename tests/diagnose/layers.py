"""Layers as watching would hand them on, made from tensors by the formulas."""

from dataclasses import replace

import torch

from attnscale import score_stats
from attnscale.declared import Authority, Declared
from attnscale.visibility import Visibility
from attnscale.watching.layer import Layer, SavedCall, Wiring


def norm(tensor, heads):
    """Root mean square of ‖·‖ for each query head."""
    found = tensor.double().square().sum(-1).mean((0, 2)).sqrt()
    return found.repeat_interleave(heads // len(found))


def layer_of(query, key, scale=None, *, causal=False, softcap=None, declared=None, model_dims=None, **wiring):
    """A layer that multiplies q·k by `scale`: a number, one a head, or 1/√d_k."""
    heads, head_dim = query.shape[1], query.shape[-1]
    scales = torch.as_tensor(head_dim**-0.5 if scale is None else scale, dtype=torch.float64).expand(heads).clone()
    grouped = key.shape[1] != heads
    stats = score_stats(query, key, scale=scales.view(-1, 1, 1), is_causal=causal, enable_gqa=grouped, softcap=softcap)
    return Layer(
        name="blocks.0.attention",
        kind="eager",
        heads=heads,
        kv_heads=key.shape[1],
        head_dim=head_dim,
        model_dims=(heads * head_dim,) if model_dims is None else model_dims,
        query_len=query.shape[-2],
        key_len=key.shape[-2],
        causal=causal,
        softcap=softcap,
        stats=stats,
        scales=scales,
        query_norm=norm(query, heads),
        key_norm=norm(key, heads),
        declared=declared or Declared(),
        wiring=Wiring(**wiring),
        query=query,
        key=key,
        kept=(SavedCall(query, key, scales, Visibility.of(None, causal), softcap),),
    )


def random_layer(heads=3, head_dim=11, length=23, scale=None, *, batch=5, query_std=1.0, key_std=1.0, **options):
    """Independent normal components; three heads of eleven unless said otherwise."""
    query = query_std * torch.randn(batch, heads, length, head_dim)
    key = key_std * torch.randn(batch, heads, length, head_dim)
    return layer_of(query, key, scale, **options)


def configured(scale, source="config.softmax_scale", **fields):
    return Declared(scale, source, scale_readings=(scale,), scale_authority=Authority.CONFIGURED, **fields)


def in_half(layer):
    return replace(layer, dtype=torch.float16)


def codes(findings):
    return [finding.code for finding in findings]
