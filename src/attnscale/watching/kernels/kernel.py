"""Attention computed by a kernel: its arguments say what was applied, and lineage what came before."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnscale.measure.engine import score_stats
from attnscale.measure.stats import ScoreStats
from attnscale.numerics import wide_dtype
from attnscale.tracing.coordinates import grid
from attnscale.tracing.lineage import Node, follow
from attnscale.tracing.operations.products import channels
from attnscale.tracing.parameters import Origin, Origins, sampled_origin
from attnscale.watching.call import Factors, Rows, Sighting, looks_causal, rms_norm
from attnscale.watching.shards import TAIL
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
            stats=self.stats(rows) if stats is None else stats,
            scales=torch.from_numpy(multiplier * factor),
            query_norm=projected_norm(self.query, query_way.factor),
            key_norm=projected_norm(self.key, key_way.factor).repeat_interleave(group),
            normalised=query_way.normalised and key_way.normalised,
            biased=bias is not None,
            query=self.query[:1].detach() / query_way.as_tensor(self.query) if keep else None,
            key=self.key[:1].detach() / key_way.as_tensor(self.key) if keep else None,
            origins=self.origins or Origins(*self._origins()),
            highest_bias=max(0.0, bias or 0.0),
            factors=(query_way.factor, key_way.factor) if query_way.constant and key_way.constant else None,
        )

    def highest_bias(self) -> float:
        """The most that its mask adds to a score; never below 0."""
        return max(0.0, _highest_bias(self.mask) or 0.0)

    def some(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys spread over their positions, and the last queries."""
        return _some(self.query), _some(self.key), self.query[:, :, -TAIL:]

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

    def stats(self, rows: int | None) -> ScoreStats:
        """Of the scores that the kernel's arguments say."""
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
    constant: bool = False  # the factors are the same at every step

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
        all(trail.constant for trail in trails),
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


def projected_norm(tensor: Tensor, factor: Factors) -> Tensor:
    """Of vectors as they left their projection; on their device, since to look at it would be to wait for a GPU."""
    norm = rms_norm(_some(tensor))
    return norm if (factor == 1).all() else norm / torch.from_numpy(np.abs(factor)).to(norm.device, non_blocking=True)


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
