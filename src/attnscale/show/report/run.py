"""The report of a monitor's log."""

from collections.abc import Sequence

from attnscale.checking.grouped import grouped
from attnscale.diagnose.alarm import told
from attnscale.diagnose.finding import Finding
from attnscale.show.check import place
from attnscale.show.naming import by_pattern
from attnscale.show.report.check import unbroken
from attnscale.show.report.courses import layers_over_run
from attnscale.show.report.facts import facts_of_run
from attnscale.show.report.heads import map_of_record
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
    notes = _notes(run)
    return Page(
        kind="attnscale watch-log",
        title=title,
        verdict=_sentence(conclusion(run)),
        tone=run.worst or "fine",
        notes=notes + tuple(facts_of_run(run))[: max(0, MATTER - len(notes))],
        sections=(
            Section("run", "Over the run", ((layers_over_run("run-curves", records, run),),)),
            Section("layers", "Layer by layer", (_table(run),)),
            Section("heads", f"Head by head, at step {run.last_step}", ((map_of_record("head-map", records[-1]),),)),
            _method(run, records),
        ),
    )


def _notes(run: Run) -> tuple[Note, ...]:
    """Alarms that say the same, once, with the steps they were raised at; the latest speaks for all."""
    latest = [alarm for _, alarm in reversed(run.alarms)]
    steps: dict[tuple[str, str], list[int]] = {}
    for step, alarm in run.alarms:
        steps.setdefault((alarm.code, alarm.severity), []).append(step)
    found = []
    for group in grouped(latest):
        first: Finding = group.first
        raised = steps[first.code, first.severity]
        when = f"step {raised[0]}" if len(raised) == 1 else f"{len(raised)} times, steps {raised[0]} to {raised[-1]}"
        where = f"{place(group)} · {when}"
        found.append(Note(first.severity, first.severity, first.message, first.code, where, first.advice))
    return tuple(found)


def _table(run: Run) -> Table:
    layers = {layer.name: layer for layer in run.layers}
    groups = tuple(
        (title, tuple(_row(index or "·", layers[name]) for index, name in members))
        for title, members in by_pattern(layers)
    )
    return Table(("layer", *map(unbroken, columns()), "90% interval of the step"), groups)


def _row(index: str, layer: LayerRun) -> Row:
    interval = "–" if layer.crossing is None else told(layer.crossing).partition("(")[2].rstrip(")")
    return Row((index, *(column.cell(layer) for column in columns()), interval), layer.name)


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
        "Growth is a Theil–Sen line through the logarithm of the largest score over the latest records; the band about "
        "a forecast is its 90% interval. A forecast says where the present growth leads, not that it will go on. A log "
        "keeps no scores and no lengths, so there are no histograms and no freezing point here."
    )
    return Section("method", "How it was measured", (" ".join(sentences), forecast, words_of_logs()))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
