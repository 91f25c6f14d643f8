"""How the numbers of a run moved: layer by layer with a forecast, and as the course of several runs side by side."""

import math
from collections.abc import Callable, Iterable, Sequence

from attnscale.diagnose.forecast import Outlook
from attnscale.diagnose.scores import EXPLODING
from attnscale.measure.statistics import STATISTICS, Statistic
from attnscale.show.numbers import number
from attnscale.show.report.figures import Axis, Chart, Figure, Number, Series, short
from attnscale.show.report.freezing import freezes_at, freezes_over
from attnscale.show.report.heads import mapped
from attnscale.show.report.names import legend
from attnscale.train.record import Record
from attnscale.train.run import LayerRun, Run

CURVES = 6  # layers with a curve of their own: more could not be told apart
POINTS = 300  # of a curve
FORECAST = 25  # points of a forecast
MARGIN = 1.02  # of an axis, so that a curve at its end is seen
SAME = 0.9  # of the largest score: where softmax feels less of it, the curve is not the one that is forecast
LOG_LARGEST = 700.0  # of a number that a float holds
BEYOND = 1.5  # times the highest score: limits up to there are shown
Reduce = Callable[[Sequence[float]], float]


def layers_over_run(name: str, records: Sequence[Record], run: Run) -> Figure:
    """Every statistic over the steps: the layers that matter, the range of all, where the largest score is going."""
    chosen = sorted(run.layers, key=_matters)[:CURVES]
    chosen = [layer for layer in run.layers if layer in chosen]
    views = {}
    for statistic in mapped():
        series = [*_range(records, statistic, len(run.layers)), *_curves(records, statistic, chosen)]
        if statistic.name == "max":
            series += _forecasts(chosen)
            series += _thresholds(series)
        if statistic.name == "spread":
            series += _freezes(records)
        notice = _growth_notice(run) if statistic.name == "max" else _change_notice(statistic, records)
        views[statistic.long] = Chart(tuple(series), Axis("step"), _axis(statistic, series), notice)
    first = STATISTICS["max"].long
    return Figure(name, {first: views.pop(first), **views})


def runs_over_time(name: str, runs: Sequence[tuple[str, Sequence[Record]]]) -> Figure:
    """Every statistic of every run: the mean of its layers, from the lowest to the highest."""
    views = {}
    for statistic in mapped():
        series, ends = [], []
        for tone, (run, records) in enumerate(runs):
            layers = [[record.layers[layer].whole(statistic.name) for layer in record.layers] for record in records]
            steps = [record.step for record in records]
            mean = [_mean(values) for values in layers]
            low, high = ([edge(_known(values), default=math.nan) for values in layers] for edge in (min, max))
            series.append(thinned(Series(run, steps, mean, low, high, tone=tone, mode="both")))
            known = [value for value in mean if math.isfinite(value)]
            ends += [f"{run}: {number(known[0])} at first, {number(known[-1])} at the end"] if known else []
        axis, notice = _axis(statistic, series), f"Mean of the layers. {'; '.join(ends)}."
        views[statistic.long] = Chart(tuple(series), Axis("step"), axis, notice)
    return Figure(name, views)


def learning_curves(name: str, runs: Sequence[tuple[str, Sequence[tuple[int, float]]]]) -> Figure:
    """The loss of every run; where steps are many, the mean of neighbours, from their lowest to their highest."""
    series, ends = [], []
    for tone, (run, losses) in enumerate(runs):
        steps, values = [step for step, _ in losses], [loss for _, loss in losses]
        series.append(thinned(Series(run, steps, values, values, values, tone=tone)))
        known = [(step, loss) for step, loss in losses if math.isfinite(loss)]
        ends += [f"{run}: from {known[0][1]:.3f} to {known[-1][1]:.3f} in {known[-1][0]} steps"] if known else []
        broken = next((step for step, loss in losses if not math.isfinite(loss)), None)
        ends += [] if broken is None else [f"{run}: not a number at step {broken}"]
    return Figure(name, {"loss": Chart(tuple(series), Axis("step"), Axis("loss"), f"{'; '.join(ends)}.")})


def _axis(statistic: Statistic, series: Sequence[Series]) -> Axis:
    """All of its range where that ends, else a logarithm where values and bands allow one."""
    if statistic.highest is not None:
        return Axis(statistic.long, range=(0.0, MARGIN * statistic.highest))
    values = [value for one in series for value in (*one.y, *one.low) if value is not None]
    return Axis(statistic.long, log=all(value > 0 for value in values))


def _matters(layer: LayerRun) -> tuple[float, float]:
    """The first to pass a threshold first, then by the largest score."""
    crossing = math.inf if layer.crossing is None else layer.crossing.step
    return crossing, -layer.last_max if math.isfinite(layer.last_max) else 0.0


def _curves(records: Sequence[Record], statistic: Statistic, chosen: Sequence[LayerRun]) -> Iterable[Series]:
    labels = legend(layer.name for layer in chosen)
    for tone, layer in enumerate(chosen):
        seen = [record for record in records if layer.name in record.layers]
        values = [record.layers[layer.name].whole(statistic.name) for record in seen]
        steps = [record.step for record in seen]
        mode = "both" if len(steps) <= 40 else "lines"
        series = Series(short(labels[layer.name]), steps, values, tone=tone, mode=mode)
        yield thinned(series, max if statistic.heads == "max" else _mean)


