"""KernelCall: attention by a fused kernel, read from the kernel's arguments and the lineage of its inputs."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from attnscale.attending.call import Call, fold
from attnscale.measure.measuring import measured
from attnscale.measure.stats import ScoreStats
from attnscale.numerics import is_surely_finite, wide_dtype, without_autocast
from attnscale.tracing.coordinates import grid
from attnscale.tracing.following import channels
from attnscale.tracing.lineage import Node
from attnscale.tracing.parameters import Origins, sampled_origin
from attnscale.tracing.products import are_paired_otherwise
from attnscale.tracing.roles import Softmax
from attnscale.visibility import EVERYTHING, Visibility, shown_by
from attnscale.watching.call import AttentionCall, MeasuredScores
from attnscale.watching.gradients import GradientLengths
from attnscale.watching.layer import MeasuredCall, Reading, Wiring
from attnscale.watching.rows import Rows, flags_added, highest_added, keys_nobody_sees, looks_causal, spread_positions

MASK_ROWS = 64  # rows of a mask that are examined
MODIFIED_ROWS = 8  # rows on which a score modification is tested

ScoreMod = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # (scores, row positions) -> (scores, visible)


@dataclass(frozen=True)
class KernelCall(AttentionCall):
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
    # query and key with heads merged into the batch, and a function that separates heads; None: heads have an axis
    heads_in_batch: tuple[Tensor, Tensor, Callable[[Tensor], Tensor]] | None = None
    softmax: Softmax = field(default_factory=partial(Softmax, axis=-1))  # collects how its weights are used

    def measure(self, rows: int | None, keep: bool) -> MeasuredCall:
        """Measure this call."""
        self.softmax.pairs_differ, self.softmax.drops = self._pairs_differ(), self.drops
        return replace(super().measure(rows, keep), softmax=self.softmax)

    def measure_scores(self, rows: int | None) -> MeasuredScores:
        """Measure the scores."""
        if self.score_mod is not None:
            return self.modified(self.score_mod, rows)
        bias = highest_added(self.visibility.bias)
        return MeasuredScores(
            self.stats(rows),
            self.scale,
            self.softcap,
            self.is_causal or _is_causal(self.visibility.mask, self.query.shape[-2]),
            self.hidden_keys,
            self.padding,
            Wiring(biased=bias is not None),
            max(0.0, bias or 0.0),
            Reading(inert_added=flags_added(self.visibility.bias)),
        )

    @property
    def head_dim(self) -> int:
        """The head dimension before SDPA padded it to a multiple of eight."""
        node = self.query_node
        while node is not None and len(node.steps) == 1 and node.steps[0].effect == "same":
            parent = node.steps[0].parent
            if parent.shape[:-1] != node.shape[:-1]:
                break
            if parent.shape[-1] < node.shape[-1]:
                return parent.shape[-1]
            node = parent
        return self.query.shape[-1]

    def find_origins(self) -> Origins:
        """Return the origins of queries, keys and values."""
        value = None if self.value_node is None else sampled_origin(self.value_node, axis=-1)
        return self.origins or replace(super().find_origins(), value=value)

    def gradients(self) -> GradientLengths:
        """Add gradient hooks to queries and keys."""
        query, key, by_head = self.heads_in_batch or (self.query, self.key, lambda gradient: gradient)
        return GradientLengths.followed(query, key, self.owners, by_head)

    @property
    def has_finite_lse(self) -> bool:
        """True if the log-sum-exp of every row is finite, so no weight is NaN."""
        return self.lse is not None and is_surely_finite(self.lse)

    @property
    def is_causal(self) -> bool:
        """True if the kernel's arguments request causal attention; its mask may hide more."""
        return self.visibility.last in (0, self.key.shape[-2] - self.query.shape[-2])

    @cached_property
    def hidden_keys(self) -> Tensor | None:
        """True for keys that the mask hides from every query, (batch or 1, keys)."""
        return keys_nobody_sees(self.visibility.mask) if self.hidden is None else self.hidden

    @property
    def padding(self) -> Tensor | None:
        """True for queries at positions with hidden keys, (batch, queries); None if unknown."""
        batch, _, length, _ = self.query.shape
        hidden = self.hidden_keys
        if hidden is None or hidden.shape[-1] != length or not self.is_self_attention:
            return None
        return hidden.expand(batch, -1)

    def stats(self, rows: int | None) -> ScoreStats:
        """Return statistics of the scores, without padding queries."""
        seen = self.visibility.with_infinite_mask()
        seen = seen if self.padding is None else seen.without_rows(self.padding)
        query, key, _, seen = fold(self.query, self.key, self.key, seen, enable_gqa=True)
        with torch.no_grad(), without_autocast(query):
            return measured(Call(query, key, key, seen, 0.0, self.scale, self.softcap), rows, self.lse)

    def _pairs_differ(self) -> bool:
        value = self.value_node
        if value is None or len(value.shape) != 4 or not all(value.shape) or not self.key_channels:
            return False
        keys = self.key_channels[0]
        if len(set(keys)) == len(keys) or value.shape[1] != len(keys):
            return False
        return are_paired_otherwise(keys, channels(value, grid(1, len(keys), 1, 1)))

    def scores(self, positions: Tensor) -> Tensor:
        """Return the scores of these rows, (batch, heads, rows, keys), before soft-cap, mask and modification."""
        query = self.query[:, :, positions.to(self.query.device)].to(wide_dtype(self.query))
        return query @ self.key.repeat_interleave(self.group, 1).to(query.dtype).mT * self.scale

    def modified(self, modify: ScoreMod, rows: int | None) -> MeasuredScores:
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
        padding = hidden if self.key.shape[-2] == length and self.is_self_attention else None
        is_biased = bool((at_zero[shown] != 0).any())
        return MeasuredScores(
            by_row.without(padding).measure(rows, lambda: torch.full((heads,), torch.inf, dtype=torch.float64)),
            self.scale * multiplier,
            float(high[shown].mean()) if flat else None,
            looks_causal(visible, probe, length),
            hidden,
            padding,
            Wiring(biased=is_biased),
            max(0.0, float(at_zero[shown].max())) if is_biased else 0.0,
            rows=by_row,
        )


def _is_causal(mask: Tensor | None, length: int) -> bool:
    if mask is None or mask.dim() < 2 or mask.shape[-2] == 1:
        return False
    visible, probe = shown_by(mask), spread_positions(length, MASK_ROWS)
    rows = visible[..., probe.to(visible.device), :]
    return looks_causal(rows.reshape(1, -1, *rows.shape[-2:]), probe, length)
