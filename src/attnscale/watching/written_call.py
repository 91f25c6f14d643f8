"""Hand-written attention: a product of two activations, and the softmax computed from it.

The multiplier of q·k is read from the operations in between. If it disagrees with the scores, the scores decide.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from attnscale.numerics import HALF_DTYPES, constant_on, wide_dtype
from attnscale.tracing.coordinates import NOWHERE, grid, viewed
from attnscale.tracing.following import Trace, channels, follow
from attnscale.tracing.lineage import Node
from attnscale.tracing.parameters import Origins
from attnscale.tracing.roles import Product, Scores
from attnscale.visibility import HIDING_GAP, NEVER_A_SCORE
from attnscale.watching.axes import Axes, ProductPoints, ProductView, find_axes
from attnscale.watching.call import COMPUTED, AttentionCall, MeasuredScores
from attnscale.watching.gradients import GradientLengths
from attnscale.watching.layer import Reading, SavedCall, Wiring
from attnscale.watching.rows import Rows, flags_added, hidden_by, hiding_gap, is_bias, looks_causal

DISAGREEMENT = 0.01  # relative; half precision rounds a slope by less
VISIBLE_BIAS = 0.02  # relative to the spread of the scores; half precision rounds them by less
FACTOR_OF_ONE = 1e-6


def written_call(product: Product, node: Node, axis: int, scores: Tensor) -> "WrittenCall | None":
    """Return the attention of a softmax over this axis of `scores`; None if scores cannot be followed to a product."""
    axes = find_axes(product, node, axis)
    if axes is None:
        return None
    scores = axes.scores_by_group(scores.detach().reshape(axes.source.shape))
    return WrittenCall("eager", *axes.query, *axes.key, product, axes, scores, axes.over_pairs)


@dataclass(frozen=True)
class WrittenCall(AttentionCall):
    """One hand-written attention; queries and keys are those of the product."""

    kind: str
    query: Tensor
    query_node: Node | None
    key: Tensor
    key_node: Node | None
    product: Product
    axes: Axes
    scores: Tensor  # (…, queries, columns), by group
    over_pairs: bool

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def shares_keys(self) -> bool:
        """True if several query heads share a key, in a product q @ kᵀ."""
        return not self.axes.view.is_turned and 1 < int(self.owners.max()) + 1 < self.heads

    @cached_property
    def probed(self) -> ProductPoints:
        """The first key of the probed rows of every head of the first batch entry."""
        return self.axes.followed(self.axes.groups[0], self.probe.numpy())

    @property
    def trace(self) -> Trace:
        """Operations from the softmax back to the product, for the first probed rows."""
        return self.probed.traces[0]

    def measure_scores(self, rows: int | None) -> MeasuredScores:
        """Measure the scores."""
        product, trace = self.product, self.trace
        batch, heads, length, _ = self.query.shape
        scores, visible = self.rows_at(self.probe)
        by_row = Rows(batch, heads, length, scores.shape[-1], visible is not None, self.rows_at)
        shown = self._in_product.expand(scores.shape) if visible is None else visible & self._in_product
        inert = inert_fill(trace, scores[0], shown[0])
        shown = shown if inert is None else shown & (scores != inert)
        hidden = None if visible is None else by_row.keys_nobody_sees(self.probe)
        hidden = None if hidden is None else hidden[:, self._in_product]
        padding = None
        if hidden is not None and hidden.shape[-1] == length and self.is_self_attention:
            padding = hidden
        predicted = self.predicted
        multiplier, explained = self.multiplier, 1.0
        if self.is_pure:
            slope, share = (each.cpu().numpy() for each in fit(predicted, scores[0], shown[0]))
            multiplier = multiplier * np.where(np.abs(slope - 1) > DISAGREEMENT, slope, 1.0)[:, None]
            explained = 1.0 if self.query.dtype in HALF_DTYPES else float(share.min())
        return MeasuredScores(
            by_row.without(padding).measure(rows, self.highest),
            multiplier,
            self.softcap,
            visible is not None and looks_causal(visible[..., self._in_product], self.probe, length),
            hidden,
            padding,
            Wiring(
                biased=self._has_added and _stands_out(scores[0] - predicted, scores[0], shown[0]),
                bias_is_scaled=any(is_bias(bias) and abs(by - 1) > FACTOR_OF_ONE for bias, by in self.biases),
                softcap_discarded=product.capped and self.softcap is None and not product.times_own_tanh,
                softcap_unbounded=product.times_own_tanh and self.softcap is None,
            ),
            self.highest_bias(scores[0], shown[0]),
            reading_of(self, inert),
            None if self._has_no_sinks else scores[0][..., ~self._in_product].amax((-2, -1)).double().cpu(),
            by_row,
            explained,
        )

    @property
    def head_dim(self) -> int:
        """Number of multiplied features, over all products: some attentions add products of two kinds of features."""
        return int(sum(part.left.shape[-1] for part in (self.product, *self._parts)))

    @cached_property
    def _parts(self) -> list[Product]:
        """Products of other features of the same queries and keys, added with the same scale."""
        if not self.trace.other_scores:
            return []
        own, parts = set(_first_channels(self.product)), []
        for node, factor in self.trace.other_scores:
            if not isinstance(node.role, Scores) or node.role.of.has_softmax:
                continue
            product = node.role.of
            if own.intersection(theirs := _first_channels(product)) or () in theirs:
                continue  # a positional term: the same query, or key, times positions
            first = ProductView(product, is_turned=False).points(node, np.zeros((1, len(node.shape)), dtype=np.int64))
            total = first.factor[0] * factor * product.alpha
            if first.are_found.all() and np.isclose(total, self.multiplier.flat[0], rtol=1e-4):
                parts.append(product)
        return parts

    @property
    def biases(self) -> tuple[tuple[Tensor, float], ...]:
        """Operands added to the scores, each with the factor that multiplied it afterwards."""
        bias = self.product.bias
        own = () if bias is None else ((bias, float(self.probed.factor.mean())),)
        return self.trace.biases + own

    @property
    def softcap(self) -> float | None:
        """Soft-cap: the factor on a tanh of the scores."""
        return abs(self.trace.caps[0]) if self.trace.caps else None

    @property
    def multiplier(self) -> NDArray[np.float64]:
        """Factor between the product and the softmax, (heads, probed rows)."""
        return self.probed.factor.reshape(self.heads, -1) * self.product.alpha

    @cached_property
    def predicted(self) -> Tensor:
        """Scores of the probed rows, (heads, rows, columns), predicted from the operations after the product."""
        return self._predict(self.probe, self.probed, slice(1))[0]

    def _predict(self, positions: Tensor, found: ProductPoints, entries: slice) -> Tensor:
        """Return the predicted scores of these rows, without biases, (batch, heads, rows, columns); zero for sinks."""
        query, key = self.query[entries, :, positions.to(self.query.device)], self.key[entries]
        scores = query.to(wide_dtype(query)) @ key.to(wide_dtype(key)).mT
        factor = found.factor.reshape(*scores.shape[:3], 1) * self.product.alpha
        scores = scores * torch.from_numpy(factor).to(scores)
        scores = scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)
        if self._has_no_sinks:
            return scores
        whole = scores.new_zeros(*scores.shape[:3], len(self.axes.columns))
        whole[..., self._in_product] = scores
        return whole

    @property
    def _has_added(self) -> bool:
        return self.trace.added or self.product.bias is not None

    @property
    def is_pure(self) -> bool:
        """True if a fitted slope is not distorted by other terms in the scores."""
        impure = self._has_added or self.trace.blended or self.trace.dropped or self.over_pairs
        return not impure and self.softcap is None

    def gradients(self, factor: float = 1.0) -> GradientLengths:
        """Add gradient hooks to the operands of the product; `factor` undoes SDPA's own factor."""
        entries, product = self.axes.entries, self.product
        if len(np.unique(entries)) < entries.size:
            return GradientLengths()  # several heads share one entry

        def by_head(gradient: Tensor) -> Tensor:
            whole = gradient.reshape(-1, *gradient.shape[-2:])
            return factor * whole[constant_on(gradient.device, entries)]

        operands = (product.right, product.left) if self.axes.view.is_turned else (product.left, product.right)
        return GradientLengths.followed(*operands, self.owners, by_head)

    def find_origins(self) -> Origins:
        """Return the origins of queries and keys; empty for a sum of products or for mixed heads."""
        return Origins() if self.trace.other_scores or self.trace.mixed else super().find_origins()

    def highest_bias(self, scores: Tensor, shown: Tensor) -> float:
        """Return the largest value added to a score, by known biases and in the probed rows."""
        if not self._has_added:
            return 0.0
        known = [float(bias.max()) * by for bias, by in self.biases if is_bias(bias)]
        rest = (scores - self.predicted)[shown]
        return max(0.0, *known, float(rest.max()) if self.softcap is None and rest.numel() else 0.0)

    @cached_property
    def _in_product(self) -> Tensor:
        """True for keys in the product, False for a sink."""
        return torch.from_numpy(self.axes.columns != NOWHERE).to(self.scores.device)

    @property
    def _has_no_sinks(self) -> bool:
        return len(self.axes.columns) == self.key.shape[2]

    @property
    def sink_columns(self) -> tuple[int, int]:
        """Number of sinks before and after the keys."""
        shown = np.flatnonzero(self.axes.columns != NOWHERE)
        return int(shown[0]), int(len(self.axes.columns) - 1 - shown[-1])

    def _save(self, *given: Any) -> SavedCall | None:
        """Save the call; None if scales · q·k lack some of its features, or its scores are not one per row and key."""
        has_inner_sinks = sum(self.sink_columns) + self.key.shape[2] != len(self.axes.columns)
        return None if self._parts or self.over_pairs or has_inner_sinks else super()._save(*given)

    def save_values(self, saved: SavedCall, weights: Node, values: Tensor, side: int) -> None:
        """Save the values in weights @ values (side 0) or valuesᵀ @ weightsᵀ (side 1), if they can be identified."""
        values = values.mT if side else values
        if values.dim() != 3 or len(weights.shape) != 3:
            return
        axes, (entries, *sizes) = self.axes, weights.shape
        points = grid(entries, 1, sizes[1]) if side else grid(entries, sizes[0], 1)
        place = np.full(axes.groups.size, NOWHERE)
        for trace in follow(weights, points):
            if trace.node.role is not weights.role:
                return
            at = viewed("view", axes.source.shape, trace.node.shape)[0](trace.points)
            place[axes.group_of(at)] = points[trace.index, 0]
        keys = values.shape[1]
        if (place == NOWHERE).any() or keys not in (self.key.shape[2], len(axes.columns)):
            return
        found = values.detach()[place[axes.groups]].to(saved.query.dtype)
        saved.value = F.pad(found, (0, 0, *self.sink_columns)) if keys < len(axes.columns) else found

    def _by_head(self, groups: Tensor) -> Tensor:
        """Return values of each group, (…, rows or 1, columns or 1), as (batch, heads, rows, columns)."""
        return groups.reshape(-1, *groups.shape[-2:])[constant_on(groups.device, self.axes.groups)]

    def rows_at(self, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scores of these rows, (batch, heads, rows, keys), and True for visible ones; None: all."""
        chosen = self.scores.index_select(-2, positions.to(self.scores.device))
        scores = self._by_head(chosen).to(wide_dtype(chosen))
        may_hide = self.trace.fills or self._is_shifted or self.finite_gaps
        if scores.device.type == "cpu" and scores.numel() and not may_hide and bool(scores.amin() > NEVER_A_SCORE):
            return scores, None
        hidden = scores <= NEVER_A_SCORE
        for fill in self.trace.fills:
            if NEVER_A_SCORE < fill <= -HIDING_GAP:
                hidden |= torch.isclose(scores, scores.new_tensor(fill), rtol=1e-3)
        if self._is_shifted or self.finite_gaps:
            found = self.axes.followed(self.axes.groups.ravel(), positions.numpy())
            scores = scores + torch.from_numpy(found.shift).to(scores).view(*scores.shape[:3], 1)
            for gap, highest in self.finite_gaps:
                hidden |= hidden_by(scores - self._predict(positions, found, slice(None)), gap, highest)
        return scores, ~hidden if bool(hidden.any()) else None

    @cached_property
    def _is_shifted(self) -> bool:
        return bool(self.probed.shift.any())

    @cached_property
    def finite_gaps(self) -> list[tuple[float, float]]:
        """(gap, largest value) of each mask whose gap is so small that scores can differ by as much."""
        gaps = [(hiding_gap(bias), float(bias.max()), by) for bias, by in self.biases if bias.numel()]
        found = [(gap * abs(by), highest * by) for gap, highest, by in gaps if gap is not None]
        return [(gap, highest) for gap, highest in found if HIDING_GAP <= gap < -NEVER_A_SCORE]

    def highest(self) -> Tensor:
        """Return the largest score of each head; inf if rows were shifted."""
        if self._is_shifted:
            return torch.full((self.heads,), torch.inf, dtype=torch.float64)
        return self._by_head(self.scores.amax((-2, -1), keepdim=True)).amax((0, 2, 3)).double()


def reading_of(call: WrittenCall, fill: float | None) -> Reading:
    """Return facts about the operations between the product and the softmax."""
    trace, cap, after = call.trace, call.softcap, call.trace.after_caps
    flags = (added * by for bias, by in call.biases if (added := flags_added(bias)) is not None)
    masks = (each <= -HIDING_GAP if isinstance(each, float) else hiding_gap(each) for each in trace.under_cap)
    return Reading(
        unread=_unread(call),
        learned_terms=trace.learned_terms,
        learned_factor=trace.learned_factor,
        dropped=trace.dropped,
        inert_fill=fill,
        capped_mask=-cap if cap is not None and any(masks) else None,
        inert_added=next(flags, None),
        scale_after_cap=float(np.prod(after[:-1])) if trace.caps and len(after) > 1 else None,
    )


def inert_fill(trace: Trace, scores: Tensor, shown: Tensor) -> float | None:
    """Return a mask's fill value that is too small to hide keys; None if there is none."""
    for fill in trace.fills:
        filled = (scores == scores.new_tensor(fill)) & shown
        if abs(fill) < HIDING_GAP and bool((filled.any(-1) & ~filled.all(-1)).any()):
            return fill
    return None


def fit(predicted: Tensor, scores: Tensor, shown: Tensor) -> tuple[Tensor, Tensor]:
    """Fit scores (heads, rows, keys) on their prediction, each row with its own intercept.

    Return the slope and the explained share of the variance, R², of each head.
    """
    both = torch.stack([predicted, scores]).double()
    if shown.device.type == "cpu" and bool(shown.all()):  # not on a GPU, where this would synchronise
        both -= both.mean(-1, keepdim=True)
    else:
        count = shown.sum(-1, keepdim=True).clamp(min=1)
        both = both.masked_fill(~shown, 0.0)
        both = (both - both.sum(-1, keepdim=True) / count).masked_fill(~shown, 0.0)
    x, y = both.flatten(2)
    together, own, total = (x * y).sum(-1), x.square().sum(-1), y.square().sum(-1)
    return _or_one(together / own), _or_one(together.square() / (own * total))


def _or_one(values: Tensor) -> Tensor:
    return torch.where(torch.isfinite(values), values, 1.0)


def _unread(call: WrittenCall) -> str:
    if call.axes.between_channels:
        return "its product sums over positions: channels attend to channels, and d_k is the length"
    if call.trace.blended:
        return "an operation between its product and its softmax was not recognised"
    if call.trace.shared_out:
        return "q·k is one of several terms with learned weights"
    return COMPUTED if call.trace.computed_factor else ""


def _stands_out(rest: Tensor, scores: Tensor, visible: Tensor) -> bool:
    rest, scores = rest[visible], scores[visible]
    if rest.numel() < 2 or not bool(torch.isfinite(rest).all()):
        return False
    return bool(rest.std() > VISIBLE_BIAS * scores.std())


def _first_channels(product: Product) -> list[tuple[object, ...]]:
    """Return the channels of a product's first query and first key."""
    nodes = (product.left_node, product.right_node)
    return [channels(node, np.zeros((1, len(node.shape)), dtype=np.int64))[0] for node in nodes]
