"""Reports of training runs: of a monitor's log, and of the demo's two runs side by side."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from attnscale.checking import Checked
from attnscale.diagnose.scores import EXPLODING
from attnscale.lab.demo import Twins
from attnscale.measure.statistics import STATISTICS, Place, Statistic
from attnscale.plain import counted
from attnscale.show.page import Axis, Chart, Figure, Page, Section, Series, known_values, mean, render, ticks
from attnscale.show.report.check import CRITICAL_SPREAD, meanings, note_of, words_of_models
from attnscale.show.report.heads import (
    critical_spread_over,
    critical_spreads,
    head_map,
    mapped,
    record_of,
    score_histograms,
    spreads_of,
)
from attnscale.show.run import conclusion
from attnscale.show.tables import layer_table, run_table
from attnscale.show.text import number, place, shown
from attnscale.train.record import Record
from attnscale.train.run import LayerRun, Run, summarise

CURVES = 6  # layers that get their own curve; more could not be distinguished
MOST_MARKED = 40  # curves with more points have no marks
FORECAST = 25  # steps of the curve of a forecast
MARGIN = 1.02  # height of an axis over the highest value, so that a curve there is visible
SAME = 0.9  # forecasts are drawn only if softmax receives at least this share of the largest score
LOG_LARGEST = 700.0  # exp of more overflows a float
LIMITS_SHOWN_TO = 1.5  # shows published limits up to this multiple of the highest score


def run_page(title: str, records: Sequence[Record], run: Run | None = None) -> str:
    """Return the report of a run as a string: `records` in order of steps, at least one."""
    return render(run_report(title, records, run))


def run_report(title: str, records: Sequence[Record], run: Run | None = None) -> Page:
    """Return the report of a run as a Page; pass its summary as `run` if `records` are thinned."""
    run = summarise(records) if run is None else run
    notes = tuple(note_of(one.group, f"{place(one.group)} · {one.when}") for one in run.raised)
    last, verdict = records[-1].layers, conclusion(run)
    curves, spreads = layers_over_run("run-curves", records, run), spreads_of(last)
    sections = [Section("run", "Over the run", ((curves,),))]
    if (learned := _learning(records)) is not None:
        spread = STATISTICS["spread"].long
        beside = Figure("spread-curves", {spread: curves.views[spread]})
        sections.append(Section("learning", "Loss and spread", ((learned, beside),)))
    sections.append(Section("layers", "Layer by layer", (run_table(run),)))
    at_end = f"at step {run.last_step}"
    if spreads:
        figure = critical_spreads("critical-spread", spreads)
        sections.append(Section("spreads", f"Spread and critical spread, {at_end}", ((figure,),)))
    heads = head_map("head-map", last)
    sections += [Section("heads", f"Head by head, {at_end}", ((heads,),)), _method(run, records)]
    start = verdict[:1].upper() + verdict[1:]
    return Page("attnscale watch-log", title, start, run.worst or "fine", notes, tuple(sections))


def _method(run: Run, records: Sequence[Record]) -> Section:
    rows = {layer.rows for record in records for layer in record.layers.values()}
    per_layer = f"{min(rows)}" if len(rows) == 1 else f"{min(rows, default=0)} to {max(rows, default=0)}"
    text = (
        f"{run.records} records of the steps {run.first_step} to {run.last_step}; each measured {per_layer} rows of a "
        f"layer, counted over all heads, on {counted(max(record.ranks for record in records), 'rank')}."
    )
    if len(records) < run.records:
        text += f" Curves show {len(records)} of the records, including every record with an alarm."
    if run.damaged:
        text += f" {counted(run.damaged, 'damaged line')} skipped."
    if bounds := known_values(layer.whole("max_bound") for layer in records[-1].layers.values()):
        text += f" At the last step no score exceeds {max(bounds):.4g}."
    forecast = (
        "Growth is the slope of a Theil–Sen line through the logarithm of the largest score above its row's mean, over "
        "the latest records. A forecast continues it, damped, for at most eight records and at most half the number "
        "of records. Its band is a 90% interval: from growth that ends now to growth that continues. Growth may end at "
        "any time, so a forecast gives the earliest step at which a threshold may be passed, and no latest step."
    )
    if not spreads_of(records[-1].layers):
        forecast += " These records lack the number of keys per row, so no critical spread is drawn."
    if all(record.loss is None and record.lr is None for record in records):
        forecast += " They contain no loss: pass it as Monitor.step(loss=…, lr=…); the callbacks do this."
    words = meanings(Place.RUN | Place.MAP) | CRITICAL_SPREAD
    return Section("method", "How it was measured", (text, forecast, words))


def _learning(records: Sequence[Record]) -> Figure | None:
    """Return the figure of the loss and the learning rate; None if the records have neither."""
    courses = {
        "loss": [(record.step, record.loss) for record in records if record.loss is not None],
        "learning rate": [(record.step, record.lr) for record in records if record.lr is not None],
    }
    views = {title: loss_chart(title, {title: course}) for title, course in courses.items() if course}
    return Figure("loss-curves", dict(views)) if views else None


def loss_chart(title: str, runs: dict[str, Sequence[tuple[int, float]]]) -> Chart:
    """Return a chart with the curve of each run."""
    series, sentences = [], []
    for tone, (name, course) in enumerate(runs.items()):
        steps, values = [step for step, _ in course], [value for _, value in course]
        series.append(Series(name, steps, values, tone=tone, marks=len(steps) <= MOST_MARKED))
        known = [(value, step) for step, value in course if math.isfinite(value)]
        subject = f"The {title}" if len(runs) == 1 else f"{name}: the {title}"
        if known:
            (first, start), (last, end), (lowest, at) = known[0], known[-1], min(known)
            sentences.append(
                f"{subject} went from {number(first)} at step {start} to {number(last)} at step {end}; lowest "
                f"{number(lowest)} at step {at}."
            )
        if (broken := next((step for step, value in course if not math.isfinite(value)), None)) is not None:
            sentences.append(f"{subject} was not a number at step {broken}.")
    return Chart(tuple(series), Axis("step"), Axis(title), " ".join(sentences))


def layers_over_run(name: str, records: Sequence[Record], run: Run) -> Figure:
    """Return the figure of every statistic over the steps: the main layers, the range of all layers, and forecasts."""
    matter = sorted(run.layers, key=_importance)[:CURVES]
    chosen = [layer for layer in run.layers if layer in matter]
    views = {}
    for statistic in mapped():
        series = list(_curves(records, statistic, chosen))
        if len(run.layers) > CURVES:
            band = _band(f"all {len(run.layers)} layers, lowest to highest", records, statistic, "ink")
            series.insert(0, replace(band, y=()))
        notice = _change_notice(statistic, records)
        if statistic.name == "max":
            series += _forecasts(chosen)
            series += _thresholds(series)
            notice = _growth_notice(run)
        if statistic.name == "spread":
            series += _critical_spreads(records)
        views[statistic.long] = Chart(tuple(series), Axis("step"), axis_of(statistic, series), notice)
    first = STATISTICS["max"].long
    return Figure(name, {first: views.pop(first), **views})


def runs_over_time(name: str, runs: Sequence[tuple[str, Sequence[Record]]]) -> Figure:
    """Return the figure of every statistic of every run: the mean over layers, in a band from lowest to highest."""
    views = {}
    for statistic in mapped():
        series, ends = [], []
        for tone, (run, records) in enumerate(runs):
            series.append(_band(run, records, statistic, tone))
            known = known_values(series[-1].y)
            ends += [f"{run}: {number(known[0])} at first, {number(known[-1])} at the end"] if known else []
        notice = f"Mean of the layers. {'; '.join(ends)}."
        views[statistic.long] = Chart(tuple(series), Axis("step"), axis_of(statistic, series), notice)
    return Figure(name, views)


def _band(name: str, records: Sequence[Record], statistic: Statistic, tone: int | str) -> Series:
    values = [
        known_values(statistic.factor * layer.whole(statistic.name) for layer in record.layers.values())
        for record in records
    ]
    low, high = ([edge(found, default=math.nan) for found in values] for edge in (min, max))
    steps = [record.step for record in records]
    return Series(name, steps, list(map(mean, values)), low, high, tone=tone, marks=len(steps) <= MOST_MARKED)


def axis_of(statistic: Statistic, series: Sequence[Series]) -> Axis:
    """Return an axis for a statistic: its whole range if bounded, else logarithmic if all values are positive."""
    if statistic.highest is not None:
        return Axis(statistic.long, range=(0.0, MARGIN * statistic.factor * statistic.highest))
    values = [value for one in series for value in (*one.y, *one.low) if value is not None]
    return Axis(statistic.long, log=all(value > 0 for value in values))


def _importance(layer: LayerRun) -> tuple[float, float]:
    crossing = math.inf if layer.crossing is None else layer.crossing.step
    return crossing, -layer.last_max if math.isfinite(layer.last_max) else 0.0


def _curves(records: Sequence[Record], statistic: Statistic, chosen: Sequence[LayerRun]) -> Iterator[Series]:
    for tone, (layer, label) in enumerate(_labelled(chosen)):
        own = [record for record in records if layer.name in record.layers]
        values = [statistic.factor * record.layers[layer.name].whole(statistic.name) for record in own]
        steps = [record.step for record in own]
        yield Series(label, steps, values, tone=tone, marks=len(own) <= MOST_MARKED)


def _labelled(chosen: Sequence[LayerRun]) -> Iterator[tuple[LayerRun, str]]:
    """Yield each layer with its entry in the legend: `layer 3` if its number is unique, else its name."""
    names = [layer.name for layer in chosen]
    for layer, tick in zip(chosen, ticks(names), strict=True):
        yield layer, tick if tick == layer.name else f"layer {tick}"


def _forecasts(chosen: Sequence[LayerRun]) -> Iterator[Series]:
    for tone, (layer, label) in enumerate(_labelled(chosen)):
        growth = layer.growth
        if growth is None or layer.crossing is None or not layer.effective_max >= SAME * layer.last_max:
            continue
        points = [growth.horizon * point / FORECAST for point in range(FORECAST + 1)]
        y, low, high = (
            [math.exp(min(logarithm(steps), LOG_LARGEST)) for steps in points]
            for logarithm in (growth.likely, growth.lowest, growth.highest)
        )
        x, name = [growth.step + steps for steps in points], f"{label}: forecast, 90% interval"
        yield Series(name, x, y, low, high, tone=tone, dashed=True)


def _thresholds(series: Sequence[Series]) -> list[Series]:
    """Return lines at the published limits of scores that the curves come near."""
    steps = [x for one in series for x in one.x if x is not None]
    highest = max(known_values(value for one in series for value in (*one.y, *one.high)), default=0.0)
    levels = sorted(level for level, _, _ in EXPLODING if level <= LIMITS_SHOWN_TO * highest)
    ends = (min(steps), max(steps)) if steps else ()
    return [
        Series(f"published limit {level:,.0f}", ends, [level] * len(ends), tone="ink", dashed=True) for level in levels
    ]


def _critical_spreads(records: Sequence[Record]) -> Iterable[Series]:
    """Yield the critical spread for the fewest keys that the rows of a layer see."""
    keys = {record.step: known_values(layer.keys for layer in record.layers.values()) for record in records}
    known = {step: min(found) for step, found in keys.items() if found}
    if known:
        points = [critical_spread_over(fewest) for fewest in known.values()]
        yield Series("critical spread √(2 ln n)", list(known), points, tone="ink", dashed=True)


def _growth_notice(run: Run) -> str:
    growing = [(layer.growth, layer) for layer in run.layers if layer.growth is not None and layer.growth.is_growing]
    if not growing and len(run.layers) == 1:
        return "The largest score does not grow by more than its error."
    if not growing:
        return f"The largest score grows by more than its error in none of the {len(run.layers)} layers."
    growth, first = max(growing, key=lambda found: found[0].rate)
    return (
        f"The largest score grows in {len(growing)} of {len(run.layers)} layers; fastest in {first.name}, "
        f"× {growth.factor:.3g} in the last {growth.observed:,.0f} steps, to {number(first.last_max)}."
    )


def _change_notice(statistic: Statistic, records: Sequence[Record]) -> str:
    first, last = (statistic.factor * record.whole(statistic.name) for record in (records[0], records[-1]))
    return f"Over all layers the mean {statistic.long} went from {number(first)} to {number(last)}."


def twins_page(twins: Twins) -> str:
    """Return the report of training runs side by side as a string."""
    return render(twins_report(twins))


def twins_report(twins: Twins) -> Page:
    """Return the report of training runs side by side as a Page; omits parts that no run has."""
    return Page("attnscale demo", twins.title, twins.verdict, "note", (), tuple(_sections(twins)), twins.explanation)


def _sections(twins: Twins) -> Iterator[Section]:
    if losses := {run.name: run.losses for run in twins.runs if run.losses}:
        yield Section("learning", "Loss", ((Figure("losses", {"loss": loss_chart("loss", dict(losses))}),),))
    if shares := [(run.name, run.received) for run in twins.runs if run.received]:
        yield Section("received", "How queries share the gradient, before the first step", ((_shares(shares),),))
    if recorded := [(run.name, run.records) for run in twins.runs if run.records]:
        yield Section("run", "Attention during training", ((runs_over_time("run-curves", recorded),),))
    if audits := [(run.name, run.audit) for run in twins.runs if run.audit is not None]:
        maps, histograms = [], []
        for at, (name, audit) in enumerate(audits):
            records = {layer: record_of(own) for layer, own in audit.layers.items()}
            stats = [own.stats for own in audit.layers.values()]
            maps.append(replace(head_map(f"head-map-{at}", records, stats), caption=name))
            if (histogram := score_histograms(f"score-histograms-{at}", audit.layers)) is not None:
                histograms.append(replace(histogram, caption=name))
        yield Section("heads", "Head by head, at the end", (tuple(maps),))
        if histograms:
            yield Section("scores", "Distribution of the scores, at the end", (tuple(histograms),))
        tables = [layer_table(Checked(name, "", "", None, (), audit).lines, name) for name, audit in audits]
        yield Section("layers", "Layer by layer, at the end", tuple(tables))
    settings = {name: shown(value) for name, value in twins.settings.items()}
    yield Section("method", "How it was measured", (settings, words_of_models()))


def _shares(runs: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> Figure:
    """Return the cumulative share of the gradient over queries, smallest gradient first."""
    lines = (
        Series(name, [x for x, _ in curve], [y for _, y in curve], tone=tone, marks=True)
        for tone, (name, curve) in enumerate(runs)
    )
    even = Series("equal shares", (0.0, 1.0), (0.0, 1.0), tone="ink", dashed=True)
    notice = "The lower a line, the less evenly queries share the gradient. A share does not show the gradient's size."
    axes = Axis("share of the queries, smallest gradient first"), Axis("share of the gradient", range=(0.0, 1.0))
    return Figure("shares", {"": Chart((*lines, even), *axes, notice)})
