"""AttentionCall: one attention of a running model, fused or hand-written, and the way to measure it."""

from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attnscale.measure.lengths import mean_cosine, mean_lengths
from attnscale.measure.stats import ScoreStats
from attnscale.numerics import constant_on, wide_dtype
from attnscale.tracing.coordinates import Indices, Points, grid
from attnscale.tracing.following import ProjectionPath, channels, follow, projection_path, row_of_parameter
from attnscale.tracing.lineage import Node
from attnscale.tracing.parameters import Origin, Origins, released
from attnscale.visibility import EVERYTHING, Visibility
from attnscale.watching.gradients import key_owners_of
from attnscale.watching.layer import Factors, MeasuredCall, Reading, SavedCall, Wiring, added_to
from attnscale.watching.rows import Rows, spread_positions

PROBED_ROWS = 4  # rows of each head that are followed to their projection
NORMED_ROWS = 64
COMPUTED = "its multiplier is computed from activations"
ROW_TO_ROW = 0.01  # relative; rounding changes a multiplier that all rows share by less
EXPLAINED = 0.9  # least share of the variance of scores that q·k must explain, if nothing else is in them


class MeasuredScores(NamedTuple):
    """Scores of a call: their statistics, and how they follow from q·k."""

    stats: ScoreStats
    multiplier: float | Factors  # of q·k, one number or (heads, PROBED_ROWS)
    softcap: float | None
    causal: bool
    hidden_keys: Tensor | None  # (batch or 1, keys): True for keys hidden from every query
    padding: Tensor | None  # (batch, queries): True for padding queries
    wiring: Wiring
    highest_bias: float = 0.0  # largest value added to a score
    reading: Reading = Reading()  # does not cover the operations before the product
    sinks: Tensor | None = None
    rows: Rows | None = None  # the scores; None if the kernel's arguments determine them
    explained: float = 1.0  # share of the variance of the scores that q·k explains


