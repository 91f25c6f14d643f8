"""How the scores of a layer lie about the mean of their row, beside what theory expects of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from attnscale.show.numbers import number
from attnscale.show.report.figures import Axis, Chart, Figure, Series
from attnscale.show.report.names import legend
from attnscale.watching import Layer

SCORES = 2**18  # looked at in a layer, about
MOST_KEYS, LEAST_ROWS = 1024, 8  # of a head
BINS = 60
TAILS = 0.001  # of the scores, left out at either end
WIDE = 3.0  # spreads from the mean, beyond which a normal distribution has 0.27%
APART = 0.2  # a sample whose spread is off by more is not what was measured, and says so
ROOM = 1.7  # times the highest bar: a narrow expected density may be higher, and is cut
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Density:
    """A histogram of the scores above the mean of their row, a normal density of their spread, and the one expected."""

    edges: Floats
    measured: Floats
    normal: Floats
    expected: Floats
    spread: float  # mean over heads, as the table has it
    expected_spread: float
    beyond: float  # share further than WIDE spreads from the mean of their head
    scores: int
    rows: int

    @property
    def middles(self) -> Floats:
        """Of the bins."""
        middles: Floats = (self.edges[1:] + self.edges[:-1]) / 2
        return middles


def densities(name: str, layers: Mapping[str, Layer]) -> Figure | None:
    """A histogram a layer, of those whose queries and keys were kept."""
    found = {layer: density for layer in layers if (density := density_of(layers[layer])) is not None}
    labels = legend(found)
    views = {labels[layer]: _chart(layers[layer], density) for layer, density in found.items()}
    return Figure(name, views, choose="Scores of") if views else None


@torch.no_grad()
def density_of(layer: Layer) -> Density | None:
    """The scores of a sample of rows and keys, even over the first sequence; None where none were kept or finite.

    They are scale · q·k with the layer's soft-cap, over causally visible keys, less the mean of their row. Heads differ
    in spread, so both densities are means over heads of normal ones: with each head's own spread, and with the spread
    of independent queries and keys of its norms.
    """
    heads, rows = _scores(layer)
    known = [scores for scores in heads if len(scores) > 1]
    if not known:
        return None
    pooled = np.concatenate(known)
    means, spreads = (np.array([function(scores) for scores in known]) for function in (np.mean, np.std))
    norms = (layer.query_norm.double() * layer.key_norm.double()).cpu().numpy()
    expected = abs(layer.scale_expected) * norms / math.sqrt(layer.head_dim)
    low, high = np.quantile(pooled, [TAILS, 1 - TAILS])
    margin = max(0.1 * (high - low), 1e-6 * max(abs(low), abs(high)), 1e-12)
    counts, edges = np.histogram(pooled, BINS, (low - margin, high + margin))
    middles = (edges[1:] + edges[:-1]) / 2
    return Density(
        edges=edges,
        measured=counts / len(pooled) / np.diff(edges),
        normal=_normals(middles, means, spreads),
        expected=_normals(middles, np.zeros_like(expected), expected),
        spread=float(spreads.mean()),
        expected_spread=float(expected.mean()),
        beyond=_beyond(known, means, spreads),
        scores=len(pooled),
        rows=rows,
    )


def _scores(layer: Layer) -> tuple[list[Floats], int]:
    """The visible, finite scores of every head above the mean of their row, and how many rows they are of."""
    if layer.query is None or layer.key is None or layer.query.dim() < 3:
        return [], 0
    query, key = (tensor.reshape(-1, *tensor.shape[-3:])[0].detach().float() for tensor in (layer.query, layer.key))
    key = key.repeat_interleave(query.shape[0] // key.shape[0], 0)
    queries, keys = query.shape[-2], key.shape[-2]
    columns = _even(keys, MOST_KEYS)
    picked = _even(queries, max(LEAST_ROWS, SCORES // (layer.heads * len(columns))))
    scale = layer.scales.float().nan_to_num(layer.scale_expected).to(query.device).view(-1, 1, 1)
    scores = (query[:, picked] * scale) @ key[:, columns].transpose(-2, -1)
    if layer.softcap is not None:
        scores = layer.softcap * (scores / layer.softcap).tanh()
    visible = torch.ones(len(picked), len(columns), dtype=torch.bool)
    if layer.causal:
        visible = columns <= picked.unsqueeze(1) + (keys - queries)
    scores = scores.cpu().double()
    means = torch.where(visible, scores, 0.0).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp(min=1)
    seen = (scores - means)[:, visible].numpy()
    return [head[np.isfinite(head)] for head in seen], len(picked)


def _even(size: int, most: int) -> torch.Tensor:
    """At most so many positions, evenly spread, the first and the last among them."""
    return torch.linspace(0, size - 1, min(size, most)).round().long()


def _normals(at: Floats, means: Floats, spreads: Floats) -> Floats:
    usable = np.isfinite(means) & np.isfinite(spreads) & (spreads > 0)
    if not usable.any():
        return np.full_like(at, np.nan)
    means, spreads = means[usable, None], spreads[usable, None]
    density: Floats = (np.exp(-(((at - means) / spreads) ** 2) / 2) / spreads).mean(0) / math.sqrt(2 * math.pi)
    return density


def _beyond(heads: Sequence[Floats], means: Floats, spreads: Floats) -> float:
    far = sum(
        int((np.abs(scores - mean) > WIDE * spread).sum())
        for scores, mean, spread in zip(heads, means, spreads, strict=True)
    )
    return far / sum(map(len, heads))


def _chart(layer: Layer, density: Density) -> Chart:
    x = density.middles.tolist()
    highest = float(np.nanmax(np.concatenate([density.measured, density.normal])))
    return Chart(
        (
            Series("scores measured", x, density.measured.tolist(), mode="bars", tone=0),
            Series("normal, of the measured spread", x, density.normal.tolist(), tone="ink"),
            Series("expected of independent q and k", x, density.expected.tolist(), tone=1, dashed=True),
        ),
        Axis("score above its row’s mean"),
        Axis("density", range=(0.0, ROOM * highest)),
        _notice(layer, density),
    )


def _notice(layer: Layer, density: Density) -> str:
    measured = float(layer.stats.std_within_rows.double().nanmean())
    told = (
        f"{layer.name}: about the mean of their row the scores spread by {number(density.spread)}, where independent "
        f"queries and keys of the same norms would by {number(density.expected_spread)} at the expected scale; "
        f"{density.beyond:.2%} lie more than {WIDE:g} spreads from it, of a normal distribution 0.27% would."
    )
    if math.isfinite(measured) and abs(density.spread - measured) > APART * measured:
        told += (
            f" These are the scores of the first sequence without masks or biases other than the causal one: all that "
            f"were measured spread by {number(measured)}."
        )
    return told
