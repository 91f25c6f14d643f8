"""Figures of the spread: beside the critical spread √(2 ln n), and the distribution of the scores."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.show.figures import Axis, Chart, Figure, Series, finite, legend, mean, ticks
from attnscale.show.text import number
from attnscale.theory.limits import critical_spread
from attnscale.train.record import Record
from attnscale.watching import Layer

SCORES = 2**18  # looked at in a layer, about
MOST_KEYS, LEAST_ROWS = 1024, 8  # of a head
BINS = 60
TAILS = 0.001  # of the scores, left out at either end
WIDE = 3.0  # spreads from the mean, beyond which a normal distribution has 0.27%
DIFFERS = 0.2  # a sample whose spread is off by more is not what was measured, and the notice says so
ROOM = 1.7  # times the highest bar: a narrow expected density may be higher, and is cut
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """Spread of a layer's heads, and the number of keys that its rows see."""

    name: str
    heads: list[float]  # those that are numbers
    keys: float  # that a row sees, on average
    longest: int

    @property
    def mean(self) -> float:
        """Mean spread of the heads."""
        return mean(self.heads)

    @property
    def critical(self) -> float:
        """√(2 ln n) over the keys that a row sees on average."""
        return critical_spread_over(self.keys)


def critical_spread_over(keys: float) -> float:
    """Return the critical spread over this many keys."""
    return critical_spread(max(1, round(keys)))


def spread_of(layer: Layer) -> Spread:
    """Return the spread of a watched layer's heads."""
    keys = float(layer.stats.keys.double().nanmean())
    heads = finite(layer.stats.std_within_rows.double().tolist())
    return Spread(layer.name, heads, keys if math.isfinite(keys) else 1.0, max(layer.key_len, 1))


def spreads_of(record: Record) -> list[Spread]:
    """Return the spreads of a record's layers, where it knows how many keys their rows see."""
    return [
        Spread(name, finite(layer.numbers["spread"]), layer.keys, max(1, round(layer.keys)))
        for name, layer in record.layers.items()
        if layer.keys is not None and "spread" in layer.numbers
    ]


def critical_spreads(name: str, spreads: Sequence[Spread]) -> Figure:
    """Return the spread of each layer, at least one, beside its critical spread."""
    x, names = list(range(len(spreads))), tuple(spread.name for spread in spreads)
    low, high = ([edge(spread.heads, default=None) for spread in spreads] for edge in (min, max))
    means = [spread.mean for spread in spreads]
    mode = "points" if len(x) == 1 else "both"
    measured = Series("mean of its heads, lowest to highest", x, means, low, high, mode=mode, points=names)
    # one layer: a line through its place, and not a point
    across, spanning = (x, spreads) if len(x) > 1 else ([-0.5, 0.5], [*spreads, *spreads])
    average, longest = ([one.critical for one in spanning], [critical_spread(one.longest) for one in spanning])
    lines = [Series("√(2 ln n), n keys seen on average", across, average, tone="ink")]
    if longest != average:
        lines.append(Series("√(2 ln n) of the longest row", across, longest, tone="ink", dashed=True))
    values = [value for spread in spreads for value in (*spread.heads, critical_spread(spread.longest))]
    top = 1.1 * (max(values, default=1.0) or 1.0)
    axes = Axis("layer", ticks=ticks(names)), Axis("spread of the scores", range=(0.0, top))
    return Figure(name, {"": Chart((measured, *lines), *axes, _notice(spreads))})


def _notice(spreads: Sequence[Spread]) -> str:
    heads = sum(len(spread.heads) for spread in spreads)
    beyond = sum(value > spread.critical for spread in spreads for value in spread.heads)
    known = [spread for spread in spreads if math.isfinite(spread.mean) and spread.critical > 0]
    if not known:
        return "No layer has a spread that is a number."
    nearest = max(known, key=lambda spread: spread.mean / spread.critical)
    where = "furthest past it" if nearest.mean > nearest.critical else "nearest to it"
    return (
        f"{beyond} of {heads} heads are beyond the critical spread for the keys they see. The layer {where} is "
        f"{nearest.name}: its spread is {number(nearest.mean)} over {nearest.keys:.0f} keys, the critical spread "
        f"{number(nearest.critical)}."
    )


@dataclass(frozen=True)
class Density:
    """Histogram of the scores above the mean of their row, beside normal densities: measured and expected."""

    edges: Floats
    measured: Floats
    normal: Floats  # of each head's own spread, mean over heads
    expected: Floats  # of the spread of independent queries and keys of the same norms
    spread: float  # mean over heads
    expected_spread: float
    beyond: float  # share further than WIDE spreads from the mean of their head
    scores: int


