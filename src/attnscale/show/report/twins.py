"""The report of training runs side by side."""

from collections.abc import Iterator, Sequence

from attnscale.checking import Checked
from attnscale.lab.demo import Twins
from attnscale.show.figures import Axis, Chart, Figure, Series
from attnscale.show.page import Page, Section, Terms, render
from attnscale.show.report.check import table_of, words_of_models
from attnscale.show.report.run import loss_chart, runs_over_time
from attnscale.show.text import shown


def twins_page(twins: Twins) -> str:
    """Return the report of training runs side by side as a string."""
    return render(twins_report(twins))


def twins_report(twins: Twins) -> Page:
    """Return training runs side by side, as a report; parts that no run has are left out."""
    return Page("attnscale demo", twins.title, twins.verdict, "note", (), tuple(_sections(twins)), twins.explanation)


def _sections(twins: Twins) -> Iterator[Section]:
    if losses := {run.name: run.losses for run in twins.runs if run.losses}:
        yield Section("learning", "Learning", ((Figure("losses", {"loss": loss_chart("loss", dict(losses))}),),))
    if shares := [(run.name, run.received) for run in twins.runs if run.received]:
        yield Section("received", "How queries share the gradient, before the first step", ((_shares(shares),),))
    if recorded := [(run.name, run.records) for run in twins.runs if run.records]:
        yield Section("run", "Attention during training", ((runs_over_time("run-curves", recorded),),))
    if audits := [(run.name, run.audit) for run in twins.runs if run.audit is not None]:
        tables = [table_of(Checked(name, "", "", None, (), audit).lines, name) for name, audit in audits]
        yield Section("layers", "Layer by layer, at the end", tuple(tables))
    settings = Terms({name: shown(value) for name, value in twins.settings.items()})
    yield Section("method", "How it was measured", (settings, words_of_models()))


def _shares(runs: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> Figure:
    """Return the share of the gradient that the queries with the smallest gradients receive together."""
    lines = (
        Series(name, [x for x, _ in curve], [y for _, y in curve], tone=tone, marks=True)
        for tone, (name, curve) in enumerate(runs)
    )
    even = Series("equal shares", (0.0, 1.0), (0.0, 1.0), tone="ink", dashed=True)
    notice = "The lower a line runs, the less evenly queries share the gradient. A share says nothing of its size."
    axes = Axis("share of the queries, smallest gradient first"), Axis("share of the gradient", range=(0.0, 1.0))
    return Figure("shares", {"": Chart((*lines, even), *axes, notice)})
