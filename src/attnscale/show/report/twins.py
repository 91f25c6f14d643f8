"""The report of training runs side by side."""

from collections.abc import Iterator
from dataclasses import replace

from attnscale.checking import Checked
from attnscale.lab.demo import TwinRun, Twins
from attnscale.measure.statistics import STATISTICS, Statistic
from attnscale.show.numbers import formatted, number, shown
from attnscale.show.report.check import table_of
from attnscale.show.report.courses import learning_curves, runs_over_time
from attnscale.show.report.densities import densities
from attnscale.show.report.figures import Axis, Chart, Figure, Heat, Series
from attnscale.show.report.freezing import freezing
from attnscale.show.report.heads import map_of_layers, map_of_record, mapped
from attnscale.show.report.method import words_of_models
from attnscale.show.report.parts import Note, Page, Row, Section, Table, Terms, render
from attnscale.train.record import Record


def twins_page(twins: Twins) -> str:
    """The page, as a string."""
    return render(twins_report(twins))


def twins_report(twins: Twins) -> Page:
    """Training runs side by side, as a report."""
    sections = (
        *_learning(twins),
        *_received(twins),
        *_course(twins),
        *_sections("heads", "Head by head, at the end", _maps(twins)),
        *_sections("scores", "The scores, at the end", _each(twins, "densities")),
        *_sections("freezing", "How far from freezing, at the end", _each(twins, "freezing")),
        *_layers(twins),
        _method(twins),
    )
    notes = tuple(_notes(twins))
    return Page("attnscale demo", twins.title, twins.verdict, "note", notes, sections, twins.explanation)


def _method(twins: Twins) -> Section:
    settings = Terms({name: shown(value) for name, value in twins.settings.items()})
    return Section("method", "How it was measured", (settings, words_of_models()))


def _notes(twins: Twins) -> Iterator[Note]:
    """What rows of every run let through; losses and spreads stand under their curves."""
    statistic = STATISTICS["gradient_gain"]
    told = "; ".join(
        f"{run.name}: {_told(run.records[0], statistic)} at first, {_told(run.records[-1], statistic)} at the end"
        for run in twins.runs
        if run.records
    )
    if told:
        yield Note("fact", statistic.long, f"{told}.", place="mean of the layers")


def _told(record: Record, statistic: Statistic) -> str:
    return formatted(statistic, record.whole(statistic.name))


def _learning(twins: Twins) -> Iterator[Section]:
    runs = [(run.name, run.losses) for run in twins.runs if run.losses]
    if runs:
        yield Section("learning", "Learning", ((learning_curves("losses", runs),),))


def _received(twins: Twins) -> Iterator[Section]:
    """Which queries received the gradient, before the first step."""
    runs = [(run.name, run.received) for run in twins.runs if run.received]
    if runs:
        lines = (
            Series(name, [x for x, _ in curve], [y for _, y in curve], mode="both", tone=tone)
            for tone, (name, curve) in enumerate(runs)
        )
        even = Series("all alike", (0.0, 1.0), (0.0, 1.0), tone="ink", dashed=True)
        chart = Chart(
            (*lines, even),
            Axis("share of the queries, quietest first"),
            Axis("share of the gradient", range=(0.0, 1.0)),
            "A line along the floor that rises at the end: most queries receive little, a few nearly all.",
        )
        yield Section(
            "received", "Who receives the gradient, before the first step", ((Figure("shares", {"": chart}),),)
        )


def _course(twins: Twins) -> Iterator[Section]:
    runs = [(run.name, run.records) for run in twins.runs if run.records]
    if runs:
        yield Section("run", "What the attention did meanwhile", ((runs_over_time("run-curves", runs),),))


def _maps(twins: Twins) -> list[Figure]:
    """One a run, on the same colours."""
    found = []
    for index, run in enumerate(twins.runs):
        name = f"heads-{index}"
        if run.audit is not None:
            found.append(replace(map_of_layers(name, run.audit.layers), caption=run.name))
        elif run.records:
            found.append(replace(map_of_record(name, run.records[-1]), caption=run.name))
    return _on_one_scale(found)


def _on_one_scale(figures: list[Figure]) -> list[Figure]:
    heats = [[view for view in figure.views.values() if isinstance(view, Heat)] for figure in figures]
    ranges = [
        (min(heat.low for heat in same), max(heat.high for heat in same), any(heat.log for heat in same))
        for same in zip(*heats, strict=True)
    ]
    # a logarithm serves all or none of them, and none where one starts at zero
    return [
        replace(
            figure,
            views={
                title: replace(view, low=low, high=high, log=log and low > 0)
                for (title, view), (low, high, log) in zip(figure.views.items(), ranges, strict=True)
                if isinstance(view, Heat)
            },
        )
        for figure in figures
    ]


def _each(twins: Twins, what: str) -> list[Figure]:
    make = {"densities": densities, "freezing": freezing}[what]
    audited = [(run.name, run.audit.layers) for run in twins.runs if run.audit is not None]
    made = [(name, make(f"{what}-{index}", layers)) for index, (name, layers) in enumerate(audited)]
    return [replace(figure, caption=name) for name, figure in made if figure is not None]


def _sections(name: str, title: str, figures: list[Figure]) -> Iterator[Section]:
    """Side by side, all switched by the first where they have the same views."""
    if figures:
        first = figures[0]
        followers = (
            replace(figure, follows=first.name) if list(figure.views) == list(first.views) else figure
            for figure in figures[1:]
        )
        yield Section(name, title, ((first, *followers),))


def _layers(twins: Twins) -> Iterator[Section]:
    tables = [(run, run.audit) for run in twins.runs if run.audit is not None]
    if tables:
        lines = [(run.name, Checked(run.name, "", "", None, (), audit).lines) for run, audit in tables]
        blocks = (replace(table_of(found), caption=name) for name, found in lines)
        yield Section("layers", "Layer by layer, at the end", tuple(blocks))
    else:
        yield Section("layers", "From first to last", (_ends(twins.runs),))


def _ends(runs: tuple[TwinRun, ...]) -> Table:
    columns = mapped()
    rows = tuple(
        Row((run.name, when, *(number(run.records[index].whole(entry.name)) for entry in columns)))
        for run in runs
        if run.records
        for when, index in (("first", 0), ("last", -1))
    )
    headings = (entry.long for entry in columns)
    return Table(("run", "record", *headings), (("", rows),), text=frozenset({0, 1}))
