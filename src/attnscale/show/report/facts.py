"""What is worth knowing where little or nothing is wrong: the extremes, as numbers say them."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from attnscale.diagnose.scores import EXPLODING
from attnscale.show.numbers import number
from attnscale.show.report.freezing import spread_of
from attnscale.show.report.parts import Note
from attnscale.train.run import Run
from attnscale.watching import Layer

LEAST = EXPLODING[-1]  # the first score that is known to matter


def facts_of_layers(layers: Mapping[str, Layer]) -> Iterator[Note]:
    """The widest spread beside its freezing point, the least gradient that passes, the largest score."""
    seen = {name: layer for name, layer in layers.items() if torch.isfinite(layer.stats.std_within_rows).any()}
    if not seen:
        return
    name, head, spread = _extreme({name: layer.stats.std_within_rows for name, layer in seen.items()})
    one = spread_of(seen[name])
    yield Note(
        "fact", "spread",
        f"The scores spread widest by {number(spread)}; over the {one.keys:.0f} keys that a row of this layer sees on "
        f"average, softmax freezes at {number(one.freezes)}.",
        place=f"{name}, head {head}",
    )  # fmt: skip
    name, head, gain = _extreme({name: -layer.stats.gradient_gain for name, layer in seen.items()})
    yield Note(
        "fact", "gradient", f"The least that a softmax lets through of its gradient is {-gain:.2f} (1 − Σp²).",
        place=f"{name}, head {head}",
    )  # fmt: skip
    name, head, largest = _extreme({name: layer.stats.max for name, layer in seen.items()})
    yield Note("fact", "largest score", _largest(largest), place=f"{name}, head {head}")


def facts_of_run(run: Run) -> Iterator[Note]:
    """The fastest growth, the largest score, the least entropy."""
    growing = [layer for layer in run.layers if layer.growth is not None]
    if growing:
        fastest = max(growing, key=lambda layer: layer.growth.rate if layer.growth else 0.0)
        assert fastest.growth is not None
        now = "still grows" if fastest.growth.recent_rate > 0 else "does not grow any more"
        yield Note(
            "fact", "growth",
            f"The largest score that grew fastest was multiplied by {number(fastest.growth.grown)} in the last "
            f"{fastest.growth.span:,.0f} steps, and {now}.",
            place=fastest.name,
        )  # fmt: skip
    if not run.layers:
        return
    highest = max(run.layers, key=lambda layer: _or(layer.highest, -math.inf))
    if math.isfinite(highest.highest):
        yield Note("fact", "largest score", _largest(highest.highest), place=highest.name)
    entropies = {layer.name: layer.numbers.get("entropy_ratio", math.nan) for layer in run.layers}
    name, lowest = min(entropies.items(), key=lambda entry: _or(entry[1], math.inf))
    if math.isfinite(lowest):
        yield Note("fact", "entropy", f"The least mean entropy at the last record is {lowest:.2f} of ln n.", place=name)


def _or(value: float, otherwise: float) -> float:
    return otherwise if math.isnan(value) else value


def _largest(score: float) -> str:
    limit, _, known = LEAST
    return f"The largest score is {number(score)}{f'; {known}' if score < limit else ''}."


def _extreme(values: Mapping[str, Tensor]) -> tuple[str, int, float]:
    """The layer, the head and the value of the highest."""
    highest = {name: found.double().nan_to_num(-torch.inf, posinf=-torch.inf).max(0) for name, found in values.items()}
    name = max(highest, key=lambda name: float(highest[name].values))
    return name, int(highest[name].indices), float(highest[name].values)