def _range(records: Sequence[Record], statistic: Statistic, layers: int) -> list[Series]:
    if layers <= CURVES:
        return []
    values = [[layer.whole(statistic.name) for layer in record.layers.values()] for record in records]
    low, high = ([edge(_known(found), default=math.nan) for found in values] for edge in (min, max))
    steps = [record.step for record in records]
    return [thinned(Series(f"all {layers} layers, lowest to highest", steps, low=low, high=high, tone="ink"))]


def _forecasts(chosen: Sequence[LayerRun]) -> Iterable[Series]:
    labels = legend(layer.name for layer in chosen)
    for tone, layer in enumerate(chosen):
        if layer.ahead is not None and layer.crossing is not None and layer.felt >= SAME * layer.last_max:
            yield _forecast(f"{short(labels[layer.name])}: if it goes on, 90% interval", layer.ahead, tone)


def _forecast(name: str, ahead: Outlook, tone: int) -> Series:
    """As far as the samples bear."""
    points = [ahead.horizon * point / FORECAST for point in range(FORECAST + 1)]
    return Series(
        name,
        [ahead.step + steps for steps in points],
        [math.exp(min(ahead.likely(steps), LOG_LARGEST)) for steps in points],
        [math.exp(min(ahead.lowest(steps), LOG_LARGEST)) for steps in points],
        [math.exp(min(ahead.highest(steps), LOG_LARGEST)) for steps in points],
        tone=tone,
        dashed=True,
    )


def _thresholds(series: Sequence[Series]) -> list[Series]:
    """The scores with a published meaning, as far as the curves reach."""
    steps = [x for one in series for x in one.x if x is not None]
    highest = max((value for one in series for value in (*one.y, *one.high) if value is not None), default=0.0)
    levels = sorted(level for level, _, _ in EXPLODING if level <= BEYOND * highest)
    if not levels or not steps:
        return []
    name = f"{', '.join(f'{level:,.0f}' for level in levels)}: published {'limits' if len(levels) > 1 else 'limit'}"
    x = [*(min(steps), max(steps), None)] * len(levels)
    return [Series(name, x, [value for level in levels for value in (level, level, None)], tone="ink", dashed=True)]


def _freezes(records: Sequence[Record]) -> list[Series]:
    """Where softmax freezes over the keys that rows see, of the layer whose rows see fewest."""
    keys = {record.step: [layer.keys for layer in record.layers.values() if layer.keys] for record in records}
    points = {step: [freezes_over(n) for n in {*known}] for step, known in keys.items() if known}
    if not points:
        return []
    name = freezes_at(point for known in points.values() for point in known)
    return [
        thinned(Series(name, list(points), [min(known) for known in points.values()], tone="ink", dashed=True), min)
    ]


def _growth_notice(run: Run) -> str:
    growing = [layer for layer in run.layers if layer.growth is not None and layer.growth.is_growing]
    if not growing and len(run.layers) == 1:
        return "Its largest score is not certain to grow."
    if not growing:
        return f"Of {len(run.layers)} layers, none has a largest score that is certain to grow."
    first = max(growing, key=lambda layer: layer.growth.rate if layer.growth else 0.0)
    assert first.growth is not None  # it is growing
    return (
        f"{len(growing)} of {len(run.layers)} layers grow for certain; fastest {first.name}, × "
        f"{first.growth.grown:.3g} over the last {first.growth.span:,.0f} steps, now at "
        f"{number(first.last_max)}."
    )


def _change_notice(statistic: Statistic, records: Sequence[Record]) -> str:
    first, last = (record.whole(statistic.name) for record in (records[0], records[-1]))
    return f"Over all layers the mean {statistic.long} went from {number(first)} to {number(last)}."


def thinned(series: Series, reduce: Reduce | None = None) -> Series:
    """At most POINTS points, each for several neighbours; without what is not a number."""
    reduce = reduce or _mean
    kept = [index for index, x in enumerate(series.x) if _is_known(series, index)]
    size = max(1, math.ceil(len(kept) / POINTS))
    buckets = [kept[start : start + size] for start in range(0, len(kept), size)]

    def of(values: Sequence[Number], how: Reduce) -> list[Number]:
        return [how([float(values[index] or 0.0) for index in bucket]) for bucket in buckets] if values else []

    low, high = of(series.low, min), of(series.high, max)
    is_band = any(one != other for one, other in zip(low, high, strict=True))
    return Series(
        series.name,
        [series.x[bucket[0]] for bucket in buckets],
        of(series.y, reduce),
        low if is_band else (),
        high if is_band else (),
        series.mode,
        series.tone,
        series.dashed,
    )


def _is_known(series: Series, index: int) -> bool:
    columns = (values[index] for values in (series.y, series.low, series.high) if values)
    return all(value is not None and math.isfinite(value) for value in columns)


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _mean(values: Iterable[float]) -> float:
    known = _known(values)
    return math.fsum(known) / len(known) if known else math.nan
