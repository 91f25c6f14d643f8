"""The report of a monitor's log."""

from collections.abc import Iterator, Sequence

from attnscale.measure.statistics import STATISTICS
from attnscale.show.check import place
from attnscale.show.naming import by_pattern
from attnscale.show.report.check import unbroken
from attnscale.show.report.courses import layers_over_run
from attnscale.show.report.facts import facts_of_run
from attnscale.show.report.figures import Figure
from attnscale.show.report.freezing import freezing_of, spreads_of
from attnscale.show.report.heads import map_of_record
from attnscale.show.report.histograms import histograms
from attnscale.show.report.learning import learning
from attnscale.show.report.method import words_of_logs
from attnscale.show.report.parts import MATTER, Note, Page, Row, Section, Table, render
from attnscale.show.run import columns, conclusion
from attnscale.train.record import Record
from attnscale.train.run import LayerRun, Run, summarise


def run_page(title: str, records: Sequence[Record], run: Run | None = None) -> str:
    """The page of a run: `records` in order of steps, at least one; `run`, where they are its course alone."""
    return render(run_report(title, records, run))


def run_report(title: str, records: Sequence[Record], run: Run | None = None) -> Page:
    """A recorded run, as a report."""
    run = summarise(records) if run is None else run
    notes, curves = _notes(run), layers_over_run("run-curves", records, run)
    return Page(
        kind="attnscale watch-log",
        title=title,
        verdict=_sentence(conclusion(run)),
        tone=run.worst or "fine",
        notes=notes + tuple(facts_of_run(run))[: max(0, MATTER - len(notes))],
        sections=(
            Section("run", "Over the run", ((curves,),)),
            *_learning(records, curves),
            Section("layers", "Layer by layer", (_table(run),)),
            *_lying(records, run),
            Section("heads", f"Head by head, at step {run.last_step}", ((map_of_record("head-map", records[-1]),),)),
            _method(run, records),
        ),
    )


def _learning(records: Sequence[Record], curves: Figure) -> Iterator[Section]:
    """Loss and learning rate beside the spread, where a training loop gave them."""
    found, spread = learning("loss-curves", records), STATISTICS["spread"].long
    if found is not None:
        beside = Figure("spread-curves", {spread: curves.views[spread]})
        yield Section("learning", "Learning, beside the spread", ((found, beside),))


def _lying(records: Sequence[Record], run: Run) -> Iterator[Section]:
    """Where the heads are, and how near to where softmax freezes."""
    spreads, counted = spreads_of(records[-1]), histograms("head-histogram", records)
    figures = [freezing_of("freezing", spreads)] if spreads else []
    figures += [] if counted is None else [counted]
    if figures:
        title = "Where softmax freezes, and where the heads are" if spreads else "Where the heads are"
        yield Section("lying", f"{title}, at step {run.last_step}", (tuple(figures),))


def _notes(run: Run) -> tuple[Note, ...]:
    """Alarms that say the same, once, with the steps they were raised at; the latest of the worst speaks for all."""
    return tuple(
        Note(first.severity, first.severity, first.message, first.code, where, first.advice)
        for first, where in ((raised.group.first, f"{place(raised.group)} · {raised.when}") for raised in run.raised)
    )


def _table(run: Run) -> Table:
    layers = {layer.name: layer for layer in run.layers}
    groups = tuple(
        (title, tuple(_row(index or "·", layers[name]) for index, name in members))
        for title, members in by_pattern(layers)
    )
    return Table(("layer", *map(unbroken, columns()), "not before step"), groups)


def _row(index: str, layer: LayerRun) -> Row:
    earliest = "–" if layer.crossing is None else f"{layer.crossing.earliest:.0f}"
    return Row((index, *(column.cell(layer) for column in columns()), earliest), layer.name)


def _method(run: Run, records: Sequence[Record]) -> Section:
    rows = {layer.rows for record in records for layer in record.layers.values()}
    looked = f"{min(rows)}" if len(rows) == 1 else f"{min(rows, default=0)} to {max(rows, default=0)}"
    ranks = max(record.ranks for record in records)
    thinned = sum(record.until is not None for record in records)
    sentences = [
        f"{run.records} records of the steps {run.first_step} to {run.last_step}; each looked at {looked} rows of a "
        f"layer, over all of its heads, from {ranks} {'rank' if ranks == 1 else 'ranks'}."
    ]
    sentences += [f"{thinned} of them stand for several, of which they keep the extremes."] if thinned else []
    sentences += [f"{run.damaged} damaged lines were left out."] if run.damaged else []
    bounds = [record.layers[name].whole("max_bound") for record in records[-1:] for name in record.layers]
    known = [bound for bound in bounds if bound == bound]
    sentences += [f"At the last step no score of any row is above {max(known):.4g}."] if known else []
    forecast = (
        "Growth is a Theil–Sen line through the logarithm of what softmax feels of the largest score, over the latest "
        "records. A forecast is their damped trend, at most eight records ahead and half as many as were seen; its "
        "band, a 90% interval, reaches from growth that ends to growth that goes on. Growth may end at any time, so a "
        "threshold has a step before which it is not expected to be passed, and none after. A log keeps numbers of "
        "heads and no scores, so histograms count heads."
    )
    if not spreads_of(records[-1]):
        forecast += " These records do not say how many keys a row sees, so no freezing point is drawn."
    if all(record.loss is None and record.lr is None for record in records):
        forecast += " No loss was given to them: Monitor.step(loss=…, lr=…) takes it, and the callbacks do."
    return Section("method", "How it was measured", (" ".join(sentences), forecast, words_of_logs()))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
