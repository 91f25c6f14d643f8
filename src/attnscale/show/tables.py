"""Tables of results for the terminal, pages and notebooks: headings, cells and colours."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from attnscale.checking import Line
from attnscale.comparing.backend_comparison import HEADINGS, BackendComparison
from attnscale.diagnose.finding import severity_rank
from attnscale.diagnose.verdict import worst_code
from attnscale.diagnose.what_if import COLUMNS, WhatIf
from attnscale.lab import experiment as lab
from attnscale.measure.statistics import STATISTICS, Place, Statistic, in_place
from attnscale.show.text import DIGITS, by_pattern, formatted, number, shown
from attnscale.train.record import Record
from attnscale.train.run import LayerRun, Run

ALWAYS_SHOWN = ("output\nchange", "spread", "scale", "entropy\n% of max")  # never dropped from a what-if table
ERROR_DIGITS = 2
NO_ALARM = "–"


@dataclass(frozen=True)
class Column:
    """Column: heading, a shorter heading with line breaks for the terminal, and its rank when columns are dropped."""

    heading: str
    short: str = ""
    is_text: bool = False
    drop: int = 0  # a narrow terminal drops the highest number first, and never 0


@dataclass(frozen=True)
class Row:
    """Row of a table, formatted."""

    cells: tuple[str, ...]
    name: str = ""  # full name, if the first cell is an abbreviation
    tone: str = ""  # severity that colours the last cell
    current: bool = False


@dataclass(frozen=True)
class Table:
    """Table of rows in groups, each with a title or with an empty one."""

    columns: tuple[Column, ...]
    groups: tuple[tuple[str, tuple[Row, ...]], ...]
    caption: str = ""

    @property
    def rows(self) -> list[Row]:
        """The rows of all groups."""
        return [row for _, rows in self.groups for row in rows]


def table_of(headings: Sequence[str], rows: Iterable[Sequence[str]], text: Collection[int] = (0,)) -> Table:
    """Return a table of rows under headings; `text` has the numbers of the columns that hold text."""
    columns = tuple(Column(heading.replace("\n", " "), heading, at in text) for at, heading in enumerate(headings))
    return Table(columns, (("", tuple(Row(tuple(row)) for row in rows)),))


def statistic_columns(statistics: Sequence[Statistic]) -> tuple[Column, ...]:
    """Return the columns of statistics; a narrow terminal drops the last ones first."""
    return tuple(Column(entry.long, entry.short, drop=at) for at, entry in enumerate(statistics))


def by_layer(columns: tuple[Column, ...], rows: Sequence[Row], caption: str = "") -> Table:
    """Return a table with a group for each pattern of layer names; its rows show only the layer numbers."""
    named = {row.name: row for row in rows}
    groups = tuple(
        (title, tuple(Row((index or "·", *named[name].cells), name, named[name].tone) for index, name in members))
        for title, members in by_pattern(named)
    )
    return Table((Column("layer", is_text=True), *columns), groups, caption)


def layer_table(lines: Sequence[Line], caption: str = "") -> Table:
    """Return the table of a check: the spread beside the expected one, the scale, the other statistics, the verdict."""
    spread, *others = in_place(Place.CHECK)
    scale = STATISTICS["scale_applied"]
    columns = (
        Column(spread.long, spread.short),
        Column("expected spread", "expected\nspread", drop=1),
        Column(scale.long, scale.short, drop=2),
        *(Column(entry.long, entry.short, drop=3 + at) for at, entry in enumerate(others)),
        Column("verdict", is_text=True),
    )

    rows = []
    for line in lines:
        values = line.statistics.items()
        first, *rest = (formatted(STATISTICS[name], value, line.errors.get(name, math.nan)) for name, value in values)
        scales = number(line.spread_expected), formatted(scale, line.scale_applied)
        rows.append(Row((first, *scales, *rest, line.verdict_text), line.name, line.severity or "fine"))
    return by_layer(columns, rows, caption)


def what_if_table(what_if: WhatIf) -> Table:
    """Return the table of candidate scales; the first is the model's own."""
    columns = tuple(
        Column(heading.replace("\n", " "), heading, drop=0 if heading in ALWAYS_SHOWN else 1 + at)
        for at, heading in enumerate(COLUMNS)
    )
    rows = tuple(Row((row.name, *row.numbers()), current=at == 0) for at, row in enumerate(what_if.rows))
    return Table((Column("scale by", is_text=True), *columns), (("", rows),))


def backend_table(comparison: BackendComparison) -> Table:
    """Return the table of backends, a group for each layer."""
    last = len(HEADINGS) - 1
    columns = tuple(Column(heading, is_text=at in (1, last)) for at, heading in enumerate(HEADINGS))
    groups: dict[str, list[Row]] = {}
    for (layer, *cells), row in zip(comparison.cells(), comparison.rows, strict=True):
        tone = "warning" if row.differences else "fine"
        groups.setdefault(layer, []).append(Row(tuple(cells), f"{layer}, {row.backend}", tone))
    return Table(columns[1:], tuple((layer, tuple(rows)) for layer, rows in groups.items()))


def run_table(run: Run) -> Table:
    """Return the table of a training run: largest scores, growth, forecast, and statistics of the last record."""
    statistics = in_place(Place.RUN)
    columns = (
        Column("largest score at start", "max\nfirst"),
        Column("largest score at end", "max\nlast"),
        Column("latest growth (steps)", "growth\n(steps)"),
        *statistic_columns(statistics),
        Column("forecast: largest score at step", "forecast:\nmax at step"),
    )
    worst = {layer: raised.group.first.severity for raised in reversed(run.raised) for layer in raised.group.layers}
    rows = []
    for layer in run.layers:
        maxima = number(layer.first_max), number(layer.last_max), _growth(layer)
        last = (formatted(entry, layer.numbers.get(entry.name, math.nan)) for entry in statistics)
        rows.append(Row((*maxima, *last, _forecast(layer)), layer.name, worst.get(layer.name, "fine")))
    return by_layer(columns, rows)


def _growth(layer: LayerRun) -> str:
    return "–" if layer.growth is None else f"× {number(layer.growth.factor)} ({layer.growth.observed:.0f})"


def _forecast(layer: LayerRun) -> str:
    if layer.is_clipped:
        return "limited by QK-Clip"
    return "–" if layer.crossing is None else f"{layer.crossing.threshold:,.0f} at {layer.crossing.step:.0f}"


def record_table(record: Record) -> Table:
    """Return the table of one sampled training step, with the worst alarm of each layer."""
    statistics = in_place(Place.LIVE)
    worst = {each.layer: each.severity for each in sorted(record.alarms, key=lambda each: severity_rank(each.severity))}
    rows = []
    for name, layer in record.layers.items():
        numbers = (formatted(entry, layer.whole(entry.name)) for entry in statistics)
        verdict = worst_code(name, record.alarms) or NO_ALARM
        rows.append(Row((name, *numbers, verdict), name, worst.get(name, "")))
    columns = (Column("layer", is_text=True), *statistic_columns(statistics), Column("verdict", is_text=True))
    return Table(columns, (("", tuple(rows)),))


def lab_table(table: lab.Table) -> Table:
    """Return a table of an experiment."""
    columns = tuple(
        Column(heading, is_text=at == 0 or any(isinstance(row[at], str | bool) for row in table.rows), drop=at)
        for at, heading in enumerate(table.columns)
    )
    digits = [ERROR_DIGITS if heading == "±" else DIGITS for heading in table.columns]
    return Table(columns, (("", tuple(Row(tuple(map(shown, row, digits))) for row in table.rows)),))
