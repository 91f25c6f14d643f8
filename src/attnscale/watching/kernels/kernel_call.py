"""KernelCall: attention by a fused kernel, read from the kernel's arguments and the lineage of its inputs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.attending.call import Call, fold
from attnscale.measure.lengths import mean_cosine, mean_lengths
from attnscale.measure.measuring import measured
from attnscale.measure.stats import ScoreStats
from attnscale.numerics import constant_on, is_surely_finite, wide_dtype, without_autocast
from attnscale.tracing.coordinates import Indices, Points, grid
from attnscale.tracing.following import (
    ProjectionPath,
    Trace,
    channels,
    channels_along,
    follow,
    projection_path,
    row_of_parameter,
)
from attnscale.tracing.lineage import Node
from attnscale.tracing.parameters import Origin, Origins, released, sampled_origin
from attnscale.tracing.products import are_paired_otherwise
from attnscale.tracing.roles import Softmax
from attnscale.visibility import EVERYTHING, Visibility, shown_by
from attnscale.watching.gradients import key_owners_of
from attnscale.watching.layer import Factors, MeasuredCall, Reading, Wiring, differs_by_row
from attnscale.watching.rows import Rows, flags_added, highest_added, keys_nobody_sees, looks_causal, spread_positions
from attnscale.watching.saved_call import save_kernel_call

PROBED_ROWS = 64  # rows of a mask that are examined
NORMED_ROWS = 64
MODIFIED_ROWS = 8  # rows on which a score modification is tested

Positions = Tensor | None  # (batch or 1, positions): True for excluded positions
ScoreMod = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # (scores, row positions) -> (scores, visible)


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
    width: int | None = None  # width of the projection's input, if known
    inside: str = ""  # submodule that the kernel replaces
    score_mod: ScoreMod | None = None
    value_node: Node | None = None
    origins: Origins | None = None  # set if known without following the lineage
    value: Tensor | None = None
    attends_itself: bool = False  # self-attention: queries and keys have the same positions
    drops: bool = False  # applies dropout to the weights
    hidden: Tensor | None = None  # keys that the mask hides from every query; None: computed from the mask
    lse: Tensor | None = None  # log-sum-exp of every row, (batch, heads, q_len), if the kernel returned it
    # query and key with heads merged into the batch, and a function that separates them; None: heads have an axis
    heads_in_batch: tuple[Tensor, Tensor, Callable[[Tensor], Tensor]] | None = None
    softmax: Softmax = field(default_factory=partial(Softmax, axis=-1))  # collects how its weights are used

    def measure(self, rows: int | None, keep: bool) -> MeasuredCall:
        """Measure this call."""
        heads, head_dim = self.query.shape[1], _unpadded_head_dim(self.query, self.query_node)
        query_traces = _follow_ends(self.query_node, self.query)
        (query_path, by_end), (key_path, _) = _projection_path(query_traces, heads), self._key_path
        group, owners = self.group, self._owners()
        attends_itself = self.attends_itself or (query_path.source is not None and query_path.source is key_path.source)
        call = replace(self, attends_itself=attends_itself)
        query = self.query
        if query_traces and self.query_node is not None and not query_path.constant and len(self.query) > 1:
            left_out = None if call.padding is None else call.padding.cpu().numpy()
            by_entry, rows_by_entry = _by_entry(self.query_node, left_out)
            weights = rows_by_entry if rows_by_entry.any() else None
            query_path = query_path._replace(factor=np.average(by_entry, axis=0, weights=weights))
            divisor = np.where(
                by_entry == 0, 1.0, np.abs(by_entry)
            )  # log n scaling multiplies a row with one key by ln 1 = 0
            query = query.detach() / torch.from_numpy(divisor).to(query)[..., None, None]
        factors = np.abs(query_path.factor), np.repeat(np.abs(key_path.factor), group)
        factor = query_path.signed_factor * np.repeat(key_path.signed_factor, group)
        found = call._plain(rows) if self.score_mod is None else call.modified(self.score_mod, rows)
        norm_factors = factors if query is self.query else (np.ones(heads), factors[1])
        excluded = found.padding, found.hidden_keys
        lengths = measured_lengths(query, self.key, excluded, every=rows is None)
        query_norm, key_norm = map(_before, lengths, norm_factors)
        kept = (
            save_kernel_call(call, found.multiplier * factor, (query_path, key_path), found.softcap) if keep else None
        )
        of_paths = Reading.of_paths(query_path, key_path)
        self.softmax.pairs_differ, self.softmax.drops = self._pairs_differ(), self.drops
        return MeasuredCall(
            kind=self.kind,
            heads=heads,
            kv_heads=int(owners.max(initial=-1)) + 1,
            key_owners=owners,
            first_row=_first_row(query_traces),
            head_dim=head_dim,
            model_dims=tuple({width for width in (self.width or query_path.width, heads * head_dim) if width}),
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
            wiring=Wiring(query_path.normalised and key_path.normalised, biased=found.bias is not None),
            cosine=None if found.bias is None else call.cosine(found),
            kept=kept,
            origins=self.origins or Origins(*self._origins()),
            highest_bias=max(0.0, found.bias or 0.0),
            factors=(query_path.factor, key_path.factor) if query_path.constant and key_path.constant else None,
            reading=replace(
                of_paths,
                unread=differs_by_row(by_end) or of_paths.unread,
                inert_added=flags_added(self.visibility.bias),
            ),
            softmax=self.softmax,
        )

    def cosine(self, found: "KernelScores") -> Tensor:
        """Return the root mean square cosine between queries and keys of each head, without padding."""
        (query, padding), (key, hidden) = _measured(self.query, found.padding), _measured(self.key, found.hidden_keys)
        return mean_cosine(query, key, (padding, hidden))

    @property
    def has_finite_lse(self) -> bool:
        """True if the log-sum-exp of every row is finite, so no weight is NaN."""
        return self.lse is not None and is_surely_finite(self.lse)

    @property
    def is_causal(self) -> bool:
        """True if the kernel's arguments request causal attention; its mask may hide more."""
        return self.visibility.last in (0, self.key.shape[-2] - self.query.shape[-2])

    def _origins(self) -> Iterator[Origin | None]:
        for node in (self.query_node, self.key_node):
            if node is None or len(node.shape) != 4 or not all(node.shape):
                yield None
                continue
            _, heads, length, features = node.shape
            yield released(Origin(node, _ends_by_position(heads, length), heads, axis=3, features=features))
        yield None if self.value_node is None else sampled_origin(self.value_node, axis=-1)

    @property
    def group(self) -> int:
        """Number of query heads per key head."""
        return self.query.shape[1] // max(self.key.shape[1], 1)

    @cached_property
    def hidden_keys(self) -> Tensor | None:
        """True for keys that the mask hides from every query, (batch or 1, keys)."""
        return keys_nobody_sees(self.visibility.mask) if self.hidden is None else self.hidden

    @property
    def padding(self) -> Tensor | None:
        """True for queries at positions with hidden keys, (batch, queries); None if unknown."""
        batch, _, length, _ = self.query.shape
        hidden = self.hidden_keys
        if not self.attends_itself or hidden is None or hidden.shape[-1] != length:
            return None
        return hidden.expand(batch, -1)

    @property
    def scored(self) -> Call:
        """The attention described by the kernel's arguments, without padding queries."""
        seen = self.visibility.with_infinite_mask()
        seen = seen if self.padding is None else seen.without_rows(self.padding)
        query, key, _, seen = fold(self.query, self.key, self.key, seen, enable_gqa=True)
        return Call(query, key, key, seen, 0.0, self.scale, self.softcap)

    def stats(self, rows: int | None) -> ScoreStats:
        """Return statistics of the scores."""
        with torch.no_grad(), without_autocast(self.query):
            return measured(self.scored, rows, self.lse)

    def _plain(self, rows: int | None) -> "KernelScores":
        causal = self.is_causal or _is_causal(self.visibility.mask, self.query.shape[-2])
        bias = highest_added(self.visibility.bias)
        return KernelScores(self.stats(rows), self.scale, self.softcap, bias, causal, self.hidden_keys, self.padding)

    @cached_property
    def _key_traces(self) -> list[Trace]:
        return _follow_ends(self.key_node, self.key)

    @property
    def _key_path(self) -> tuple[ProjectionPath, Factors]:
        return _projection_path(self._key_traces, self.key.shape[1])

    @cached_property
    def _key_channels(self) -> list[tuple[object, ...]]:
        return channels_along(self._key_traces, 2 * self.key.shape[1])

    def _owners(self) -> Indices:
        heads = self.key.shape[1]
        own = np.arange(heads)
        if self.query.shape[1] == heads > 1 and self._key_traces:
            own = key_owners_of((self._key_channels[0::2], self._key_channels[1::2]), own)
        return np.repeat(own, self.group)

    def _pairs_differ(self) -> bool:
        value = self.value_node
        if value is None or len(value.shape) != 4 or not all(value.shape) or not self._key_traces:
            return False
        keys = self._key_channels[0::2]
        if len(set(keys)) == len(keys) or value.shape[1] != len(keys):
            return False
        return are_paired_otherwise(keys, channels(value, grid(1, len(keys), 1, 1)))

    def scores(self, positions: Tensor) -> Tensor:
        """Return the scores of these rows, (batch, heads, rows, keys), before any soft-cap, mask or modification."""
        group = self.query.shape[1] // self.key.shape[1]
        query = self.query[:, :, positions.to(self.query.device)].to(wide_dtype(self.query))
        return query @ self.key.repeat_interleave(group, 1).to(query.dtype).mT * self.scale

    def modified(self, modify: ScoreMod, rows: int | None) -> "KernelScores":
        """Measure a call with a score modification, which is evaluated to find its effect."""
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
        return KernelScores(
            by_row.without(padding).measure(rows, lambda: torch.full((heads,), torch.inf, dtype=torch.float64)),
            self.scale * multiplier,
            float(high[shown].mean()) if flat else None,
            float(at_zero[shown].max()) if bool((at_zero[shown] != 0).any()) else None,
            looks_causal(visible, probe, length),
            hidden,
            padding,
        )