def densities(name: str, layers: Mapping[str, Layer]) -> Figure | None:
    """Return a histogram for each layer whose queries and keys were kept."""
    found = {layer: density for layer in layers if (density := density_of(layers[layer])) is not None}
    labels = legend(found)
    views = {labels[layer]: _density_chart(layers[layer], density) for layer, density in found.items()}
    return Figure(name, views, choose="Scores of") if views else None


@torch.no_grad()
def density_of(layer: Layer) -> Density | None:
    """Return the distribution of a sample of scores of the first sequence; None where none were kept or finite.

    Scores are scale · q·k with the layer's soft-cap, over causally visible keys, less the mean of their row.
    """
    heads = [scores for scores in _scores(layer) if len(scores) > 1]
    if not heads:
        return None
    pooled = np.concatenate(heads)
    means, spreads = (np.array([function(scores) for scores in heads]) for function in (np.mean, np.std))
    norms = (layer.query_norm.double() * layer.key_norm.double()).cpu().numpy()
    expected = abs(layer.scale_expected) * norms / math.sqrt(layer.head_dim)
    low, high = np.quantile(pooled, [TAILS, 1 - TAILS])
    margin = max(0.1 * (high - low), 1e-6 * max(abs(low), abs(high)), 1e-12)
    counts, edges = np.histogram(pooled, BINS, (low - margin, high + margin))
    middles = (edges[1:] + edges[:-1]) / 2
    far = sum(np.count_nonzero(np.abs(s - m) > WIDE * w) for s, m, w in zip(heads, means, spreads, strict=True))
    return Density(
        edges=edges,
        measured=counts / len(pooled) / np.diff(edges),
        normal=_normals(middles, means, spreads),
        expected=_normals(middles, np.zeros_like(expected), expected),
        spread=float(spreads.mean()),
        expected_spread=float(expected.mean()),
        beyond=far / len(pooled),
        scores=len(pooled),
    )


def _scores(layer: Layer) -> list[Floats]:
    """Return the visible, finite scores of every head above the mean of their row."""
    if layer.query is None or layer.key is None or layer.query.dim() < 3:
        return []
    query, key = (tensor.reshape(-1, *tensor.shape[-3:])[0].detach().float() for tensor in (layer.query, layer.key))
    key = key.repeat_interleave(query.shape[0] // key.shape[0], 0)
    queries, keys = query.shape[-2], key.shape[-2]
    columns = _even(keys, MOST_KEYS)
    rows = _even(queries, max(LEAST_ROWS, SCORES // (layer.heads * len(columns))))
    scale = layer.scales.float().nan_to_num(layer.scale_expected).to(query.device).view(-1, 1, 1)
    scores = (query[:, rows] * scale) @ key[:, columns].transpose(-2, -1)
    if layer.softcap is not None:
        scores = layer.softcap * (scores / layer.softcap).tanh()
    visible = torch.ones(len(rows), len(columns), dtype=torch.bool)
    if layer.causal:
        visible = columns <= rows.unsqueeze(1) + (keys - queries)
    scores = scores.cpu().double()
    means = torch.where(visible, scores, 0.0).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp(min=1)
    return [head[np.isfinite(head)] for head in (scores - means)[:, visible].numpy()]


def _even(size: int, most: int) -> Tensor:
    return torch.linspace(0, size - 1, min(size, most)).round().long()


def _normals(at: Floats, means: Floats, spreads: Floats) -> Floats:
    usable = np.isfinite(means) & np.isfinite(spreads) & (spreads > 0)
    if not usable.any():
        return np.full_like(at, np.nan)
    means, spreads = means[usable, None], spreads[usable, None]
    density: Floats = (np.exp(-(((at - means) / spreads) ** 2) / 2) / spreads).mean(0) / math.sqrt(2 * math.pi)
    return density


def _density_chart(layer: Layer, density: Density) -> Chart:
    x = ((density.edges[1:] + density.edges[:-1]) / 2).tolist()
    highest = float(np.nanmax(np.concatenate([density.measured, density.normal])))
    measured = float(layer.stats.std_within_rows.double().nanmean())
    notice = (
        f"{layer.name}: the spread of the scores is {number(density.spread)}; for independent queries and keys of the "
        f"same norms it would be {number(density.expected_spread)} at the expected scale. {density.beyond:.2%} of the "
        f"scores lie more than {WIDE:g} spreads from the mean (normal distribution: 0.27%)."
    )
    if math.isfinite(measured) and abs(density.spread - measured) > DIFFERS * measured:
        notice += (
            " The histogram shows the first sequence, without biases and with no mask but the causal one; over all "
            f"measured scores the spread is {number(measured)}."
        )
    return Chart(
        (
            Series("scores measured", x, density.measured.tolist(), mode="bars"),
            Series("normal, of the measured spread", x, density.normal.tolist(), tone="ink"),
            Series("expected of independent q and k", x, density.expected.tolist(), tone=1, dashed=True),
        ),
        Axis("score above its row’s mean"),
        Axis("density", range=(0.0, ROOM * highest)),
        notice,
    )
