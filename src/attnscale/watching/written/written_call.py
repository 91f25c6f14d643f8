"""Attention written out by hand: a product of activations, followed to a softmax of it.

The operations on the way say what multiplies q·k; the numbers are compared with that, and believed where they differ.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.measure.lengths import mean_cosine, mean_lengths_of_both
from attnscale.measure.sampling import rows_are_shared
from attnscale.numerics import wide_dtype
from attnscale.tracing.coordinates import NOWHERE
from attnscale.tracing.following import Trail, Way
from attnscale.tracing.parameters import Origins
from attnscale.tracing.product import Product
from attnscale.tracing.roles import Scores
from attnscale.visibility import HIDING_GAP, NEVER_A_SCORE
from attnscale.watching.call import SeenCall
from attnscale.watching.gradients import GradientLengths, of_product
from attnscale.watching.hiding import hidden_by, hiding_gap, is_bias
from attnscale.watching.kept import keep_written_call
from attnscale.watching.rows import Rows, ScoreRows, looks_causal, spread_positions
from attnscale.watching.shards import TAIL
from attnscale.watching.written.axes import Axes, arrive
from attnscale.watching.written.legibility import Fit, fit, inert_fill, reading_of
from attnscale.watching.written.operands import Operands, channels_of

PROBED_ROWS = 4
NORMED_ROWS = 64
DISAGREEMENT = 0.01  # relative: more than half precision rounds a slope by
VISIBLE_BIAS = 0.02  # of the spread of the scores: half precision rounds them by less
FACTOR_OF_ONE = 1e-6


def written_call(axes: Axes | None, scores: Tensor) -> "WrittenCall | None":
    """The attention this softmax belongs to; None where its input cannot be followed to the product."""
    if axes is None:
        return None
    written = WrittenCall(axes, scores.detach().reshape(axes.shape))
    return written if written.probed.arrival.found.all() else None


@dataclass(frozen=True)
class WrittenCall:
    """One attention written out; `probe` are the positions, of the first batch entry, that are looked at closely."""

    axes: Axes
    scores: Tensor

    @property
    def heads(self) -> int:
        """Query heads."""
        return int(self.axes.groups.shape[1])

    @property
    def shares_keys(self) -> bool:
        """Whether several query heads have one key between them, in a product q @ kᵀ."""
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
    def trail(self) -> Trail:
        """How the first of them went."""
        return self.probed.arrival.trails[0]

    def seen(self, rows: int | None, keep: bool) -> SeenCall:
        """Everything that is reported of this call."""
        axes, (query_way, key_way) = self.axes, self.ways
        scores, visible = self.rows_at(self.probe)
        batch, heads = axes.groups.shape
        by_row = Rows(batch, heads, axes.length, scores.shape[-1], visible is not None, self.rows_at)
        shown = self._in_product.expand(scores.shape) if visible is None else visible & self._in_product
        inert = inert_fill(self.trail, scores[0], shown[0])
        shown = shown if inert is None else shown & (scores != inert)
        hidden = None if visible is None else by_row.keys_nobody_sees(self.probe)
        hidden = None if hidden is None else hidden[:, self._in_product]
        attends_itself = query_way.source is not None and query_way.source is key_way.source
        padding = hidden if attends_itself and hidden is not None and hidden.shape[-1] == axes.length else None
        query_norm, key_norm, cosine = self.norms(padding, hidden, every=rows is None)
        biased = self._adds and _stands_out(scores[0] - self.predicted, scores[0], shown[0])
        fitted = fit(self.predicted, scores[0], shown[0]) if self.is_pure else None
        scales = self.scales(fitted)
        kept = keep_written_call(self, scales, padding) if keep and not self._parts else None
        return SeenCall(
            kind="eager",
            heads=self.heads,
            kv_heads=axes.kv_heads,
            key_owners=axes.owners,
            head_dim=self.head_dim,
            model_dims=tuple({width for width in (query_way.width, self.heads * self.head_dim) if width}),
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
            normalised=query_way.normalised and key_way.normalised,
            biased=biased,
            cosine=cosine if biased else None,
            bias_is_scaled=any(is_bias(bias) and abs(by - 1) > FACTOR_OF_ONE for bias, by in self.biases),
            softcap_discarded=axes.product.capped and self.softcap is None,
            over_pairs=axes.over_pairs,
            query=None if kept is None else kept.query[:1],
            key=None if kept is None else kept.key[:1],
            kept=kept,
            origins=self.origins(),
            sinks=self.sinks(scores[0]),
            highest_bias=self.highest_bias(scores[0], shown[0]),
            reading=reading_of(self, fitted, inert),
        )

    @cached_property
    def ways(self) -> tuple[Way, Way]:
        """Of the probed queries, and of their keys."""
        return self.probed.way(queries=True), self.probed.way(queries=False)

    @property
    def head_dim(self) -> int:
        """Features that are multiplied; some attentions multiply two kinds of them apart, and add the products."""
        return int(sum(part.left.shape[-1] for part in (self.axes.product, *self._parts)))

    @cached_property
    def _parts(self) -> list[Product]:
        """Products of other features of the same queries: added, and scaled alike."""
        if not self.trail.other_scores:
            return []
        own, parts = set(channels_of(self.axes.product)), []
        for node, factor in self.trail.other_scores:
            if not isinstance(node.role, Scores) or node.role.of.has_softmax:
                continue
            product = node.role.of
            if own.intersection(theirs := channels_of(product)) or () in theirs:
                continue  # a term of positions, which multiplies the query or the key of the scores once more
            arrival = arrive(node, np.zeros((1, len(node.shape)), dtype=np.int64), product)
            total = arrival.factor[0] * factor * product.alpha
            if arrival.found.all() and np.isclose(total, self.probed.multiplier.flat[0], rtol=1e-4):
                parts.append(product)
        return parts

    @property
    def biases(self) -> list[tuple[Tensor, float]]:
        """What was added to the scores, and by how much it was multiplied afterwards."""
        bias = self.axes.product.bias
        own = [] if bias is None else [(bias, float(self.probed.arrival.factor.mean()))]
        return self.trail.biases + own

    @property
    def softcap(self) -> float | None:
        """What a tanh on the way is multiplied by."""
        return abs(self.trail.caps[0]) if self.trail.caps else None

    @cached_property
    def predicted(self) -> Tensor:
        """What the operations on the way make of the probed rows: (heads, rows, keys)."""
        return self.probed.predicted(self.softcap)

    @property
    def _adds(self) -> bool:
        """Whether anything but the product is in the scores."""
        return self.trail.added or self.axes.product.bias is not None

    def scales(self, fitted: Fit | None) -> Tensor:
        """The slope of the softmax's input on q·k, a head at a time."""
        stated = torch.from_numpy(self.stated.mean(1))
        if fitted is None:
            return stated  # what else is in the scores would be taken for a slope
        slope = fitted.slope.cpu()
        return torch.where((slope - 1).abs() > DISAGREEMENT, stated * slope, stated)

    @property
    def stated(self) -> NDArray[np.float64]:
        """(heads, rows): what the operations say multiplies q·k."""
        query, key = self.ways
        return np.abs(query.factor * key.factor) * self.probed.multiplier

    @property
    def is_pure(self) -> bool:
        """Whether nothing but a multiple of q·k is in the scores."""
        impure = self._adds or self.trail.blended or self.trail.dropped or self.axes.over_pairs
        return not impure and self.softcap is None

    def gradients(self, factor: float = 1.0) -> GradientLengths:
        """What a backward will bring to the operands of the product, or to what was multiplied by this to make them."""
        product, groups = self.axes.product, self.axes.groups
        entries = Operands.of(self.axes, groups.ravel(), np.zeros(1, dtype=np.int64)).arrival.at[:, 0]
        query, key = (product.left, product.right) if self.axes.keys_are_right else (product.right, product.left)
        return of_product(query, key, entries.reshape(groups.shape), self.axes.owners, factor)

    def some(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys spread over their positions, and the last queries: (heads of entries, rows, features)."""
        last = np.arange(max(0, self.axes.length - TAIL), self.axes.length)
        spread, tail = (
            Operands.of(self.axes, self.axes.groups.ravel(), positions)
            for positions in (spread_positions(self.axes.length, NORMED_ROWS).numpy(), last)
        )
        return spread.queries(), spread.keys(NORMED_ROWS), tail.queries()

    def norms(self, padding: Tensor | None, hidden: Tensor | None, every: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return ‖q‖, ‖k‖ and their cosine for each head, without padding, as they left their projections."""
        length, keys, every = self.axes.length, int(self._in_product.sum()), every or rows_are_shared()
        positions, columns = (spread_positions(size, size if every else NORMED_ROWS) for size in (length, keys))
        some = Operands.of(self.axes, self.axes.groups.ravel(), positions.numpy())
        vectors = some.queries(), some.keys(chosen=columns.numpy())
        queries, keys_seen = (each.unflatten(0, self.axes.groups.shape) for each in vectors)
        left_out = _chosen(padding, positions), _chosen(hidden, columns)
        query, key = mean_lengths_of_both(queries, keys_seen, left_out)
        of_query, of_key = (torch.from_numpy(np.abs(way.factor).mean(1)) for way in self.ways)
        return query.cpu() / of_query, key.cpu() / of_key, mean_cosine(queries, keys_seen, left_out).cpu()

    def origins(self) -> Origins:
        """Where queries and keys come from; of a sum of several products, none."""
        if self.trail.other_scores:
            return Origins()
        return Origins(self.probed.origin(queries=True).settled(), self.probed.origin(queries=False).settled())

    def sinks(self, scores: Tensor) -> Tensor | None:
        """The highest score of the probed rows that is no key's, a value a head; None where all are keys'."""
        return None if bool(self._in_product.all()) else scores[..., ~self._in_product].amax((-2, -1)).double().cpu()

    def highest_bias(self, scores: Tensor, shown: Tensor) -> float:
        """The most that is added to a score: of what is known of biases, and of what the probed rows show."""
        if not self._adds:
            return 0.0
        known = [float(bias.max()) * by for bias, by in self.biases if is_bias(bias)]
        rest = (scores - self.predicted)[shown]
        return max(0.0, *known, float(rest.max()) if self.softcap is None and rest.numel() else 0.0)

    @cached_property
    def _in_product(self) -> Tensor:
        """Which keys are in the product: not a sink that stands beside them."""
        return torch.from_numpy(self.axes.columns != NOWHERE).to(self.scores.device)

    @cached_property
    def _by_row(self) -> ScoreRows:
        return ScoreRows(self.axes, self.scores)

    def rows_at(self, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scores of these rows, (batch, heads, rows, keys), and which of them were visible; None: all."""
        chosen = self._by_row.at(positions)
        scores = chosen.to(wide_dtype(chosen))
        may_hide = self.trail.fills or self._shifted or self.finite_gaps
        if scores.device.type == "cpu" and scores.numel() and not may_hide and bool(scores.amin() > NEVER_A_SCORE):
            return scores, None
        hidden = scores <= NEVER_A_SCORE
        for fill in self.trail.fills:
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
        return bool(self.probed.arrival.shift.any())

    @cached_property
    def finite_gaps(self) -> list[tuple[float, float]]:
        """Of masks that subtract a number too small to be told from a score by itself; and the most that they add."""
        gaps = [(hiding_gap(bias), float(bias.max()), by) for bias, by in self.biases if bias.numel()]
        found = [(gap * abs(by), highest * by) for gap, highest, by in gaps if gap is not None]
        return [(gap, highest) for gap, highest in found if HIDING_GAP <= gap < -NEVER_A_SCORE]

    def highest(self) -> Tensor:
        """The largest score there is, a value a head."""
        if self._shifted:
            return torch.full((self.heads,), torch.inf, dtype=torch.float64)
        return self._by_row.highest()


def _chosen(left_out: Tensor | None, positions: Tensor) -> Tensor | None:
    return None if left_out is None else left_out[:, positions.to(left_out.device)]


def _stands_out(rest: Tensor, scores: Tensor, visible: Tensor) -> bool:
    """Whether what is left of the scores is more than rounding."""
    rest, scores = rest[visible], scores[visible]
    if rest.numel() < 2 or not bool(torch.isfinite(rest).all()):
        return False
    return bool(rest.std() > VISIBLE_BIAS * scores.std())
