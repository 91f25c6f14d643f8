"""Attention computed by a kernel: its arguments say what was applied, and lineage what came before."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attnscale.measure.engine import score_stats
from attnscale.measure.stats import ScoreStats
from attnscale.rules.rule import wide_dtype
from attnscale.watching.coordinates import grid, transposed
from attnscale.watching.lineage import Ledger, Node, follow
from attnscale.watching.operations import moved
from attnscale.watching.origin import Origin, Origins, projected_origin, sampled_origin
from attnscale.watching.products import channels
from attnscale.watching.sighting import Rows, Sighting, looks_causal, rms_norm
from attnscale.watching.visibility import infinite

PROBED_ROWS = 64  # for norms and masks


@dataclass(frozen=True)
class Kernel:
    """One call of a fused kernel: query (batch, heads, q_len, d), key (batch, kv_heads, kv_len, d)."""

    kind: str
    query: Tensor
    key: Tensor
    scale: float
    query_node: Node | None = None  # None: projected inside the kernel
    key_node: Node | None = None
    mask: Tensor | None = None
    is_causal: bool = False
    softcap: float | None = None
    width: int | None = None  # of what was projected, where that is known
    inside: str = ""  # the submodule it stands for, which did not run itself
    score_mod: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None  # scores, positions -> scores, visible
    value_node: Node | None = None
    origins: Origins | None = None  # where they are known without following anything

    def sighting(self, rows: int | None, keep: bool) -> Sighting:
        """Everything that is reported of this call."""
        heads, head_dim = self.query.shape[1], _unpadded(self.query, self.query_node)
        query_way = _way(self.query_node, self.query)
        key_way = _way(self.key_node, self.key, count_heads=self.key.shape[1] == heads > 1)
        group = heads // max(self.key.shape[1], 1)
        factor = np.abs(query_way.factor) * np.repeat(np.abs(key_way.factor), group)
        visible = None if self.mask is None else _visible(self.mask)
        causal = self.is_causal or (visible is not None and _is_causal(visible, self.query.shape[-2]))
        multiplier, softcap, stats, bias = self.scale, self.softcap, None, _highest_bias(self.mask)
        if self.score_mod is not None:
            stats, multiplier, softcap, bias, causal = self._modified(rows)
        return Sighting(
            kind=self.kind,
            heads=heads,
            kv_heads=key_way.channels if self.key.shape[1] == heads else self.key.shape[1],
            head_dim=head_dim,
            model_dims=tuple({width for width in (self.width or query_way.width, heads * head_dim) if width}),
            query_len=self.query.shape[-2],
            key_len=self.key.shape[-2],
            causal=causal,
            softcap=softcap,
            stats=self._stats(rows) if stats is None else stats,
            scales=torch.from_numpy(multiplier * factor),
            query_norm=rms_norm(_some(self.query)).cpu() / torch.from_numpy(np.abs(query_way.factor)),
            key_norm=(rms_norm(_some(self.key)).cpu() / torch.from_numpy(np.abs(key_way.factor))).repeat_interleave(
                group
            ),
            normalised=query_way.normalised and key_way.normalised,
            biased=bias is not None,
            query=self.query[:1].detach() / query_way.as_tensor(self.query) if keep else None,
            key=self.key[:1].detach() / key_way.as_tensor(self.key) if keep else None,
            origins=self.origins or Origins(*self._origins()),
            highest_bias=max(0.0, bias or 0.0),
        )

    def _origins(self) -> Iterator[Origin | None]:
        """Of queries, keys and values: at the first and the last position."""
        for node in (self.query_node, self.key_node):
            if node is None or len(node.shape) != 4 or not all(node.shape):
                yield None
                continue
            _, heads, length, features = node.shape
            points = np.tile(grid(1, heads, 1, 1), (2, 1))
            points[heads:, 2] = length - 1
            yield Origin(node, points, heads, axis=3, features=features).settled()
        yield None if self.value_node is None else sampled_origin(self.value_node, axis=-1)

    def _stats(self, rows: int | None) -> ScoreStats:
        return score_stats(
            self.query, self.key, scale=self.scale, attn_mask=None if self.mask is None else infinite(self.mask),
            is_causal=self.is_causal, enable_gqa=True, softcap=self.softcap, rows=rows,
        )  # fmt: skip

    def _scores(self, positions: Tensor) -> Tensor:
        group = self.query.shape[1] // self.key.shape[1]
        query = self.query[:, :, positions.to(self.query.device)].to(wide_dtype(self.query))
        return query @ self.key.repeat_interleave(group, 1).to(query.dtype).mT * self.scale

    def _modified(self, rows: int | None) -> tuple[Any, float, float | None, float | None, bool]:
        """Statistics, slope, soft-cap, bias and causality under a score modification, all by asking it."""
        assert self.score_mod is not None
        modify, length = self.score_mod, self.query.shape[-2]
        probe = torch.linspace(0, length - 1, min(8, length)).round().long()
        scores = self._scores(probe)
        at_zero, visible = modify(torch.zeros_like(scores), probe)
        step = 2.0**-6
        slope = (modify(torch.full_like(scores, step), probe)[0] - at_zero) / step
        high, low = (modify(torch.full_like(scores, limit), probe)[0] - at_zero for limit in (1e30, -1e30))
        shown = torch.isfinite(slope) & visible
        multiplier = float(slope[shown].double().mean()) if bool(shown.any()) else 1.0
        flat = bool(((high - low)[shown] < 1e20).all()) and bool(shown.any())
        batch, heads = self.query.shape[:2]
        bare = Rows(
            batch, heads, length, self.key.shape[-2], not bool(visible.all()), lambda at: modify(self._scores(at), at)
        )
        return (
            bare.measure(rows, lambda: torch.full((heads,), torch.inf, dtype=torch.float64)),
            self.scale * multiplier,
            float(high[shown].mean()) if flat else None,
            float(at_zero[shown].max()) if bool((at_zero[shown] != 0).any()) else None,
            looks_causal(visible, probe, length),
        )


@dataclass(frozen=True)
class _Way:
    """How the queries, or keys, of a kernel came from their projection, a value a head."""

    factor: np.ndarray[Any, np.dtype[np.float64]]
    normalised: bool
    width: int | None
    channels: int  # heads that are not copies of each other

    def as_tensor(self, like: Tensor) -> Tensor:
        return torch.from_numpy(self.factor).to(like)[:, None, None]


def _way(node: Node | None, tensor: Tensor, count_heads: bool = False) -> _Way:
    heads, last = tensor.shape[1], tensor.shape[-2] - 1
    if node is None or len(node.shape) != 4 or not tensor.numel():
        return _Way(np.ones(heads), False, None, heads)
    points = np.repeat(grid(1, heads, 1, 1), 2, axis=0)
    points[1::2, 2] = last
    factor, trails = np.ones(len(points)), follow(node, points)
    for trail in trails:
        factor[trail.index] = trail.factor
    projection = trails[0].node.projection
    distinct = heads
    if count_heads:  # a cache stands before the new keys, padding after them: one of the two ends tells heads apart
        keys = channels(node, points)
        distinct = max(len(set(keys[end::2]) - {()}) for end in (0, 1))
    return _Way(
        factor.reshape(heads, 2).mean(1),
        all(trail.normalised for trail in trails),
        None if projection is None else projection.width,
        distinct if distinct and heads % distinct == 0 else heads,
    )


def _unpadded(query: Tensor, node: Node | None) -> int:
    """The head dimension before SDPA filled it up to a multiple of eight."""
    while node is not None and len(node.steps) == 1 and node.steps[0].effect == "same":
        parent = node.steps[0].parent
        if len(parent.shape) == len(node.shape) and parent.shape[:-1] == node.shape[:-1]:
            if parent.shape[-1] < node.shape[-1]:
                return parent.shape[-1]
            node = parent
        else:
            break
    return query.shape[-1]


def _some(tensor: Tensor) -> Tensor:
    return tensor[:, :, :: max(1, tensor.shape[-2] // PROBED_ROWS)].detach()


def _visible(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else infinite(mask) != -math.inf


def _is_causal(visible: Tensor, length: int) -> bool:
    if visible.shape[-2] == 1 or visible.dim() < 2:
        return False
    probe = torch.linspace(0, length - 1, min(PROBED_ROWS, length)).round().long()
    rows = visible[..., probe.to(visible.device), :]
    return looks_causal(rows.reshape(1, -1, *rows.shape[-2:]), probe, length)


def _highest_bias(mask: Tensor | None) -> float | None:
    """The most that a mask adds to what it shows; None where it adds nothing."""
    if mask is None or mask.dtype == torch.bool:
        return None
    shown = infinite(mask)
    return float(shown.max()) if bool(((shown != 0) & (shown != -math.inf)).any()) else None


# --- what each kernel's arguments mean -----------------------------------------------------------------------------


def recognised(name: str) -> bool:
    """Whether an operation is an attention kernel."""
    return name in READERS or name.startswith("aten::_scaled_dot_product_")


def kernel_calls(ledger: Ledger, name: str, given: dict[str, Any]) -> Iterator[Kernel]:
    """The attentions that a call of a kernel computes; `given` are its arguments by name."""
    reader = READERS.get(name, _sdpa)
    return reader(ledger, given)


def _sdpa(ledger: Ledger, given: dict[str, Any]) -> Iterator[Kernel]:
    query, key = given["query"], given["key"]
    mask = given.get("attn_mask") if given.get("attn_mask") is not None else given.get("attn_bias")
    scale = given.get("scale")
    if query.dim() == 4:
        yield Kernel(
            "sdpa", query, key, query.shape[-1] ** -0.5 if scale is None else float(scale), ledger.node(query),
            ledger.node(key), mask, bool(given.get("is_causal")), value_node=ledger.node(given["value"]),
        )  # fmt: skip


def _own(ledger: Ledger, given: dict[str, Any]) -> Iterator[Kernel]:
    yield from _sdpa(ledger, given)


def _flash(ledger: Ledger, given: dict[str, Any]) -> Iterator[Kernel]:
    """flash-attn: (batch, positions, heads, features), causal aligned to the last key."""
    query, key = (given[name].transpose(1, 2) for name in ("q", "k"))
    mask = _window(query, key, bool(given.get("causal")), given)
    yield Kernel(
        "flash", query, key, float(given["softmax_scale"]), _turned(ledger.node(given["q"])),
        _turned(ledger.node(given["k"])), mask, softcap=given.get("softcap") or None,
        value_node=_turned(ledger.node(given["v"])),
    )  # fmt: skip


def _flash_varlen(ledger: Ledger, given: dict[str, Any]) -> Iterator[Kernel]:
    """flash-attn over sequences laid end to end."""
    starts, key_starts = (given[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    for start, stop, key_start, key_stop in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
        query, key = given["q"][None, start:stop], given["k"][None, key_start:key_stop]
        if query.numel() and key.numel():
            lone = next(_flash(ledger, {**given, "q": query, "k": key}))
            yield replace(lone, query_node=None, key_node=None, value_node=None)


def _turned(node: Node) -> Node:
    batch, length, heads, width = node.shape
    return moved(node, (batch, heads, length, width), transposed(4, 1, 2))


def _window(query: Tensor, key: Tensor, causal: bool, given: dict[str, Any]) -> Tensor | None:
    left, right = given.get("window_size_left", -1), 0 if causal else given.get("window_size_right", -1)
    if left is None or (left < 0 and right < 0):
        return None
    rows = torch.arange(query.shape[-2], device=query.device)[:, None] + key.shape[-2] - query.shape[-2]
    columns = torch.arange(key.shape[-2], device=query.device)
    shown = torch.ones(len(rows), len(columns), dtype=torch.bool, device=query.device)
    shown = shown if left < 0 else shown & (columns >= rows - left)
    return shown if right < 0 else shown & (columns <= rows + right)


def _native(ledger: Ledger, given: dict[str, Any]) -> Iterator[Kernel]:
    """torch's own fast path of nn.MultiheadAttention, which projects inside."""
    heads, weight, bias = given["num_head"], given["qkv_weight"], given["qkv_bias"]
    width = weight.shape[1]
    query = F.linear(given["query"], weight[:width], bias[:width])
    key = F.linear(given["key"], weight[width : 2 * width], bias[width : 2 * width])
    for kernel in _projected_inside(query, key, heads, given.get("mask"), given.get("mask_type")):
        yield replace(kernel, origins=_packed_origins(ledger, weight, bias, heads))