class KernelScores(NamedTuple):
    """Properties of a kernel's scores, from its arguments or its score modification."""

    stats: ScoreStats
    multiplier: float
    softcap: float | None
    bias: float | None  # largest value added to a score; None if nothing is added
    causal: bool
    hidden_keys: Tensor | None  # True for keys hidden from every query
    padding: Tensor | None  # True for padding queries


def _is_causal(mask: Tensor | None, length: int) -> bool:
    if mask is None or mask.dim() < 2 or mask.shape[-2] == 1:
        return False
    visible, probe = shown_by(mask), spread_positions(length, PROBED_ROWS)
    rows = visible[..., probe.to(visible.device), :]
    return looks_causal(rows.reshape(1, -1, *rows.shape[-2:]), probe, length)


def measured_lengths(
    query: Tensor, key: Tensor, left_out: tuple[Positions, Positions], every: bool
) -> tuple[Tensor, Tensor]:
    """Return root mean square lengths of each head's queries and keys in a kernel call.

    They cover every position that is not in `left_out`, or an evenly spaced sample of these. Results stay on the
    device, because reading one would synchronise.
    """
    query, padding = _measured(query, left_out[0], every)
    key, hidden = _measured(key, left_out[1], every)
    return mean_lengths(query, key, (padding, hidden))