class AttentionCall:
    """One attention: query (batch, heads, length, features) and key (batch, key heads, keys, features)."""

    kind: str
    query: Tensor
    key: Tensor
    query_node: Node | None  # lineage of the query; None: projected inside the kernel
    key_node: Node | None
    visibility: Visibility = EVERYTHING
    value: Tensor | None = None
    width: int | None = None  # width of the projection's input, if known
    attends_itself: bool = False  # known to be self-attention; if False, the lineage decides
    over_pairs: bool = False  # the softmax runs over queries and keys at once

    def measure_scores(self, rows: int | None) -> MeasuredScores:
        """Measure the scores."""
        raise NotImplementedError

    @property
    def head_dim(self) -> int:
        """Number of features that are multiplied."""
        return self.query.shape[-1]

    @property
    def sink_columns(self) -> tuple[int, int]:
        """Number of columns of the scores before and after those of the keys."""
        return 0, 0

    @property
    def group(self) -> int:
        """Number of query heads per key head."""
        return self.query.shape[1] // max(self.key.shape[1], 1)

    @cached_property
    def probe(self) -> Tensor:
        """Positions spread over the queries."""
        return spread_positions(self.query.shape[2], PROBED_ROWS)

    @cached_property
    def paths(self) -> tuple[ProjectionPath, ProjectionPath]:
        """Operations on the queries and keys since their projections; factors are (heads, positions)."""
        last = self.key.shape[2] - 1
        query = _path(self.query_node, self.query, self.probe.numpy())
        key = _path(self.key_node, self.key, np.array([0, last]))
        return query, key._replace(factor=np.repeat(key.factor, self.group, axis=0))

    @cached_property
    def is_self_attention(self) -> bool:
        """True if queries and keys have the same positions."""
        query, key = self.paths
        return self.attends_itself or (query.source is not None and query.source is key.source)

    @cached_property
    def key_channels(self) -> tuple[list[tuple[object, ...]], ...]:
        """Channels of the first and of the last key of each key head; empty without a lineage."""
        node, heads, last = self.key_node, self.key.shape[1], self.key.shape[2] - 1
        if not _can_follow(node):
            return ()
        found = channels(node, _points(heads, np.array([0, last])))
        return found[0::2], found[1::2]

    @property
    def owners(self) -> Indices:
        """Number of the key head of each query head; copies of a key share a number."""
        heads = self.key.shape[1]
        own = np.arange(heads)
        if self.group == 1 and heads > 1:
            own = key_owners_of(self.key_channels, own)
        return np.repeat(own, self.group)

    def measure(self, rows: int | None, keep: bool) -> MeasuredCall:
        """Measure this call."""
        found, owners = self.measure_scores(rows), self.owners
        (query_path, key_path), query, heads = self.paths, self.query.detach(), self.query.shape[1]
        multipliers = query_path.signed_factor * key_path.signed_factor.mean(1, keepdims=True) * found.multiplier
        is_constant = query_path.constant and key_path.constant
        factors = query_path.factor.mean(1), key_path.factor.mean(1)[:: self.group]
        excluded, every = (found.padding, found.hidden_keys), rows is None
        if not query_path.constant and len(query) > 1 and _can_follow(self.query_node):
            by_entry, average = self._factors_by_entry(found.padding)
            query_path = query_path._replace(factor=average[:, None])
            query_norm, key_norm = mean_lengths(*self._sample(query / _by_head(by_entry, query), excluded, every))
        else:
            query_norm, key_norm = mean_lengths(*self._sample(query, excluded, every))
            query_norm = _before(query_norm, query_path)
        signed = query_path.signed_factor.mean(1), key_path.signed_factor.mean(1)
        scales = signed[0] * signed[1] * np.atleast_1d(found.multiplier).mean(-1)
        sides = {"queries": query_path, "keys": key_path}
        return MeasuredCall(
            kind=self.kind,
            heads=heads,
            kv_heads=int(owners.max(initial=-1)) + 1,
            key_owners=owners,
            first_row=self._first_row(),
            head_dim=self.head_dim,
            model_dims=tuple({width for width in (self.width or query_path.width, heads * self.head_dim) if width}),
            query_len=query.shape[2],
            key_len=self.key.shape[2],
            causal=found.causal,
            softcap=found.softcap,
            dtype=query.dtype,
            stats=found.stats,
            scales=torch.from_numpy(scales),
            query_norm=query_norm,
            key_norm=_before(key_norm, key_path),
            batch=query.shape[0],
            attends_itself=self.is_self_attention,
            padding=found.padding,
            wiring=replace(found.wiring, normalised=query_path.normalised and key_path.normalised),
            cosine=mean_cosine(*self._sample(query, excluded, every=False)) if found.wiring.biased else None,
            over_pairs=self.over_pairs,
            kept=self._save(found, scales, signed) if keep else None,
            origins=self.find_origins(),
            sinks=found.sinks,
            highest_bias=found.highest_bias,
            factors=factors if is_constant else None,
            reading=replace(
                found.reading,
                unread=found.reading.unread or _missing(sides) or _differs_by_row(multipliers) or _unexplained(found),
                learned_factor=found.reading.learned_factor or query_path.learned_factor or key_path.learned_factor,
                detached=tuple(side for side, path in sides.items() if path.detached),
                rescaled=tuple(side for side, path in sides.items() if path.normalised or path.learned_factor),
            ),
        )

    def find_origins(self) -> Origins:
        """Return the origins of queries, keys and values."""
        return Origins(_origin(self.query_node), _origin(self.key_node))

    def _factors_by_entry(self, padding: Tensor | None) -> tuple[Factors, Factors]:
        """Return the factor on the queries of each batch entry, (batch, heads), and its mean over all queries."""
        batch, heads, length, _ = self.query.shape
        counted = np.ones((batch, length), dtype=bool) if padding is None else ~padding.cpu().numpy()
        rows = counted.sum(1)
        counted |= rows[:, None] == 0  # an entry with only padding needs a factor too
        shares = np.linspace(0, 1, PROBED_ROWS)
        kept = [np.flatnonzero(entry) for entry in counted]
        positions = np.stack([each[(shares * (len(each) - 1)).round().astype(int)] for each in kept])
        points = grid(batch, heads, PROBED_ROWS, 1)
        points[:, 2] = positions[points[:, 0], points[:, 2]]
        assert self.query_node is not None  # otherwise its factor is constant
        factor = projection_path(follow(self.query_node, points), len(points)).factor.reshape(batch, heads, -1).mean(2)
        average = np.average(factor, axis=0, weights=rows if rows.any() else None)
        # log n scaling multiplies a row with one key by ln 1 = 0
        return np.where(factor == 0, 1.0, np.abs(factor)), average

    def _sample(self, query: Tensor, excluded: tuple[Tensor | None, Tensor | None], every: bool) -> Any:
        """Return evenly spaced queries and keys, or all of them, and masks of those to exclude."""
        sides = []
        for vectors, left_out in zip((query, self.key.detach()), excluded, strict=True):
            step = 1 if every else max(1, vectors.shape[2] // NORMED_ROWS)
            sides.append((vectors[:, :, ::step], None if left_out is None else left_out[:, ::step]))
        (query, padding), (key, hidden) = sides
        return query, key, (padding, hidden)

    def _first_row(self) -> tuple[object, ...]:
        """Return the parameter row that makes the first head's query; the last position, if the first is padding."""
        node = self.query_node
        if not _can_follow(node):
            return ()
        found = channels(node, _points(1, np.array([0, node.shape[2] - 1])))
        return next(filter(None, map(row_of_parameter, found)), ())

    def _save(self, found: MeasuredScores, scales: Factors, factors: tuple[Factors, Factors]) -> SavedCall | None:
        """Save the call; its visibility holds all parts of the scores besides scales · q·k."""
        query, key = self.query.detach(), self.key.detach()
        if found.rows is not None:  # the rest of the scores would contain the rounding of half precision
            query, key = query.to(wide_dtype(query)), key.to(wide_dtype(key))
        query, key = query / _by_head(factors[0], query), key / _by_head(factors[1][:: self.group], key)
        key = F.pad(key, (0, 0, *self.sink_columns)) if self.sink_columns != (0, 0) else key
        saved = SavedCall(query, key, torch.from_numpy(scales), softcap=found.softcap)
        if found.rows is None:
            seen = self.visibility.with_infinite_mask()
            seen = seen if seen.mask is None else replace(seen, mask=seen.mask[(None,) * (4 - seen.mask.dim())])
        else:
            seen = added_to(saved.scores(), *found.rows.at(torch.arange(query.shape[2])))
        saved.visibility = seen if found.padding is None else seen.without_rows(found.padding)
        saved.value = None if self.value is None else self.value.detach()
        return saved


def _missing(sides: dict[str, ProjectionPath]) -> str:
    """Return why factors on queries or keys may have been missed; empty if none was."""
    lost, mixed = ([side for side, path in sides.items() if getattr(path, why)] for why in ("lost", "shared_out"))
    if lost:
        return f"its {' and '.join(lost)} were not followed to a projection"
    if any(path.computed_factor for path in sides.values()):
        return COMPUTED
    return f"its {' and '.join(mixed)} are sums of several terms with learned weights" if mixed else ""


def _differs_by_row(multipliers: Factors) -> str:
    """Return why multipliers, (heads, rows), are not one number per head; empty if they are."""
    if (multipliers == multipliers[:, :1]).all():
        return ""
    low, high = np.abs(multipliers).min(), np.abs(multipliers).max()
    apart = np.ptp(multipliers, axis=1) > ROW_TO_ROW * np.abs(multipliers).max(axis=1)
    return f"its multiplier differs from row to row, from {low:.3g} to {high:.3g}" if bool(apart.any()) else ""


def _unexplained(found: MeasuredScores) -> str:
    share = found.explained
    return f"q·k explains only {share:.0%} of the variance of its scores" if share < EXPLAINED else ""


def _can_follow(node: Node | None) -> TypeGuard[Node]:
    return node is not None and len(node.shape) == 4 and all(node.shape)


def _points(heads: int, positions: Indices) -> Points:
    """Return the first feature of these positions of every head, in the first batch entry."""
    points = np.repeat(grid(1, heads, 1, 1), len(positions), axis=0)
    points[:, 2] = np.tile(positions, heads)
    return points


def _path(node: Node | None, vectors: Tensor, positions: Indices) -> ProjectionPath:
    heads, count = vectors.shape[1], len(positions)
    if not _can_follow(node) or not vectors.numel():
        return ProjectionPath(np.ones((heads, 1)), False, None, False)
    found = projection_path(follow(node, _points(heads, positions)), heads * count)
    return found._replace(factor=found.factor.reshape(heads, count))


def _origin(node: Node | None) -> Origin | None:
    """Return the origin of queries or keys, by the first and last two positions."""
    if not _can_follow(node):
        return None
    _, heads, length, features = node.shape
    positions = sorted({0, min(1, length - 1), max(0, length - 2), length - 1})
    points = np.tile(grid(1, heads, 1, 1), (len(positions), 1))
    points[:, 2] = np.repeat(positions, heads)
    return released(Origin(node, points, heads, axis=3, features=features))


def _by_head(factor: Factors, like: Tensor) -> Tensor:
    """Return factors, (heads,) or (batch, heads), that broadcast to (batch, heads, length, features)."""
    return torch.from_numpy(factor).to(like)[..., None, None]


def _before(norm: Tensor, path: ProjectionPath) -> Tensor:
    """Return the norm that the vectors had before they were multiplied by the factors of this path."""
    factor = np.abs(path.factor).mean(1)
    return norm if (factor == 1).all() else norm / constant_on(norm.device, factor)