def _encoder_layer(ledger: Ledger, given: dict[str, Any]) -> Iterator[Kernel]:
    """torch's own fast path of nn.TransformerEncoderLayer."""
    source, width = given["src"], given["embed_dim"]
    mask, mask_type = given.get("mask"), given.get("mask_type")
    if source.is_nested:
        lengths = torch.tensor([len(part) for part in source.unbind()], device=source.device)
        source = source.to_padded_tensor(0.0)
        beyond = torch.arange(source.shape[1], device=source.device) >= lengths[:, None]
        mask, mask_type = (beyond[:, None, :] | beyond[:, :, None]).unsqueeze(1), None
    if given["norm_first"]:
        source = F.layer_norm(source, (width,), given["norm_weight_1"], given["norm_bias_1"], given["eps"])
    packed = F.linear(source, given["qkv_weight"], given["qkv_bias"])
    query, key, _ = packed.chunk(3, dim=-1)
    for kernel in _projected_inside(query, key, given["num_heads"], mask, mask_type):
        origins = _packed_origins(ledger, given["qkv_weight"], given["qkv_bias"], given["num_heads"])
        yield replace(kernel, inside="self_attn", origins=origins)


def _packed_origins(ledger: Ledger, weight: Tensor, bias: Tensor | None, heads: int) -> Origins:
    """Queries, keys and values are thirds of the rows of one weight."""
    width, added = weight.shape[0] // 3, None if bias is None else ledger.node(bias)
    parts = (projected_origin(ledger.node(weight), added, third * width, heads, width // heads) for third in range(3))
    return Origins(*parts)


def _projected_inside(
    query: Tensor, key: Tensor, heads: int, mask: Tensor | None, mask_type: int | None
) -> Iterator[Kernel]:
    width = query.shape[-1]
    query, key = (tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (query, key))
    if mask is not None:
        shown = ~mask.to(torch.bool)  # true, or −∞, hides
        mask = shown[:, None, None, :] if mask_type == 1 and shown.dim() == 2 else shown
    yield Kernel("fast path", query, key, query.shape[-1] ** -0.5, mask=mask, width=width)


READERS: dict[str, Callable[[Ledger, dict[str, Any]], Iterator[Kernel]]] = {
    "aten::_native_multi_head_attention": _native,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "attnscale::attention_rows": _own,
    "flash_attn::_flash_attn_forward": _flash,
    "flash_attn::_flash_attn_varlen_forward": _flash_varlen,
}


def flex_call(ledger: Ledger, args: tuple[Any, ...]) -> Kernel:
    """FlexAttention: query, key, value, score_mod, block_mask, scale, options, buffers of both functions."""
    query, key, value, score_mod, block_mask, scale, _, score_buffers, mask_buffers = args
    mask_mod = block_mask[-1]

    def modify(scores: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        batch, heads, _, keys = scores.shape
        at = [torch.arange(size, device=scores.device) for size in (batch, heads, 0, keys)]
        at[2] = positions.to(scores.device)
        score = _over_all(lambda s, b, h, i, j: score_mod(s, b, h, i, j, *score_buffers), scored=True)
        shown = _over_all(lambda b, h, i, j: mask_mod(b, h, i, j, *mask_buffers), scored=False)
        visible = shown(*at).expand(batch, heads, -1, -1)
        changed = score(scores, *at)
        return changed, visible & (changed != -math.inf)

    return Kernel(
        "flex", query, key, float(scale), ledger.node(query), ledger.node(key), score_mod=modify,
        value_node=ledger.node(value),
    )  # fmt: skip


def _over_all(function: Callable[..., Tensor], scored: bool) -> Callable[..., Tensor]:
    """A function of one score and four indices -> the same for all of them."""
    lead = (0,) if scored else ()
    for axis in range(3, -1, -1):
        indices = tuple(0 if at == axis else None for at in range(4))
        function = torch.vmap(function, in_dims=(*lead, *indices), out_dims=0)
    return function
