"""The spread of the scores beside √(2 ln n), where softmax over n keys freezes."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attnscale.show.numbers import number
from attnscale.show.report.figures import Axis, Chart, Figure, Series
from attnscale.show.report.names import ticks
from attnscale.theory.limits import freezing_point
from attnscale.train.record import Record
from attnscale.watching import Layer

SAME = 1.02  # times another freezing point: one line stands for both
BEYOND = 4  # times the longest row: as far as the curve is drawn


@dataclass(frozen=True)
class Spread:
    """One layer: the spread of its heads, and the keys that their rows see."""

    name: str
    heads: Tensor
    keys: float  # that a row sees, on average
    longest: int

    @property
    def mean(self) -> float:
        """Of the heads."""
        return float(self.heads.nanmean())

    @property
    def frozen(self) -> int:
        """Heads that spread beyond the freezing point of the keys they see on average."""
        return int((self.heads > self.freezes).sum())

    @property
    def freezes(self) -> float:
        """√(2 ln n)."""
        return freezes_over(self.keys)


def freezes_over(keys: float) -> float:
    """Where softmax freezes over so many keys on average."""
    return freezing_point(max(1, round(keys)))


def freezes_at(points: Iterable[float]) -> str:
    """What a line at the least of these freezing points is called: those of sampled rows differ by little."""
    seen = list(points)
    return f"{'' if max(seen) <= SAME * min(seen) else 'least '}√(2 ln n): softmax freezes"


def spread_of(layer: Layer) -> Spread:
    """The spread of a layer's heads."""
    keys = float(layer.stats.keys.double().nanmean())
    heads = layer.stats.std_within_rows.double().cpu()
    return Spread(layer.name, heads, keys if math.isfinite(keys) else 1.0, max(layer.key_len, 1))


def spreads_of(record: Record) -> list[Spread]:
    """Those of a record, of the layers whose keys it knows; which row is the longest it does not."""
    return [
        Spread(name, torch.tensor(layer.numbers["spread"], dtype=torch.float64), layer.keys, max(1, round(layer.keys)))
        for name, layer in record.layers.items()
        if layer.keys is not None and "spread" in layer.numbers
    ]


def freezing(name: str, layers: Mapping[str, Layer]) -> Figure:
    """By layer, and by the number of keys."""
    return freezing_of(name, [spread_of(layer) for layer in layers.values()])


def freezing_of(name: str, spreads: list[Spread]) -> Figure:
    """Of layers whose spreads are known; at least one."""
    notice = _notice(spreads)
    return Figure(name, {"by layer": _by_layer(spreads, notice), "by keys": _by_keys(spreads, notice)}, "Spread")


def _by_layer(spreads: list[Spread], notice: str) -> Chart:
    x = list(range(len(spreads)))
    names = tuple(spread.name for spread in spreads)
    heads = [_finite(spread.heads) for spread in spreads]
    measured = Series(
        "mean of its heads, lowest to highest",
        x,
        [spread.mean for spread in spreads],
        [min(values, default=None) for values in heads],
        [max(values, default=None) for values in heads],
        mode="points" if len(x) == 1 else "both",
        points=names,
    )
    across = x if len(x) > 1 else [-0.5, 0.5]  # one layer: a line through its place, and not a point
    spanning = spreads if len(x) > 1 else spreads * 2
    freezes = [one.freezes for one in spanning], [freezing_point(one.longest) for one in spanning]
    average = Series("√(2 ln n), n keys seen on average", across, freezes[0], tone="ink", mode="steps")
    longest = Series("√(2 ln n) of the longest row", across, freezes[1], tone="ink", mode="steps", dashed=True)
    return Chart(
        (measured, average, *([longest] if freezes[0] != freezes[1] else [])),
        Axis("layer", ticks=ticks(names)),
        Axis("spread of the scores", range=(0.0, 1.1 * _top(spreads))),
        notice,
    )


def _by_keys(spreads: list[Spread], notice: str) -> Chart:
    most = BEYOND * max(spread.longest for spread in spreads)
    keys = sorted({round(2 * (most / 2) ** (step / 60)) for step in range(61)})
    seen = [max(spread.keys, 1.0) for spread in spreads]
    return Chart(
        (
            Series("√(2 ln n): softmax freezes", keys, [freezing_point(n) for n in keys], tone="ink"),
            Series(
                "layers, at the keys a row sees on average",
                seen,
                [spread.mean for spread in spreads],
                mode="points",
                points=tuple(spread.name for spread in spreads),
            ),
        ),
        Axis("keys n", log=True),
        Axis("spread of the scores", range=(0.0, 1.1 * max(_top(spreads), freezing_point(most)))),
        notice,
    )


def _notice(spreads: list[Spread]) -> str:
    heads, frozen = sum(len(spread.heads) for spread in spreads), sum(spread.frozen for spread in spreads)
    known = [spread for spread in spreads if math.isfinite(spread.mean) and spread.freezes > 0]
    if not known:
        return "No layer has a spread that is a number."
    nearest = max(known, key=lambda spread: spread.mean / spread.freezes)
    where = "furthest past it" if nearest.mean > nearest.freezes else "nearest to it"
    return (
        f"{frozen} of {heads} heads spread beyond the freezing point of the keys they see; the layer {where} is "
        f"{nearest.name}: {number(nearest.mean)} over {nearest.keys:.0f} keys, where softmax freezes at "
        f"{number(nearest.freezes)}."
    )


def _top(spreads: list[Spread]) -> float:
    values = [value for spread in spreads for value in (*_finite(spread.heads), freezing_point(spread.longest))]
    return max(values, default=1.0) or 1.0


def _finite(values: Tensor) -> list[float]:
    found: list[float] = values[torch.isfinite(values)].tolist()
    return found
