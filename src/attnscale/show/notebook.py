"""HTML table, repr(), data frame and plot of each kind of result, for notebooks."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial, singledispatch
from html import escape
from importlib import import_module
from itertools import repeat
from typing import Any

from torch import Tensor

from attnscale.acting.clip import ClipReport
from attnscale.checking import Checked
from attnscale.comparing.backend_comparison import BackendComparison
from attnscale.comparing.comparison import Comparison
from attnscale.diagnose.auditing import Audit
from attnscale.diagnose.finding import grouped
from attnscale.diagnose.verdict import head_verdicts
from attnscale.diagnose.what_if import WhatIf
from attnscale.errors import SettingError
from attnscale.measure.statistics import STATISTICS, Place, Statistic, in_place
from attnscale.measure.stats import ScoreStats
from attnscale.plain import counted, printable
from attnscale.show.tables import Column, Row, Table, backend_table, layer_table, record_table, table_of, what_if_table
from attnscale.show.text import formatted, number
from attnscale.theory.limits import critical_spread
from attnscale.train.log import Log
from attnscale.train.monitor import Monitor
from attnscale.train.record import Record
from attnscale.watching.layer import Layer
from attnscale.watching.seen import Seen, padding_note

COLOURS = {"error": "#d32f2f", "warning": "#c77700", "note": "#1976d2", "fine": "#2e7d32"}
MOST_ROWS = 100  # of an HTML table; the data frame has all rows
MOST_CURVES = 10  # curves that have a name in the legend
FEW_POINTS = 40  # shorter curves have a mark at each point
Fields = Iterable[dict[str, Any]]  # rows of a data frame
LIVE, SEEN = in_place(Place.LIVE), in_place(Place.SEEN)


@dataclass(frozen=True)
class View:
    """View of a result: a verdict, a table, notes, the rows of a data frame, and a plot."""

    verdict: str
    table: Table
    records: Fields
    tone: str = "note"
    notes: Iterable[str] = ()
    draw: Callable[[Any, str, float], None] | None = None

    def html(self) -> str:
        """Return the verdict, the table and the notes as HTML. Names are escaped."""
        columns, rows = self.table.columns, self.table.rows
        head = "".join(_cell("th", column.heading, column) for column in columns)
        body = "".join(map(partial(_row, columns), rows[:MOST_ROWS]))
        more = [f"And {len(rows) - MOST_ROWS:,} more rows: .to_pandas() has all."] if len(rows) > MOST_ROWS else []
        notes = "".join(f"<p style='margin:.3em 0'>{_safe(note)}</p>" for note in (*more, *self.notes))
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
        verdict = f"border-left:4px solid {COLOURS[self.tone]};padding-left:.6em'><b>{_safe(self.verdict)}</b>"
        return f"<div><p style='{verdict}</p><div style='overflow-x:auto'>{table}</div>{notes}</div>"

    def frame(self) -> Any:
        """Return the data frame."""
        return _package("pandas", "to_pandas()").DataFrame(list(self.records))

    def plot(self, statistic: str, ax: Any) -> Any:
        """Plot a statistic, and return the axes."""
        if statistic not in STATISTICS:
            raise SettingError(f"Expected a statistic to plot, one of {', '.join(STATISTICS)}, got {statistic!r}.")
        if self.draw is None:
            raise SettingError("Expected a record to plot, but no step has been sampled yet.")
        ax = ax or _package("matplotlib.pyplot", "plot()").subplots(layout="constrained")[1]
        self.draw(ax, statistic, STATISTICS[statistic].factor)
        ax.set_ylabel(STATISTICS[statistic].long)
        ax.legend(fontsize="small")
        return ax


@singledispatch
def view_of(result: object) -> View:
    """Return the view of a result."""
    raise TypeError(f"Expected a result of attnscale, got {type(result).__name__}.")


@view_of.register
def _(audit: Audit) -> View:
    checked = Checked("", "", "", None, (), audit)
    notes = [f"{word}: {meaning}." for word, meaning in checked.footnotes.items()]
    notes += [*map(str, checked.groups), *padding_note(audit.layers.values()), *audit.unchecked]
    records = (row for layer in audit.layers.values() for row in _judged(layer))
    table = layer_table(checked.lines)
    return View(checked.conclusion, table, records, audit.worst or "fine", notes, _layers(audit))


@view_of.register
def _(seen: Seen) -> View:
    layers = seen.layers.values()
    found = f"{counted(len(layers), 'attention layer')}, {counted(seen.calls, 'call')}"
    headings = ("layer", "kind", "heads", "d_k", "scale", "expected scale", *(entry.long for entry in SEEN))
    table = table_of(headings, map(_layer_cells, layers), (0, 1))
    records = (row for layer in layers for row in _head_rows(layer))
    return View(found, table, records, notes=padding_note(layers), draw=_layers(seen))


@view_of.register
def _(stats: ScoreStats) -> View:
    looked, shown = "every row" if stats.exact else "sampled rows", in_place(Place.CHECK | Place.LIVE)
    numbers = ", ".join(f"{name} {number(STATISTICS[name].whole(stats))}" for name in ("spread", "max"))
    verdict = f"{counted(stats.heads, 'head')}, {int(stats.rows.sum()):,} rows ({looked}): {numbers}"
    cells = [_cells_of_heads(stats, entry) for entry in shown]
    rows = ([str(head), *(column[head] for column in cells)] for head in range(stats.heads))
    table = table_of(("head", *(entry.long for entry in shown)), rows, ())
    return View(verdict, table, _stats_rows(stats))


@view_of.register
def _(table: WhatIf) -> View:
    now, tried = table.rows[0], counted(len(table.rows) - 1, "candidate")
    spread = f"Now the scores spread by {number(now.spread)}"
    verdict = f"{spread}, entropy {100 * now.entropy_ratio:.1f}% of its maximum; {tried} tried"
    records = [asdict(row) for row in table.rows]
    for record in records:
        record["candidate"] = record.pop("name")
    return View(verdict, what_if_table(table), records)


@view_of.register
def _(comparison: Comparison) -> View:
    changed = [*comparison.changed, *comparison.carried]
    rows = ((head.layer, str(head.head), head.text, str(head.by_factor), head.reason) for head in changed)
    table = table_of(("layer", "head", "change", "by factor", "cause"), rows, (0, 2, 3, 4))
    found = [("new", comparison.new), ("gone", comparison.gone)]
    notes = [f"{word}: {group}" for word, findings in found for group in grouped(findings)]
    records = (
        {"layer": head.layer, "head": head.head, "same_weights": head.carried} | asdict(move)
        for head in comparison.heads
        for move in head.moves.values()
    )
    tone = "warning" if comparison.worse else "fine"
    return View(comparison.conclusion, table, records, tone, (*notes, *comparison.notes))


@view_of.register
def _(comparison: BackendComparison) -> View:
    notes = (*map(str, comparison.differing), *comparison.remarks)
    tone, records = "fine" if comparison.first is None else "warning", map(asdict, comparison.rows)
    return View(comparison.conclusion, backend_table(comparison), records, tone, notes)


@view_of.register
def _(report: ClipReport) -> View:
    skipped = f", {counted(len(report.left), 'head')} skipped" if report.left else ""
    verdict = f"{counted(len(report.heads), 'head')} clipped to {report.threshold:g}{skipped}"
    headings = ("layer", "head", "largest score", "measured", "at most", "multiplied by", "parameters")
    rows, records = [], []
    for head in report.heads:
        numbers = number(head.maximum), head.measured, number(head.bound), number(head.gamma, 4)
        rows.append((head.layer, str(head.head), *numbers, "; ".join(map(str, head.touched))))
        of_head = {"layer": head.layer, "head": head.head, "max": head.maximum, "max_bound": head.bound}
        parameters = [one.parameter for one in head.touched]
        records.append(of_head | {"measured": head.measured, "factor": head.gamma, "parameters": parameters})
    return View(verdict, table_of(headings, rows, (0, 3, 6)), records, notes=map(str, report.left))


@view_of.register
def _(record: Record) -> View:
    groups = grouped(record.alarms)
    alarms = counted(len(record.alarms), "alarm") if groups else "no new alarm"
    loss = "" if record.loss is None else f", loss {number(record.loss)}"
    verdict = f"Step {record.step}{loss}: {counted(len(record.layers), 'layer')}, {alarms}"
    keys = [layer.keys or 1.0 for layer in record.layers.values()]
    tone, draw = groups[0].first.severity if groups else "fine", _by_layer(_record_rows(record), keys)
    return View(verdict, record_table(record), _record_rows(record), tone, map(str, groups), draw)


@view_of.register
def _(monitor: Monitor) -> View:
    verdict = f"step {monitor.steps}, sampled every {counted(monitor.every, 'step')}"
    if monitor.last is None:
        return View(verdict, table_of((), ()), ())
    last = view_of(monitor.last)
    return replace(last, verdict=f"{verdict}. {last.verdict}")


@view_of.register
def _(log: Log) -> View:
    records, alarms = log.records, sum(len(record.alarms) for record in log.records)
    steps = f", steps {records[0].step} to {records[-1].step}" if len(log.runs) == 1 else ""
    verdict = f"{counted(len(log.runs), 'run')}, {counted(len(records), 'record')}{steps}"
    rows = (
        (
            str(record.step),
            "–" if record.loss is None else number(record.loss),
            *(formatted(entry, record.whole(entry.name)) for entry in LIVE),
            ", ".join(dict.fromkeys(alarm.code for alarm in record.alarms)),
        )
        for record in reversed(records)
    )

    def draw(ax: Any, statistic: str, factor: float) -> None:
        run = list(log.runs.values())[-1]
        for at, name in enumerate(dict.fromkeys(name for record in run for name in record.layers)):
            own = [record for record in run if name in record.layers]
            values = [factor * record.layers[name].whole(statistic) for record in own]
            label, mark = printable(name) if at < MOST_CURVES else None, "." if len(own) < FEW_POINTS else ""
            ax.plot([record.step for record in own], values, marker=mark, label=label)
        ax.set_xlabel("step")

    fields = (row for record in records for row in _record_rows(record))
    headings, notes = ("step", "loss", *(entry.long for entry in LIVE), "alarms"), ["Latest first; means of layers."]
    table = table_of(headings, rows, (len(headings) - 1,))
    return View(f"{verdict}, {counted(alarms, 'alarm')}", table, fields, notes=notes, draw=draw)


def _layers(seen: Audit | Seen) -> Callable[[Any, str, float], None]:
    keys = (float(layer.stats.keys.double().nanmean()) for layer in seen.layers.values())
    rows = (row for layer in seen.layers.values() for row in _head_rows(layer))
    return _by_layer(rows, (known if math.isfinite(known) else 1.0 for known in keys))


def _by_layer(rows: Fields, keys: Iterable[float]) -> Callable[[Any, str, float], None]:
    """Return a function that plots a statistic of every head by layer; for the spread, also the critical spread."""

    def draw(ax: Any, statistic: str, factor: float) -> None:
        heads: dict[str, list[float]] = {}
        for row in rows:
            heads.setdefault(row["layer"], []).append(factor * row.get(statistic, math.nan))
        points = [(at, value) for at, values in enumerate(heads.values()) for value in values]
        means = [math.fsum(values) / len(values) for values in heads.values()]
        ax.plot(*zip(*points, strict=True), "o", color="C0", alpha=0.4, label="one head")
        ax.plot(range(len(heads)), means, color="C0", label="mean of the layer")
        if statistic == "spread":
            critical = [critical_spread(max(1, round(known))) for known in keys]
            ax.plot(range(len(heads)), critical, "--", color="C3", label="critical spread √(2 ln n)")
        ax.set_xticks(range(len(heads)), list(map(printable, heads)), rotation=90, fontsize="x-small")

    return draw


def _stats_rows(stats: ScoreStats, **of_heads: Tensor) -> Iterator[dict[str, Any]]:
    tensors = of_heads | {name: entry.of(stats) for name, entry in STATISTICS.items() if entry.attribute is not None}
    numbers = {name: values.double().tolist() for name, values in tensors.items()}
    for head in range(stats.heads):
        yield {"head": head} | {name: values[head] for name, values in numbers.items()}


def _head_rows(layer: Layer) -> Iterator[dict[str, Any]]:
    of_layer = {"layer": layer.name, "kind": layer.kind, "head_dim": layer.head_dim}
    of_heads = {"query_norm": layer.query_norm, "key_norm": layer.key_norm, "alignment": layer.alignment}
    for row in _stats_rows(layer.stats, scale_applied=layer.scales, **of_heads):
        yield of_layer | {"scale_expected": layer.scale_expected} | row


def _judged(layer: Layer) -> Iterator[dict[str, Any]]:
    verdicts = {found.head: found.verdict for found in head_verdicts(layer)}
    return (row | {"verdict": verdicts.get(row["head"])} for row in _head_rows(layer))


def _record_rows(record: Record) -> Iterator[dict[str, Any]]:
    of_step = {"run": record.run, "step": record.step, "loss": record.loss, "lr": record.lr}
    for name, layer in record.layers.items():
        for head in range(max(map(len, layer.numbers.values()), default=0)):
            numbers = {statistic: values[head] for statistic, values in layer.numbers.items() if head < len(values)}
            yield {**of_step, "layer": name, "head": head, **numbers}


def _layer_cells(layer: Layer) -> list[str]:
    heads = str(layer.heads) if layer.heads == layer.kv_heads else f"{layer.heads}/{layer.kv_heads}"
    scales = number(layer.scale_applied), number(layer.scale_expected)
    numbers = (formatted(entry, entry.whole(layer.stats), entry.error(layer.stats)) for entry in SEEN)
    return [layer.name, layer.kind, heads, str(layer.head_dim), *scales, *numbers]


def _cells_of_heads(stats: ScoreStats, entry: Statistic) -> list[str]:
    errors = [math.nan] * stats.heads
    if entry.attribute is not None and entry.has_error and not stats.exact:
        errors = stats.stderr(entry.attribute).nan_to_num(math.inf).tolist()
    return list(map(formatted, repeat(entry), entry.of(stats).tolist(), errors))


def _row(columns: Sequence[Column], row: Row) -> str:
    *cells, last = (row.name or row.cells[0], *row.cells[1:])
    cells = [_cell("td", text, column) for text, column in zip(cells, columns[:-1], strict=True)]
    return f"<tr>{''.join(cells)}{_cell('td', last, columns[-1], COLOURS.get(row.tone, 'inherit'))}</tr>"


def _cell(tag: str, text: str, column: Column, colour: str = "inherit") -> str:
    style = f"text-align:{'left' if column.is_text else 'right'};padding:.15em .6em;color:{colour}"
    return f"<{tag} style='{style}'>{_safe(text)}</{tag}>"


def _safe(text: str) -> str:
    return escape(printable(text))


def _package(name: str, what: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        missing = f"{what} needs the package {package}, which is not installed"
        raise SettingError(f"{missing}: pip install {package}.") from None
