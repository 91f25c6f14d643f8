"""Hand-written attention: a product of two activations, and the softmax computed from it.

The multiplier of q·k is read from the operations in between and checked against the scores, which win if they differ.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.measure.lengths import mean_cosine, mean_lengths
from attnscale.numerics import HALF_DTYPES, constant_on, wide_dtype
from attnscale.tracing.coordinates import NOWHERE
from attnscale.tracing.following import ProjectionPath, Trace
from attnscale.tracing.parameters import Origins, released
from attnscale.tracing.roles import Product, Scores
from attnscale.visibility import HIDING_GAP, NEVER_A_SCORE
from attnscale.watching.axes import Axes, Operands, channels_of, points_in_product
from attnscale.watching.gradients import GradientLengths
from attnscale.watching.layer import COMPUTED, MeasuredCall, Reading, Wiring, differs_by_row
from attnscale.watching.rows import Rows, flags_added, hidden_by, hiding_gap, is_bias, looks_causal, spread_positions
from attnscale.watching.saved_call import save_written_call

EXPLAINED = 0.9  # least share of the variance of scores that q·k must explain, if nothing else is in them
PROBED_ROWS = 4
NORMED_ROWS = 64
DISAGREEMENT = 0.01  # relative; half precision rounds a slope by less
VISIBLE_BIAS = 0.02  # relative to the spread of the scores; half precision rounds them by less
FACTOR_OF_ONE = 1e-6


def written_call(axes: Axes | None, scores: Tensor) -> "WrittenCall | None":
    """Return the attention of a softmax; None if its input cannot be followed to the product."""
    if axes is None:
        return None
    written = WrittenCall(axes, scores.detach().reshape(axes.shape))
    return written if written.probed.product_points.are_found.all() else None


@dataclass(frozen=True)
class WrittenCall:
    """One hand-written attention; `probe` holds positions in the first batch entry that are examined closely."""

    axes: Axes
    scores: Tensor

    @property
    def heads(self) -> int:
        return int(self.axes.groups.shape[1])

    @property
    def shares_keys(self) -> bool:
        """True if several query heads share a key, in a product q @ kᵀ."""
        return self.axes.keys_are_right and 1 < self.axes.kv_heads < self.heads

    @cached_property
    def probe(self) -> Tensor:
        """Positions spread over the queries."""
        return spread_positions(self.axes.length, PROBED_ROWS)

    @cached_property
    def probed(self) -> Operands:
        """Queries and keys of the probed rows of every head."""
        return Operands.of(self.axes, self.axes.groups[0], self.probe.numpy())

    @property
    def trace(self) -> Trace:
        """Operations from the softmax back to the product, for the first probed rows."""
        return self.probed.product_points.traces[0]

    def measure(self, rows: int | None, keep: bool) -> MeasuredCall:
        """Measure this call."""
        axes, (query_path, key_path) = self.axes, self.paths
        scores, visible = self.rows_at(self.probe)
        batch, heads = axes.groups.shape
        by_row = Rows(batch, heads, axes.length, scores.shape[-1], visible is not None, self.rows_at)
        shown = self._in_product.expand(scores.shape) if visible is None else visible & self._in_product
        inert = inert_fill(self.trace, scores[0], shown[0])
        shown = shown if inert is None else shown & (scores != inert)
        hidden = None if visible is None else by_row.keys_nobody_sees(self.probe)
        hidden = None if hidden is None else hidden[:, self._in_product]
        attends_itself = query_path.source is not None and query_path.source is key_path.source
        padding = hidden if attends_itself and hidden is not None and hidden.shape[-1] == axes.length else None
        query_norm, key_norm, cosine = self.norms(padding, hidden, every=rows is None)
        biased = self._adds and _stands_out(scores[0] - self.predicted, scores[0], shown[0])
        fitted = fit(self.predicted, scores[0], shown[0]) if self.is_pure else None
        scales = self.scales(fitted)
        kept = save_written_call(self, scales, padding) if keep and not self._parts else None
        return MeasuredCall(
            kind="eager",
            heads=self.heads,
            kv_heads=axes.kv_heads,
            key_owners=axes.owners,
            first_row=axes.first_row,
            head_dim=self.head_dim,
            model_dims=tuple({width for width in (query_path.width, self.heads * self.head_dim) if width}),
            query_len=axes.length,
            key_len=int(self._in_product.sum()),
            causal=visible is not None and looks_causal(visible[..., self._in_product], self.probe, axes.length),
            softcap=self.softcap,
            dtype=axes.product.left.dtype,
            stats=by_row.without(padding).measure(rows, self.highest),
            scales=scales,
            query_norm=query_norm,
            key_norm=key_norm,
            batch=batch,
            attends_itself=attends_itself,
            padding=padding,
            wiring=Wiring(
                normalised=query_path.normalised and key_path.normalised,
                biased=biased,
                bias_is_scaled=any(is_bias(bias) and abs(by - 1) > FACTOR_OF_ONE for bias, by in self.biases),
                softcap_discarded=axes.product.capped and self.softcap is None and not axes.product.times_own_tanh,
                softcap_unbounded=axes.product.times_own_tanh and self.softcap is None,
            ),
            cosine=cosine if biased else None,
            over_pairs=axes.over_pairs,
            kept=kept,
            origins=self.origins(),
            sinks=self.sinks(scores[0]),
            highest_bias=self.highest_bias(scores[0], shown[0]),
            reading=reading_of(self, fitted, inert),
        )

    @cached_property
    def paths(self) -> tuple[ProjectionPath, ProjectionPath]:
        """Operations on the probed queries, and on their keys, since their projections."""
        return self.probed.path(queries=True), self.probed.path(queries=False)

    @property
    def head_dim(self) -> int:
        """Number of multiplied features, over all products: some attentions add products of two kinds of features."""
        return int(sum(part.left.shape[-1] for part in (self.axes.product, *self._parts)))

    @cached_property
    def _parts(self) -> list[Product]:
        """Products of other features of the same queries and keys, added with the same scale."""
        if not self.trace.other_scores:
            return []
        own, parts = set(channels_of(self.axes.product)), []
        for node, factor in self.trace.other_scores:
            if not isinstance(node.role, Scores) or node.role.of.has_softmax:
                continue
            product = node.role.of
            if own.intersection(theirs := channels_of(product)) or () in theirs:
                continue  # a positional term: the same query, or key, times positions
            product_points = points_in_product(node, np.zeros((1, len(node.shape)), dtype=np.int64), product)
            total = product_points.factor[0] * factor * product.alpha
            if product_points.are_found.all() and np.isclose(total, self.probed.multiplier.flat[0], rtol=1e-4):
                parts.append(product)
        return parts

    @property
    def biases(self) -> tuple[tuple[Tensor, float], ...]:
        """Operands added to the scores, each with the factor that multiplied it afterwards."""
        bias = self.axes.product.bias
        own = () if bias is None else ((bias, float(self.probed.product_points.factor.mean())),)
        return self.trace.biases + own

    @property
    def softcap(self) -> float | None:
        """Soft-cap: the factor on a tanh of the scores."""
        return abs(self.trace.caps[0]) if self.trace.caps else None

    @cached_property
    def predicted(self) -> Tensor:
        """Scores of the probed rows, (heads, rows, keys), predicted from the operations after the product."""
        return self.probed.predicted(self.softcap)

    @property
    def _adds(self) -> bool:
        return self.trace.added or self.axes.product.bias is not None

    def scales(self, fitted: "Fit | None") -> Tensor:
        """Return the slope of the softmax's input on q·k, one value per head."""
        stated = torch.from_numpy(self.stated.mean(1))
        if fitted is None:
            return stated  # other terms in the scores would distort a fitted slope
        slope = fitted.slope.cpu()
        return torch.where((slope - 1).abs() > DISAGREEMENT, stated * slope, stated)

    @property
    def stated(self) -> NDArray[np.float64]:
        """Multiplier of q·k according to the operations, (heads, rows)."""
        query, key = self.paths
        return query.signed_factor * key.signed_factor * self.probed.multiplier

    @property
    def is_pure(self) -> bool:
        impure = self._adds or self.trace.blended or self.trace.dropped or self.axes.over_pairs
        return not impure and self.softcap is None

    def gradients(self, factor: float = 1.0) -> GradientLengths:
        """Add gradient hooks to the operands of the product; `factor` undoes SDPA's own factor."""
        product, groups = self.axes.product, self.axes.groups
        found = Operands.of(self.axes, groups.ravel(), np.zeros(1, dtype=np.int64)).product_points.at[:, 0]
        if product.left.dim() != 3 or product.right.dim() != 3 or len(np.unique(found)) < len(found):
            return GradientLengths()  # several heads share one batch entry
        entries = found.reshape(groups.shape)
        query, key = (product.left, product.right) if self.axes.keys_are_right else (product.right, product.left)
        return GradientLengths.followed(
            query, key, self.heads, self.axes.owners, lambda each: factor * each[constant_on(each.device, entries)]
        )

    def norms(self, padding: Tensor | None, hidden: Tensor | None, every: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return ‖q‖, ‖k‖ and their cosine for each head without padding; norms are those after the projections."""
        length, keys = self.axes.length, int(self._in_product.sum())
        positions, columns = (spread_positions(size, size if every else NORMED_ROWS) for size in (length, keys))
        some = Operands.of(self.axes, self.axes.groups.ravel(), positions.numpy())
        vectors = some.queries(), some.keys(chosen=columns.numpy())
        queries, keys_seen = (each.unflatten(0, self.axes.groups.shape) for each in vectors)
        left_out = _chosen(padding, positions), _chosen(hidden, columns)
        query, key = mean_lengths(queries, keys_seen, left_out)
        of_query, of_key = (torch.from_numpy(np.abs(path.factor).mean(1)) for path in self.paths)
        return query.cpu() / of_query, key.cpu() / of_key, mean_cosine(queries, keys_seen, left_out).cpu()

    def origins(self) -> Origins:
        """Return the origins of queries and keys; empty for a sum of products or for mixed heads."""
        if self.trace.other_scores or self.trace.mixed:
            return Origins()
        return Origins(*(released(self.probed.origin(queries)) for queries in (True, False)))

    def sinks(self, scores: Tensor) -> Tensor | None:
        """Return the largest sink score of the probed rows, one value per head; None without sinks."""
        return None if bool(self._in_product.all()) else scores[..., ~self._in_product].amax((-2, -1)).double().cpu()

    def highest_bias(self, scores: Tensor, shown: Tensor) -> float:
        """Return the largest value added to a score, by known biases and in the probed rows."""
        if not self._adds:
            return 0.0
        known = [float(bias.max()) * by for bias, by in self.biases if is_bias(bias)]
        rest = (scores - self.predicted)[shown]
        return max(0.0, *known, float(rest.max()) if self.softcap is None and rest.numel() else 0.0)

    @cached_property
    def _in_product(self) -> Tensor:
        """True for keys in the product, False for a sink."""
        return torch.from_numpy(self.axes.columns != NOWHERE).to(self.scores.device)

    @cached_property
    def _by_group(self) -> Tensor:
        axes = self.axes
        moving = (*axes.other_axes, *axes.query_axes, axes.key_axis)
        single = [axis for axis in range(len(axes.shape)) if axis not in moving]
        view = self.scores.permute(*single, *moving)
        return view.flatten(-1 - len(axes.query_axes), -2) if axes.query_axes else view.unsqueeze(-2)

    def _by_head(self, groups: Tensor) -> Tensor:
        """Return values of flat (batch, head) groups as (batch, heads, …)."""
        return groups[torch.from_numpy(self.axes.groups).to(groups.device)]

    def rows_at(self, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scores of these rows, (batch, heads, rows, keys), and which of them are visible; None: all."""
        chosen = self._by_group.index_select(-2, positions.to(self.scores.device))
        scores = self._by_head(chosen.reshape(-1, *chosen.shape[-2:])).to(wide_dtype(chosen))
        may_hide = self.trace.fills or self._shifted or self.finite_gaps
        if scores.device.type == "cpu" and scores.numel() and not may_hide and bool(scores.amin() > NEVER_A_SCORE):
            return scores, None
        hidden = scores <= NEVER_A_SCORE
        for fill in self.trace.fills:
            if NEVER_A_SCORE < fill <= -HIDING_GAP:
                hidden |= torch.isclose(scores, scores.new_tensor(fill), rtol=1e-3)
        if self._shifted or self.finite_gaps:
            rows = Operands.of(self.axes, self.axes.groups.ravel(), positions.numpy())
            scores = scores + torch.from_numpy(rows.shift).to(scores).view(*scores.shape[:3], 1)
            for gap, highest in self.finite_gaps:
                hidden |= hidden_by(scores - rows.predicted(self.softcap).view_as(scores), gap, highest)
        return scores, ~hidden if bool(hidden.any()) else None

    @cached_property
    def _shifted(self) -> bool:
        return bool(self.probed.product_points.shift.any())

    @cached_property
    def finite_gaps(self) -> list[tuple[float, float]]:
        """(gap, largest value) of each mask whose gap is so small that a score can have it, too."""
        gaps = [(hiding_gap(bias), float(bias.max()), by) for bias, by in self.biases if bias.numel()]
        found = [(gap * abs(by), highest * by) for gap, highest, by in gaps if gap is not None]
        return [(gap, highest) for gap, highest in found if HIDING_GAP <= gap < -NEVER_A_SCORE]

    def highest(self) -> Tensor:
        """Return the largest score of each head; inf if rows were shifted."""
        if self._shifted:
            return torch.full((self.heads,), torch.inf, dtype=torch.float64)
        return self._by_head(self._by_group.amax((-2, -1)).reshape(-1)).amax(0).double()


class Fit(NamedTuple):
    """Linear fit of scores on their prediction, one value per head."""

    slope: Tensor
    explained: Tensor  # R²


def reading_of(call: WrittenCall, fitted: Fit | None, fill: float | None) -> Reading:
    """Return facts about the operations before the softmax; `fitted` is None if scores contain more than q·k."""
    of_paths, trace = Reading.of_paths(*call.paths), call.trace
    after = trace.after_caps
    return replace(
        of_paths,
        unread=_unread(call, of_paths.unread, fitted),
        learned_terms=trace.learned_terms,
        learned_factor=of_paths.learned_factor or trace.learned_factor,
        dropped=trace.dropped,
        inert_fill=fill,
        capped_mask=capped_mask(trace, call.softcap),
        inert_added=next((added * by for bias, by in call.biases if (added := flags_added(bias)) is not None), None),
        scale_after_cap=float(np.prod(after[:-1])) if trace.caps and len(after) > 1 else None,
    )


def capped_mask(trace: Trace, cap: float | None) -> float | None:
    """Return the value of masked scores after a soft-cap; None if none was masked before it."""
    hides = (
        each <= -HIDING_GAP if isinstance(each, float) else hiding_gap(each) is not None for each in trace.under_cap
    )
    return -cap if cap is not None and any(hides) else None


def inert_fill(trace: Trace, scores: Tensor, shown: Tensor) -> float | None:
    """Return a mask's fill value that is too small to hide keys; None if there is none."""
    for fill in trace.fills:
        filled = (scores == scores.new_tensor(fill)) & shown
        if abs(fill) < HIDING_GAP and bool((filled.any(-1) & ~filled.all(-1)).any()):
            return fill
    return None


def fit(predicted: Tensor, scores: Tensor, shown: Tensor) -> Fit:
    """Fit scores (heads, rows, keys) on their prediction, each row with its own intercept."""
    both = torch.stack([predicted, scores]).double()
    if shown.device.type == "cpu" and bool(shown.all()):  # not on a GPU, where this would synchronise
        both -= both.mean(-1, keepdim=True)
    else:
        count = shown.sum(-1, keepdim=True).clamp(min=1)
        both = both.masked_fill(~shown, 0.0)
        both = (both - both.sum(-1, keepdim=True) / count).masked_fill(~shown, 0.0)
    x, y = both.flatten(2)
    together, own, total = (x * y).sum(-1), x.square().sum(-1), y.square().sum(-1)
    return Fit(_or_one(together / own), _or_one(together.square() / (own * total)))


def _or_one(values: Tensor) -> Tensor:
    return torch.where(torch.isfinite(values), values, 1.0)


def _unread(call: WrittenCall, lost: str, fitted: Fit | None) -> str:
    if call.axes.between_channels:
        return "its product sums over positions: channels attend to channels, and d_k is the length"
    if call.trace.blended:
        return "an operation between its product and its softmax was not recognised"
    if call.trace.shared_out:
        return "q·k is one of several terms with learned weights"
    if call.trace.computed_factor:
        return COMPUTED
    why = lost or differs_by_row(call.stated)
    if why or fitted is None or call.axes.product.left.dtype in HALF_DTYPES:
        return why
    explained = float(fitted.explained.min())
    return f"q·k explains only {explained:.0%} of the variance of its scores" if explained < EXPLAINED else ""


def _chosen(left_out: Tensor | None, positions: Tensor) -> Tensor | None:
    return None if left_out is None else left_out[:, positions.to(left_out.device)]


def _stands_out(rest: Tensor, scores: Tensor, visible: Tensor) -> bool:
    rest, scores = rest[visible], scores[visible]
    if rest.numel() < 2 or not bool(torch.isfinite(rest).all()):
        return False
    return bool(rest.std() > VISIBLE_BIAS * scores.std())
