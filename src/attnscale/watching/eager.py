"""Attention written out by hand: a product of activations, followed to a softmax of it.

The operations on the way say what multiplies q·k; the numbers are compared with that, and believed where they differ.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.rules.rule import wide_dtype
from attnscale.watching.coordinates import NOWHERE
from attnscale.watching.layout import Arrival, Layout, arrive, find_layout
from attnscale.watching.lineage import Node, Trail, follow
from attnscale.watching.products import Product, channels
from attnscale.watching.sighting import Rows, Sighting, looks_causal, rms_norm
from attnscale.watching.visibility import HIDING_GAP, NEVER_A_SCORE, hidden_by, hiding_gap

PROBED_ROWS = 8
DISAGREEMENT = 0.01  # relative: more than half precision rounds a slope by
VISIBLE_BIAS = 0.02  # of the spread of the scores: half precision rounds them by less
FACTOR_OF_ONE = 1e-6


def see_softmax(product: Product, scores: Tensor, node: Node, axis: int) -> "Written | None":
    """The attention this softmax belongs to; None where its input cannot be followed to the product."""
    layout = find_layout(product, node, axis % max(scores.dim(), 1))
    if layout is None:
        return None
    written = Written(layout, scores.detach().reshape(layout.shape))
    return written if written.arrival.found.all() else None


@dataclass(frozen=True)
class Way:
    """How the queries, or the keys, of the probed rows came from their projection."""

    factor: NDArray[np.float64]  # (heads, rows): what multiplied them since
    normalised: bool
    width: int | None  # of what was projected


@dataclass(frozen=True)
class Written:
    """One attention written out; `probe` are the positions, of the first batch entry, that are looked at closely."""

    layout: Layout
    scores: Tensor

    @property
    def heads(self) -> int:
        """Query heads."""
        return int(self.layout.groups.shape[1])

    @cached_property
    def probe(self) -> Tensor:
        """Positions spread over the queries."""
        return torch.linspace(0, self.layout.length - 1, min(PROBED_ROWS, self.layout.length)).round().long()

    @cached_property
    def arrival(self) -> Arrival:
        """The probed rows of every head, followed to the product."""
        return arrive(
            self.layout.node, self.layout.rows(self.layout.groups[0], self.probe.numpy()), self.layout.product
        )

    @property
    def trail(self) -> Trail:
        """How the first of them went."""
        return self.arrival.trails[0]

    @property
    def head_dim(self) -> int:
        """Features that are multiplied; some attentions multiply two kinds of them apart, and add the products."""
        return self.queries.shape[-1] + sum(part.left.shape[-1] for part in self._parts)

    @cached_property
    def _parts(self) -> list[Product]:
        """Products of other features of the same queries: added, and scaled alike."""
        own, parts = self._query_channel(self.layout.product), []
        for node, factor in self.trail.other_scores:
            product = node.scores
            if product is None or self._query_channel(product) in (own, ()):
                continue
            arrival = arrive(node, np.zeros((1, len(node.shape)), dtype=np.int64), product)
            alike = np.isclose(arrival.factor[0] * factor * product.alpha, self._multiplier.flat[0], rtol=1e-4)
            parts += [product] if arrival.found.all() and alike else []
        return parts

    def _query_channel(self, product: Product) -> tuple[object, ...]:
        """Where the first query of a product comes from: position terms reuse the query of the scores, parts do not."""
        node = product.left_node if self.layout.keys_are_right else product.right_node
        return channels(node, np.zeros((1, len(node.shape)), dtype=np.int64))[0]

    def sighting(self, rows: int | None, keep: bool) -> Sighting:
        """Everything that is reported of this call."""
        layout, (query_way, key_way) = self.layout, self.ways
        scores, visible = self.rows_at(self.probe)
        batch, heads = layout.groups.shape
        by_row = Rows(batch, heads, layout.length, visible.shape[-1], not bool(visible.all()), self.rows_at)
        return Sighting(
            kind="eager",
            heads=self.heads,
            kv_heads=layout.kv_heads,
            head_dim=self.head_dim,
            model_dims=tuple({width for width in (query_way.width, self.heads * self.head_dim) if width}),
            query_len=layout.length,
            key_len=int(self._in_product.sum()),
            causal=looks_causal(visible[..., self._in_product], self.probe, layout.length),
            softcap=self.softcap,
            stats=by_row.measure(rows, None if rows is None else self.highest()),
            scales=self.scales(scores[0], visible[0]),
            query_norm=rms_norm(self.queries[None]).cpu() / torch.from_numpy(np.abs(query_way.factor).mean(1)),
            key_norm=rms_norm(self.keys[None]).cpu() / torch.from_numpy(np.abs(key_way.factor).mean(1)),
            normalised=query_way.normalised and key_way.normalised,
            biased=_stands_out(scores[0] - self.predicted, scores[0], visible[0]),
            bias_is_scaled=any(_is_bias(bias) and abs(by - 1) > FACTOR_OF_ONE for bias, by in self.biases),
            softcap_discarded=layout.product.capped and self.softcap is None,
            query=self._kept(queries=True) if keep and not self._parts else None,
            key=self._kept(queries=False) if keep and not self._parts else None,
        )

    @cached_property
    def ways(self) -> tuple[Way, Way]:
        """Of the queries, and of the keys."""
        return self._way(queries=True), self._way(queries=False)

    def _way(self, queries: bool) -> Way:
        points = self.layout.operand_points(self.arrival.at, queries)
        factor = np.ones(len(points))
        trails = follow(self.layout.operand_node(queries), points)
        for trail in trails:
            factor[trail.index] = trail.factor
        projection = trails[0].node.projection
        return Way(
            factor.reshape(self.heads, -1),
            all(trail.normalised for trail in trails),
            None if projection is None else projection.width,
        )

    @property
    def biases(self) -> list[tuple[Tensor, float]]:
        """What was added to the scores, and by how much it was multiplied afterwards."""
        bias = self.layout.product.bias
        own = [] if bias is None else [(bias, float(self.arrival.factor.mean()))]
        return self.trail.biases + own

    @property
    def softcap(self) -> float | None:
        """What a tanh on the way is multiplied by."""
        return abs(self.trail.caps[0]) if self.trail.caps else None

    @property
    def _multiplier(self) -> NDArray[np.float64]:
        """(heads, rows): what multiplies the product on its way to the softmax."""
        return self.arrival.factor.reshape(self.heads, -1) * self.layout.product.alpha

    @cached_property
    def queries(self) -> Tensor:
        """The probed queries, (heads, rows, features), as they entered the product."""
        left = self.layout.product.left if self.layout.keys_are_right else self.layout.product.right.mT
        at = [torch.from_numpy(column.copy()) for column in self.arrival.at.T]
        row = at[-2] if self.layout.keys_are_right else at[-1]
        chosen = left[row] if left.dim() == 2 else left[at[0], row]
        found: Tensor = chosen.detach().to(wide_dtype(left)).unflatten(0, (self.heads, -1))
        return found

    @cached_property
    def keys(self) -> Tensor:
        """The keys of the first batch entry, (heads, keys, features), as they entered the product."""
        right = self.layout.product.right.mT if self.layout.keys_are_right else self.layout.product.left
        columns = torch.from_numpy(self.layout.columns[self.layout.columns != NOWHERE].copy())
        first = torch.from_numpy(self.arrival.at[:: len(self.probe), 0].copy())
        chosen: Tensor = right[columns].expand(self.heads, -1, -1) if right.dim() == 2 else right[first][:, columns]
        return chosen.detach().to(wide_dtype(right))

    @cached_property
    def predicted(self) -> Tensor:
        """What the operations on the way make of the product: (heads, rows, keys), without what they add."""
        ours = (self.queries @ self.keys.mT) * torch.from_numpy(self._multiplier).to(self.queries).unsqueeze(-1)
        ours = ours if self.softcap is None else self.softcap * torch.tanh(ours / self.softcap)
        whole = ours.new_zeros(*ours.shape[:2], len(self.layout.columns))
        whole[..., self._in_product] = ours
        return whole

    def scales(self, scores: Tensor, visible: Tensor) -> Tensor:
        """The slope of the softmax's input on q·k, a head at a time."""
        query, key = self.ways
        stated = torch.from_numpy((np.abs(query.factor * key.factor) * self._multiplier).mean(1))
        if self.trail.added or self.layout.product.bias is not None or self.trail.blended or self.softcap is not None:
            return stated  # what else is in the scores would be taken for a slope
        slope = _slope(self.predicted, scores, visible & self._in_product)
        return torch.where((slope - 1).abs() > DISAGREEMENT, stated * slope, stated)

    @cached_property
    def _in_product(self) -> Tensor:
        """Which keys are in the product: not a sink that stands beside them."""
        return torch.from_numpy(self.layout.columns != NOWHERE).to(self.scores.device)

    @cached_property
    def _by_row(self) -> Tensor:
        """A view of the scores: (…other axes…, queries, keys)."""
        layout = self.layout
        moving = (*layout.other_axes, *layout.query_axes, layout.key_axis)
        single = [axis for axis in range(len(layout.shape)) if axis not in moving]
        view = self.scores.permute(*single, *moving)
        return view.flatten(-1 - len(layout.query_axes), -2) if layout.query_axes else view.unsqueeze(-2)

    def rows_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The scores of these rows, (batch, heads, rows, keys), and which of them were visible."""
        chosen = self._by_row.index_select(-2, positions.to(self.scores.device))
        chosen = chosen.reshape(-1, *chosen.shape[-2:])[torch.from_numpy(self.layout.groups).to(chosen.device)]
        scores = chosen.to(wide_dtype(chosen))
        hidden = scores <= NEVER_A_SCORE
        for fill in self.trail.fills:
            if NEVER_A_SCORE < fill <= -HIDING_GAP:
                hidden |= torch.isclose(scores, scores.new_tensor(fill), rtol=1e-3)
        shift = self._shift(positions, scores)
        scores = scores if shift is None else scores + shift
        for gap in self._finite_gaps:
            hidden |= hidden_by(scores - self._predicted_at(positions), gap)
        return scores, ~hidden

    @cached_property
    def _finite_gaps(self) -> list[float]:
        """Of masks that subtract a number too small to be told from a score by itself."""
        gaps = [(hiding_gap(bias), by) for bias, by in self.biases]
        return [gap * abs(by) for gap, by in gaps if gap is not None and HIDING_GAP <= gap * abs(by) < -NEVER_A_SCORE]

    def _everywhere(self, positions: Tensor) -> Arrival:
        return arrive(
            self.layout.node, self.layout.rows(self.layout.groups.ravel(), positions.numpy()), self.layout.product
        )

    def _shift(self, positions: Tensor, like: Tensor) -> Tensor | None:
        """What the model subtracted from each row, its maximum mostly: (batch, heads, rows, 1)."""
        if not self.arrival.shift.any():
            return None
        shift = self._everywhere(positions).shift.reshape(*self.layout.groups.shape, -1, 1)
        return torch.from_numpy(shift).to(like)

    def _predicted_at(self, positions: Tensor) -> Tensor:
        """The product at these rows, times what multiplies it: (batch, heads, rows, keys)."""
        layout, arrival = self.layout, self._everywhere(positions)
        left, right = layout.product.left, layout.product.right.mT
        query, key = (left, right) if layout.keys_are_right else (right, left)
        at = [torch.from_numpy(column.copy()) for column in arrival.at.T]
        row = at[-2] if layout.keys_are_right else at[-1]
        shape = (layout.groups.size, len(positions))
        queries = (query[row] if query.dim() == 2 else query[at[0], row]).unflatten(0, shape)
        entry = at[0].reshape(shape)[:, 0]
        keys = key.expand(shape[0], -1, -1) if key.dim() == 2 else key[entry]
        columns = torch.from_numpy(np.maximum(layout.columns, 0))
        wide = wide_dtype(query)
        ours = (queries.to(wide) @ keys.to(wide).mT)[..., columns]
        ours = ours * torch.from_numpy(arrival.factor * layout.product.alpha).to(ours).reshape(*shape, 1)
        found: Tensor = ours.unflatten(0, layout.groups.shape)
        return found

    def highest(self) -> Tensor:
        """The largest score there is, a value a head."""
        if self.arrival.shift.any():
            return torch.full((self.heads,), torch.inf, dtype=torch.float64)
        each = self._by_row.amax((-2, -1)).reshape(-1)
        return each[torch.from_numpy(self.layout.groups).to(each.device)].amax(0).double()

    def _kept(self, queries: bool) -> Tensor:
        """Queries or keys of the first batch entry as they left their projections: (1, heads, length, features)."""
        operand = self.layout.product.left if queries == self.layout.keys_are_right else self.layout.product.right.mT
        first = torch.from_numpy(self.arrival.at[:: len(self.probe), 0].copy())
        chosen: Tensor = operand.expand(self.heads, -1, -1) if operand.dim() == 2 else operand[first]
        way = self.ways[0 if queries else 1]
        kept: Tensor = (chosen / torch.from_numpy(way.factor.mean(1)).to(chosen)[:, None, None]).unsqueeze(0).detach()
        return kept


def _slope(predicted: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
    """Least squares of scores (heads, rows, keys) on what was predicted of them, each row with its own intercept."""
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    x, y = (values.double().masked_fill(~visible, 0.0) for values in (predicted, scores))
    x, y = ((values - values.sum(-1, keepdim=True) / count).masked_fill(~visible, 0.0) for values in (x, y))
    slope = (x * y).sum((-2, -1)) / x.square().sum((-2, -1))
    return torch.where(torch.isfinite(slope), slope, 1.0).cpu()


def _stands_out(rest: Tensor, scores: Tensor, visible: Tensor) -> bool:
    """Whether what is left of the scores is more than rounding."""
    rest, scores = rest[visible], scores[visible]
    if rest.numel() < 2 or not bool(torch.isfinite(rest).all()):
        return False
    return bool(rest.std() > VISIBLE_BIAS * scores.std())


def _is_bias(tensor: Tensor) -> bool:
    """Whether an added operand is a bias, not a mask, and not nothing."""
    return bool((tensor != 0).any()) and hiding_gap(tensor) is None