def _before(norm: Tensor, factor: Factors) -> Tensor:
    return norm if (factor == 1).all() else norm / constant_on(norm.device, np.abs(factor))


def _measured(vectors: Tensor, left_out: Positions, every: bool = False) -> tuple[Tensor, Positions]:
    step = 1 if every else _step(vectors)
    return vectors.detach()[:, :, ::step], None if left_out is None else left_out[:, ::step]


def _step(vectors: Tensor) -> int:
    return max(1, vectors.shape[-2] // NORMED_ROWS)


def _ends(heads: int, length: int) -> Points:
    """Return the first feature of every head, alternating between the first and the last position."""
    points = np.repeat(grid(1, heads, 1, 1), 2, axis=0)
    points[1::2, 2] = length - 1
    return points


def _ends_by_position(heads: int, length: int) -> Points:
    positions = sorted({0, min(1, length - 1), max(0, length - 2), length - 1})
    points = np.tile(grid(1, heads, 1, 1), (len(positions), 1))
    points[:, 2] = np.repeat(positions, heads)
    return points


def _follow_ends(node: Node | None, tensor: Tensor) -> list[Trace]:
    if node is None or len(node.shape) != 4 or not tensor.numel():
        return []
    return follow(node, _ends(tensor.shape[1], tensor.shape[2]))


def _first_row(traces: list[Trace]) -> tuple[object, ...]:
    """Return the parameter row that makes the first head's query; the last position is used if the first is padding."""
    found = channels_along(traces, 1 + max((int(trace.index.max()) for trace in traces), default=1))[:2]
    return next(filter(None, map(row_of_parameter, found)), ())


def _projection_path(traces: list[Trace], heads: int) -> tuple[ProjectionPath, Factors]:
    if not traces:
        return ProjectionPath(np.ones(heads), False, None, False), np.ones((heads, 2))
    found = projection_path(traces, 2 * heads)
    by_end = found.factor.reshape(heads, 2)
    return found._replace(factor=by_end.mean(1)), by_end


def _by_entry(node: Node, left_out: NDArray[np.bool_] | None) -> tuple[Factors, NDArray[np.int64]]:
    """Return the factor on the queries of each batch entry, (batch, heads), and its number of rows.

    Rows in `left_out`, (batch, length), are excluded.
    """
    batch, heads, length, _ = node.shape
    counted = np.ones((batch, length), dtype=bool) if left_out is None else ~left_out
    first, last = counted.argmax(1), length - 1 - counted[:, ::-1].argmax(1)
    points = np.repeat(grid(batch, heads, 1, 1), 2, axis=0)
    points[0::2, 2], points[1::2, 2] = np.repeat(first, heads), np.repeat(last, heads)
    factor = projection_path(follow(node, points), len(points)).factor
    return factor.reshape(batch, heads, 2).mean(2), counted.sum(1)


def _unpadded_head_dim(query: Tensor, node: Node | None) -> int:
    """Return the head dimension before SDPA padded it to a multiple of eight."""
    while node is not None and len(node.steps) == 1 and node.steps[0].effect == "same":
        parent = node.steps[0].parent
        if len(parent.shape) == len(node.shape) and parent.shape[:-1] == node.shape[:-1]:
            if parent.shape[-1] < node.shape[-1]:
                return parent.shape[-1]
            node = parent
        else:
            break
    return query.shape[-1]
