"""The report of training runs side by side."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from attnscale.checking import Checked
from attnscale.lab.demo import Twins
from attnscale.measure.statistics import STATISTICS
from attnscale.show.figures import Axis, Chart, Figure, Heat, Series
from attnscale.show.page import Note, Page, Section, Terms, render
from attnscale.show.report.check import table_of, words_of_models
from attnscale.show.report.heads import map_of_layers
from attnscale.show.report.run import loss_chart, runs_over_time
from attnscale.show.report.spread import critical_spreads, densities, spread_of
from attnscale.show.text import formatted, shown


def twins_page(twins: Twins) -> str:
    """Return the report of training runs side by side as a string."""
    return render(twins_report(twins))


def twins_report(twins: Twins) -> Page:
    """Return training runs side by side, as a report; parts that no run has are left out."""
    notes = tuple(_notes(twins))
    return Page("attnscale demo", twins.title, twins.verdict, "note", notes, tuple(_sections(twins)), twins.explanation)


def _notes(twins: Twins) -> Iterator[Note]:
    statistic = STATISTICS["jacobian_trace"]
    told = []
    for run in twins.runs:
        ends = [formatted(statistic, record.whole(statistic.name)) for record in (*run.records[:1], *run.records[-1:])]
        told += [f"{run.name}: {ends[0]} at the first record, {ends[-1]} at the last"] if ends else []
    if told:
        yield Note("fact", statistic.long, f"{'; '.join(told)}.", place="mean of the layers")


def _sections(twins: Twins) -> Iterator[Section]:
    if losses := {run.name: run.losses for run in twins.runs if run.losses}:
        yield Section("learning", "Learning", ((Figure("losses", {"loss": loss_chart("loss", dict(losses))}),),))
    if shares := [(run.name, run.received) for run in twins.runs if run.received]:
        yield Section("received", "How queries share the gradient, before the first step", ((_shares(shares),),))
    if recorded := [(run.name, run.records) for run in twins.runs if run.records]:
        yield Section("run", "Attention during training", ((runs_over_time("run-curves", recorded),),))
    audits = [(run.name, run.audit) for run in twins.runs if run.audit is not None]
    layers = [(name, audit.layers) for name, audit in audits]
    maps = [replace(map_of_layers(f"heads-{at}", one), caption=name) for at, (name, one) in enumerate(layers)]
    yield from _side_by_side("heads", "Head by head, at the end", _on_one_scale(maps))
    scores = [(name, densities(f"densities-{at}", one)) for at, (name, one) in enumerate(layers)]
    found = [replace(figure, caption=name) for name, figure in scores if figure is not None]
    yield from _side_by_side("scores", "The scores, at the end", found)
    spreads = [
        replace(critical_spreads(f"critical-spread-{at}", list(map(spread_of, one.values()))), caption=name)
        for at, (name, one) in enumerate(layers)
        if one
    ]
    yield from _side_by_side("critical-spread", "Spread and critical spread, at the end", spreads)
    if audits:
        tables = [table_of(Checked(name, "", "", None, (), audit).lines, name) for name, audit in audits]
        yield Section("layers", "Layer by layer, at the end", tuple(tables))
    settings = Terms({name: shown(value) for name, value in twins.settings.items()})
    yield Section("method", "How it was measured", (settings, words_of_models()))


def _shares(runs: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> Figure:
    """Return the share of the gradient that the queries with the smallest gradients receive together."""
    lines = (
        Series(name, [x for x, _ in curve], [y for _, y in curve], mode="both", tone=tone)
        for tone, (name, curve) in enumerate(runs)
    )
    even = Series("equal shares", (0.0, 1.0), (0.0, 1.0), tone="ink", dashed=True)
    notice = "The lower a line runs, the less evenly queries share the gradient. A share says nothing of its size."
    axes = Axis("share of the queries, smallest gradient first"), Axis("share of the gradient", range=(0.0, 1.0))
    return Figure("shares", {"": Chart((*lines, even), *axes, notice)})


def _on_one_scale(figures: list[Figure]) -> list[Figure]:
    """Give the same colours to the same values in all of them; a logarithm serves all or none."""
    heats = [[view for view in figure.views.values() if isinstance(view, Heat)] for figure in figures]
    same = [
        (min(heat.low for heat in views), max(heat.high for heat in views), any(heat.log for heat in views))
        for views in zip(*heats, strict=True)
    ]
    return [
        replace(
            figure,
            views={
                title: replace(heat, low=low, high=high, log=log and low > 0)
                for title, heat, (low, high, log) in zip(figure.views, views, same, strict=True)
            },
        )
        for figure, views in zip(figures, heats, strict=True)
    ]


def _side_by_side(name: str, title: str, figures: list[Figure]) -> Iterator[Section]:
    """Yield figures side by side, all switched by the first where they have the same views."""
    if figures:
        first = figures[0]
        followers = (
            replace(figure, follows=first.name) if list(figure.views) == list(first.views) else figure
            for figure in figures[1:]
        )
        yield Section(name, title, ((first, *followers),))
