"""Attention computed by a kernel: its arguments say what was applied, and lineage what came before."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnscale.attending.call import Call, fold
from attnscale.measure.engine import measured as stats_of
from attnscale.measure.lengths import mean_cosine
from attnscale.measure.stats import ScoreStats
from attnscale.numerics import is_surely_finite, wide_dtype, without_autocast
from attnscale.tracing.coordinates import Indices, grid
from attnscale.tracing.following import Trail, Way, channels, channels_along, outputs_of_one
from attnscale.tracing.lineage import Node
from attnscale.tracing.operations.mixing import are_paired_otherwise
from attnscale.tracing.parameters import Origin, Origins, sampled_origin
from attnscale.tracing.roles import Softmax
from attnscale.visibility import EVERYTHING, Visibility, shown_by
from attnscale.watching.call import Factors, SeenCall
from attnscale.watching.gradients import Learning, owners_told
from attnscale.watching.hiding import flags_added, highest_added, keys_nobody_sees
from attnscale.watching.kept import keep_kernel_call
from attnscale.watching.kernels.projected import (
    by_entry,
    ends_by_position,
    measured,
    projected_norm,
    some_of,
    trails_of,
    unpadded,
    way_of,
)
from attnscale.watching.reading import Reading, detached_sides, differs_by_row, lost_on_the_way, rescaled_sides
from attnscale.watching.rows import Rows, looks_causal, spread_positions
from attnscale.watching.shards import TAIL

PROBED_ROWS = 64  # for masks
MODIFIED_ROWS = 8  # on which a score modification is asked what it does

ScoreMod = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # scores, positions of their rows -> scores, visible


@dataclass(frozen=True)
class KernelCall:
    """One call of a fused kernel: query (batch, heads, q_len, d), key (batch, kv_heads, kv_len, d)."""

    kind: str
    query: Tensor
    key: Tensor
    scale: float
    query_node: Node | None = None  # None: projected inside the kernel
    key_node: Node | None = None
    visibility: Visibility = EVERYTHING
    softcap: float | None = None
    width: int | None = None  # of what was projected, where that is known
    inside: str = ""  # the submodule it stands for, which did not run itself
    score_mod: ScoreMod | None = None
    value_node: Node | None = None
    origins: Origins | None = None  # where they are known without following anything
    value: Tensor | None = None
    attends_itself: bool = False  # queries and keys are known to be of the same positions
    drops: bool = False  # weights at random
    hidden: Tensor | None = None  # keys, by its mask from every query, where that was told
    lse: Tensor | None = None  # of every row, (batch, heads, q_len), where the kernel left it
    learning: tuple[Learning, Learning] | None = None  # what gradients of queries and keys reach; None: themselves
    heads_in_batch: bool = False  # the kernel was given heads in the place of the batch
    softmax: Softmax = field(default_factory=partial(Softmax, axis=-1))  # which is told what becomes of its weights

    def seen(self, rows: int | None, keep: bool) -> SeenCall:
        """Everything that is reported of this call."""
        heads, head_dim = self.query.shape[1], unpadded(self.query, self.query_node)
        query_trails = trails_of(self.query_node, self.query)
        (query_way, by_end), (key_way, _) = way_of(query_trails, heads), self._key_way
        group, owners = self.group, self._owners()
        attends_itself = self.attends_itself or (query_way.source is not None and query_way.source is key_way.source)
        call = replace(self, attends_itself=attends_itself)
        of_query = query_way.factor
        if query_trails and self.query_node is not None and not query_way.constant and len(self.query) > 1:
            found_by_entry = by_entry(self.query_node, None if call.padding is None else call.padding.cpu().numpy())
            of_query, query_way = found_by_entry.factors, query_way._replace(factor=found_by_entry.mean)
        factor = np.abs(query_way.factor) * np.repeat(np.abs(key_way.factor), group)
        found = call._plain(rows) if self.score_mod is None else call.modified(self.score_mod, rows)
        query_norm, key_norm = self._norms((of_query, key_way.factor), found, every=rows is None)
        kept = keep_kernel_call(call, found.multiplier * factor, (query_way, key_way), found.softcap) if keep else None
        self.softmax.pairs_differ, self.softmax.drops = self._pairs_differ(), self.drops
        return SeenCall(
            kind=self.kind,
            heads=heads,
            kv_heads=int(owners.max(initial=-1)) + 1,
            key_owners=owners,
            head_dim=head_dim,
            model_dims=tuple({width for width in (self.width or query_way.width, heads * head_dim) if width}),
            query_len=self.query.shape[-2],
            key_len=self.key.shape[-2],
            causal=found.causal,
            softcap=found.softcap,
            dtype=self.query.dtype,
            stats=found.stats,
            scales=torch.from_numpy(found.multiplier * factor),
            query_norm=query_norm,
            key_norm=key_norm,
            batch=self.query.shape[0],
            attends_itself=attends_itself,
            padding=found.padding,
            normalised=query_way.normalised and key_way.normalised,
            biased=found.bias is not None,
            cosine=None if found.bias is None else call.cosine(found),
            query=self.query[:1].detach() / _as_tensor(query_way.factor, self.query) if keep else None,
            key=self.key[:1].detach() / _as_tensor(key_way.factor, self.key) if keep else None,
            kept=kept,
            origins=self.origins or Origins(*self._origins()),
            highest_bias=max(0.0, found.bias or 0.0),
            factors=(query_way.factor, key_way.factor) if self._is_told_by(query_way, key_way) else None,
            reading=Reading(
                differs_by_row(by_end) or lost_on_the_way(query_way, key_way),
                learned_factor=query_way.learned_factor or key_way.learned_factor,
                detached=detached_sides(query_way, key_way),
                rescaled=rescaled_sides(query_way, key_way),
                inert_added=flags_added(self.visibility.bias),
            ),
            softmax=self.softmax,
        )

    def _norms(self, factors: tuple[Factors, Factors], found: "Found", every: bool) -> tuple[Tensor, Tensor]:
        """Of queries and of the key that each of their heads has, before these factors."""
        query = projected_norm(self.query, factors[0], found.padding, every)
        key = projected_norm(self.key, factors[1], found.hidden_keys, every)
        return query, key if self.group == 1 else key.repeat_interleave(self.group)

    def cosine(self, found: "Found") -> Tensor:
        """Root mean square of the cosine between the queries and keys of each head, padding aside."""
        (query, padding), (key, hidden) = measured(self.query, found.padding), measured(self.key, found.hidden_keys)
        return mean_cosine(query, key, (padding, hidden))

    def _is_told_by(self, *ways: Way) -> bool:
        """Whether its arguments and these ways tell all of it, at every step."""
        return all(way.constant for way in ways)

    @property
    def has_finite_lse(self) -> bool:
        """Whether the kernel tells of every row that its weights are numbers."""
        return self.lse is not None and is_surely_finite(self.lse)

    @property
    def is_causal(self) -> bool:
        """Whether the kernel's arguments say that no row sees a later key, its mask aside."""
        return self.visibility.last in (0, self.key.shape[-2] - self.query.shape[-2])

    def highest_bias(self) -> float:
        """The most that its mask adds to a score; never below 0."""
        return max(0.0, highest_added(self.visibility.bias) or 0.0)

    def some(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys spread over their positions, and the last queries."""
        return some_of(self.query), some_of(self.key), self.query[:, :, -TAIL:]

    def _origins(self) -> Iterator[Origin | None]:
        """Of queries, keys and values: at the first and the last position."""
        for node in (self.query_node, self.key_node):
            if node is None or len(node.shape) != 4 or not all(node.shape):
                yield None
                continue
            _, heads, length, features = node.shape
            yield Origin(node, ends_by_position(heads, length), heads, axis=3, features=features).settled()
        yield None if self.value_node is None else sampled_origin(self.value_node, axis=-1)

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.query.shape[1] // max(self.key.shape[1], 1)

    @cached_property
    def hidden_keys(self) -> Tensor | None:
        """Keys that its mask hides from every query, (batch or 1, keys)."""
        return keys_nobody_sees(self.visibility.mask) if self.hidden is None else self.hidden

    @property
    def padding(self) -> Tensor | None:
        """Queries that stand where nobody sees the key, (batch, queries); None where that is not known."""
        batch, _, length, _ = self.query.shape
        hidden = self.hidden_keys
        if not self.attends_itself or hidden is None or hidden.shape[-1] != length:
            return None
        return hidden.expand(batch, -1)

    @property
    def scored(self) -> Call:
        """The attention that the kernel's arguments say; queries of padding are left out."""
        seen = self.visibility.with_infinite_mask()
        seen = seen if self.padding is None else seen.without_rows(self.padding)
        query, key, _, seen = fold(self.query, self.key, self.key, seen, enable_gqa=True)
        return Call(query, key, key, seen, 0.0, self.scale, self.softcap)

    def stats(self, rows: int | None) -> ScoreStats:
        """Of its scores."""
        with torch.no_grad(), without_autocast(self.query):
            return stats_of(self.scored, rows, self.lse)

    def _plain(self, rows: int | None) -> "Found":
        causal = self.is_causal or _is_causal(self.visibility.mask, self.query.shape[-2])
        bias = highest_added(self.visibility.bias)
        return Found(self.stats(rows), self.scale, self.softcap, bias, causal, self.hidden_keys, self.padding)

    @cached_property
    def _key_trails(self) -> list[Trail]:
        return trails_of(self.key_node, self.key)

    @property
    def _key_way(self) -> tuple[Way, Factors]:
        return way_of(self._key_trails, self.key.shape[1])

    @cached_property
    def _has_a_key_a_head(self) -> bool:
        """Whether each key head is an output of its own of one projection, as in most models: then none is a copy."""
        heads = self.key.shape[1]
        rows = outputs_of_one(self._key_trails, 2 * heads)
        return rows is not None and len(set(map(tuple, rows[0::2].tolist()))) == heads

    @cached_property
    def _key_channels(self) -> list[tuple[object, ...]]:
        """Of every key head at the first and the last position, in turns."""
        return channels_along(self._key_trails, 2 * self.key.shape[1])

    def _owners(self) -> Indices:
        """Which key each query head has: key heads may be copies of each other."""
        heads = self.key.shape[1]
        own = np.arange(heads)
        if self.query.shape[1] == heads > 1 and self._key_trails and not self._has_a_key_a_head:
            own = owners_told((self._key_channels[0::2], self._key_channels[1::2]), own)
        return np.repeat(own, self.group)

    def _pairs_differ(self) -> bool:
        """Whether heads that share a key share its value as well; asked of those alone that share one."""
        value = self.value_node
        if value is None or len(value.shape) != 4 or not all(value.shape) or not self._key_trails:
            return False
        if self._has_a_key_a_head:
            return False
        keys = self._key_channels[0::2]
        if len(set(keys)) == len(keys) or value.shape[1] != len(keys):
            return False
        return are_paired_otherwise(keys, channels(value, grid(1, len(keys), 1, 1)))

    def scores(self, positions: Tensor) -> Tensor:
        """Of rows at these positions, before any soft-cap, mask or modification: (batch, heads, rows, keys)."""
        group = self.query.shape[1] // self.key.shape[1]
        query = self.query[:, :, positions.to(self.query.device)].to(wide_dtype(self.query))
        return query @ self.key.repeat_interleave(group, 1).to(query.dtype).mT * self.scale

    def modified(self, modify: ScoreMod, rows: int | None) -> "Found":
        """What a score modification does, all by asking it."""
        length = self.query.shape[-2]
        probe = spread_positions(length, MODIFIED_ROWS)
        scores = self.scores(probe)
        at_zero, visible = modify(torch.zeros_like(scores), probe)
        step = 2.0**-6
        slope = (modify(torch.full_like(scores, step), probe)[0] - at_zero) / step
        high, low = (modify(torch.full_like(scores, limit), probe)[0] - at_zero for limit in (1e30, -1e30))
        shown = torch.isfinite(slope) & visible
        multiplier = float(slope[shown].double().mean()) if bool(shown.any()) else 1.0
        flat = bool(((high - low)[shown] < 1e20).all()) and bool(shown.any())
        batch, heads = self.query.shape[:2]
        by_row = Rows(
            batch, heads, length, self.key.shape[-2], not bool(visible.all()), lambda at: modify(self.scores(at), at)
        )
        hidden = by_row.keys_nobody_sees(probe)
        padding = hidden if self.attends_itself and self.key.shape[-2] == length else None
        return Found(
            by_row.without(padding).measure(rows, lambda: torch.full((heads,), torch.inf, dtype=torch.float64)),
            self.scale * multiplier,
            float(high[shown].mean()) if flat else None,
            float(at_zero[shown].max()) if bool((at_zero[shown] != 0).any()) else None,
            looks_causal(visible, probe, length),
            hidden,
            padding,
        )


class Found(NamedTuple):
    """What the scores of a kernel are, by its arguments or by asking its score modification."""

    stats: ScoreStats
    multiplier: float
    softcap: float | None
    bias: float | None  # the most that is added to a score; None: nothing
    causal: bool
    hidden_keys: Tensor | None  # from every query
    padding: Tensor | None  # queries that are left out


def _as_tensor(factor: Factors, like: Tensor) -> Tensor:
    return torch.from_numpy(factor).to(like)[:, None, None]


def _is_causal(mask: Tensor | None, length: int) -> bool:
    if mask is None or mask.dim() < 2 or mask.shape[-2] == 1:
        return False
    visible, probe = shown_by(mask), spread_positions(length, PROBED_ROWS)
    rows = visible[..., probe.to(visible.device), :]
    return looks_causal(rows.reshape(1, -1, *rows.shape[-2:]), probe, length)
