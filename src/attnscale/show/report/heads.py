"""Figures of heads: maps, spreads, weights of concentrated heads, and histograms of scores."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from attnscale.diagnose.pattern import pattern_of
from attnscale.diagnose.verdict import Verdict, head_verdicts
from attnscale.measure import ScoreStats
from attnscale.measure.statistics import STATISTICS, Place, Statistic, in_place
from attnscale.plain import plain
from attnscale.show.page import Axis, Chart, Figure, Heat, Number, Series, known_values, mean, ticks
from attnscale.show.text import number
from attnscale.theory.limits import critical_spread
from attnscale.train.record import LayerRecord
from attnscale.watching import Layer

OUTLIERS = 20.0  # colour by the logarithm if the largest value is this many times the median
SHOWN = 8  # most heads to show weights of, and layers to show scores of
SIDE = 64  # most fields along each side of a map of weights
BINS = 40  # of a histogram
ROOM = 1.7  # height of the axis over the highest bar; a higher expected density is cut off there
CURVE = 8 * BINS  # points of a density
Values = Sequence[Sequence[Number]]


def mapped() -> list[Statistic]:
    """Return the statistics that a map can show: means first, extremes last."""
    return sorted(in_place(Place.MAP), key=lambda entry: entry.heads == "max")


def record_of(layer: Layer) -> LayerRecord:
    """Return the statistics of a watched layer in the form of a record."""
    stats, keys = layer.stats, float(layer.stats.keys.double().nanmean())
    numbers = {entry.name: entry.of(stats).double().tolist() for entry in mapped()}
    return LayerRecord(int(stats.rows.sum()), numbers, keys=keys if math.isfinite(keys) else 1.0)


def head_map(name: str, records: Mapping[str, LayerRecord], stats: Sequence[ScoreStats] = ()) -> Figure:
    """Return the map of all heads; if rows were sampled, `stats` of the layers add standard errors or upper bounds."""
    views = {}
    for entry in mapped():
        errors = bounds = None
        if not all(one.exact for one in stats):
            if entry.bounded_by:
                bounds = [_numbers(entry, STATISTICS[entry.bounded_by].of(one)) for one in stats]
            elif entry.has_error and entry.attribute is not None:
                errors = [_numbers(entry, one.stderr(entry.attribute)) for one in stats]
        heads = (record.numbers.get(entry.name, []) for record in records.values())
        values = [[entry.factor * value for value in values] for values in heads]
        views[entry.long] = _map(entry, tuple(records), values, errors, bounds)
    return Figure(name, views, choose="Colour heads by")


def _map(
    entry: Statistic, names: tuple[str, ...], values: Values, errors: Values | None = None, bounds: Values | None = None
) -> Heat:
    values = padded(values)
    known = [value for row in values for value in row if value is not None]
    highest = entry.highest and entry.factor * entry.highest
    high = highest or max(known, default=1.0) or 1.0
    log = entry.highest is None and bool(known) and min(known) > 0 and high > OUTLIERS * median(known)
    return Heat(
        values=values,
        x=Axis("head"),
        y=Axis("layer", ticks=ticks(names)),
        unit=entry.long,
        rows=names,
        low=min(known) if log else min(0.0, *known) if known else 0.0,
        high=high,
        log=log,
        notice=_notice(entry, names, values),
        errors=None if errors is None else padded(errors),
        bounds=None if bounds is None else padded(bounds),
    )


def _notice(entry: Statistic, names: Sequence[str], values: Values) -> str:
    known = [
        (value, row, head) for row, heads in enumerate(values) for head, value in enumerate(heads) if value is not None
    ]
    if not known:
        return f"No head has a finite {entry.long}."
    extreme, (value, row, head) = ("highest", max(known)) if entry.bad == "large" else ("lowest", min(known))
    middle = median(value for value, _, _ in known)
    return (
        f"The {extreme} {entry.long} is {number(value)}, in head {head} of {names[row]}; the median over heads is "
        f"{number(middle)}."
    )


def _numbers(entry: Statistic, values: Tensor) -> list[float]:
    found: list[float] = (entry.factor * values.double()).tolist()
    return found


def padded(values: Values) -> Values:
    """Return rows of equal length: None after a short one, and for values that are not finite."""
    width = max(map(len, values), default=0)
    return [[*plain(row), *[None] * (width - len(row))] for row in values]


def sampling_of(layers: Mapping[str, Layer]) -> str:
    """Return a sentence on the measured rows and the resulting sampling error."""
    stats = [layer.stats for layer in layers.values()]
    if all(one.exact for one in stats):
        return "Every row was measured, so no number has a sampling error."
    bound = max(float(one.max_bound.nan_to_num(-torch.inf).max()) for one in stats)
    return (
        "Only some rows were measured: ± is the standard error from this sampling. The largest score has an upper "
        f"bound instead: no score exceeds {number(bound)}."
    )


def concentrated_heads(name: str, layers: Mapping[str, Layer]) -> Figure | None:
    """Return the weights of heads beyond the critical spread, lowest entropy first; None if there are none to show."""
    heads = [
        head for layer in layers.values() if layer.kept for head in head_verdicts(layer) if head.is_past_critical_spread
    ]
    heads.sort(key=lambda head: head.entropy_ratio)
    views = {f"{head.layer}, head {head.head}": _weights(layers[head.layer], head) for head in heads[:SHOWN]}
    caption = f"{len(views)} of {len(heads)} such heads, lowest entropy first." if len(heads) > len(views) else ""
    return Figure(name, views, caption=caption) if views else None


def _weights(layer: Layer, found: Verdict) -> Heat:
    weights = layer.weights(found.head).double().cpu()
    (queries, keys), (by_query, by_key) = weights.shape, (math.ceil(size / SIDE) for size in weights.shape)
    fields: Tensor = max_pool2d(weights[None, None], (by_query, by_key), ceil_mode=True)[0, 0]
    pattern = pattern_of(layer, found.head)
    notice = "" if pattern is None else f"{str(pattern)[:1].upper()}{str(pattern)[1:]}. "
    if by_query > 1 or by_key > 1:
        notice += "Each field of the map shows the largest weight of several queries and keys."
    return Heat(
        values=fields.tolist(),
        x=Axis("key" if by_key == 1 else f"key / {by_key}"),
        y=Axis("query" if by_query == 1 else f"query / {by_query}"),
        unit="weight",
        rows=_spans(queries, by_query),
        columns=_spans(keys, by_key),
        column="key",
        low=0.0,
        high=1.0,
        notice=notice,
    )


def _spans(size: int, step: int) -> tuple[str, ...]:
    ends = ((start, min(start + step, size) - 1) for start in range(0, size, step))
    return tuple(str(start) if start == end else f"{start}–{end}" for start, end in ends)


@dataclass(frozen=True)
class Spread:
    """Spread of each head of a layer, and the critical spread for the mean number of keys that its rows see."""

    name: str
    heads: list[float]  # finite values only
    keys: float
    critical: float

    @property
    def mean(self) -> float:
        """Mean spread of the heads."""
        return mean(self.heads)


def critical_spread_over(keys: float) -> float:
    """Return the critical spread over this many keys."""
    return critical_spread(max(1, round(keys)))


def spreads_of(records: Mapping[str, LayerRecord]) -> list[Spread]:
    """Return the spreads of the layers for which the number of keys is known."""
    return [
        Spread(name, known_values(record.numbers["spread"]), record.keys, critical_spread_over(record.keys))
        for name, record in records.items()
        if record.keys is not None and "spread" in record.numbers
    ]


def critical_spreads(name: str, spreads: Sequence[Spread]) -> Figure:
    """Return the spread of each layer, at least one, beside its critical spread."""
    x, names = list(range(len(spreads))), tuple(spread.name for spread in spreads)
    low, high = ([edge(spread.heads, default=None) for spread in spreads] for edge in (min, max))
    means = [spread.mean for spread in spreads]
    measured = Series("mean over heads; band: lowest to highest head", x, means, low, high, marks=True, points=names)
    critical = [spread.critical for spread in spreads]
    # a single layer gets a line, because one point would not be visible
    across, line = (x, critical) if len(x) > 1 else ([-0.5, 0.5], [*critical, *critical])
    expected = Series("critical spread √(2 ln n)", across, line, tone="ink", dashed=True)
    top = 1.1 * (max([*critical, *(value for spread in spreads for value in spread.heads)], default=1.0) or 1.0)
    axes = Axis("layer", ticks=ticks(names)), Axis("spread of the scores", range=(0.0, top))
    return Figure(name, {"": Chart((measured, expected), *axes, _spread_notice(spreads))})


def _spread_notice(spreads: Sequence[Spread]) -> str:
    heads = sum(len(spread.heads) for spread in spreads)
    beyond = sum(value > spread.critical for spread in spreads for value in spread.heads)
    known = [spread for spread in spreads if math.isfinite(spread.mean) and spread.critical > 0]
    if not known:
        return "No layer has a finite spread."
    nearest = max(known, key=lambda spread: spread.mean / spread.critical)
    where = "furthest above it" if nearest.mean > nearest.critical else "closest to it"
    return (
        f"{beyond} of {heads} heads are above the critical spread for the keys they see. The layer {where} is "
        f"{nearest.name}: its spread is {number(nearest.mean)} over {nearest.keys:.0f} keys, the critical spread "
        f"{number(nearest.critical)}."
    )


def score_histograms(name: str, layers: Mapping[str, Layer]) -> Figure | None:
    """Return a score histogram of the widest head of each of the widest layers, with theoretical densities."""
    spreads = {name: layer.stats.std_within_rows.double().nan_to_num(-1.0) for name, layer in layers.items()}
    widest = sorted((name for name in layers if layers[name].kept), key=lambda name: -float(spreads[name].max()))
    found = {name: _histogram(layers[name], int(spreads[name].argmax())) for name in widest[:SHOWN]}
    views = {name: chart for name in layers if (chart := found.get(name)) is not None}
    return Figure(name, views, choose="Scores of") if views else None


def _histogram(layer: Layer, head: int) -> Chart | None:
    # log(weight) is the score minus a constant of the row, so it includes masks, biases and soft-caps.
    logs = layer.weights(head).double().cpu().log()
    visible = torch.isfinite(logs)
    means = torch.where(visible, logs, 0.0).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp(min=1)
    scores = (logs - means)[visible].numpy()
    if len(scores) < BINS or not scores.std() > 0:
        return None
    density, edges = np.histogram(scores, BINS, density=True)
    expected = abs(layer.scale_expected) * float(layer.query_norm[head] * layer.key_norm[head]) / layer.head_dim**0.5
    measured, at = density.tolist(), np.linspace(edges[0], edges[-1], CURVE)
    top = ROOM * max(measured)

    def normal(name: str, spread: float, tone: int | str) -> Series:
        values = np.exp(-((at / spread) ** 2) / 2) / (spread * math.sqrt(2 * math.pi))
        return Series(name, at.tolist(), np.where(values <= top, values, np.nan).tolist(), tone=tone, dashed=True)

    middles = ((edges[1:] + edges[:-1]) / 2).tolist()
    series = [Series("scores measured", middles, measured, [0.0] * BINS, measured)]
    series.append(normal("normal, with the measured spread", scores.std(), "ink"))
    if expected > 0:
        series.append(normal("normal, with the expected spread", expected, 1))
    axes = Axis("score minus its row’s mean"), Axis("density", range=(0.0, top))
    notice = (
        f"Head {head} of {layer.name}, which has the widest spread of its layer, in the first sequence: spread "
        f"{number(scores.std())}; for independent queries and keys of the same norms it would be {number(expected)}."
    )
    return Chart(tuple(series), *axes, notice)
