"""A recorded training run in the terminal."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnscale.diagnose.scores import EXPLODING
from attnscale.measure.statistics import Place, Statistic, in_place
from attnscale.plain import counted, printable
from attnscale.show.check import STYLES, print_group
from attnscale.show.text import Column, by_pattern, number
from attnscale.train.log import LoggedRun
from attnscale.train.run import LayerRun, Run

LISTED = 20  # runs of a log
LAST, FIRST = EXPLODING[0][0], EXPLODING[-1][0]  # published thresholds


def show_run(run: Run) -> None:
    """Print the layers with their growth and forecast, then the alarms. Names are data: nothing in them is markup."""
    console = Console()
    loss = "" if run.losses is None else f", loss {' → '.join(map(number, run.losses))}"
    console.print(Text(f"steps {run.first_step}–{run.last_step}, {run.records} records{loss}", style="bold"))
    if run.damaged:
        console.print(Text(f"{counted(run.damaged, 'damaged line')} skipped:", style="yellow"))
        for told in run.damage:
            console.print(Text(printable(told)), soft_wrap=True)
        if run.damaged > len(run.damage):
            console.print(Text(f"and {run.damaged - len(run.damage)} more"))
    layers = {layer.name: layer for layer in run.layers}
    worst = {layer: raised.group.first.severity for raised in reversed(run.raised) for layer in raised.group.layers}
    for title, members in by_pattern(layers):
        table = Table("layer", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in columns():
            table.add_column(column.short, justify="right")
        for index, name in members:
            style = STYLES.get(worst.get(name, ""), "green")
            table.add_row(Text(index or "·", style=style), *(column.cell(layers[name]) for column in columns()))
        console.print()
        console.print(Text(printable(title), style="dim"))
        console.print(table)
    for raised in run.raised:
        print_group(raised.group, console, after=f" · {raised.when}")
    console.print()
    console.print(Text(conclusion(run), style=f"bold {STYLES.get(run.worst or '', 'green')}"))


def show_runs(runs: Sequence[LoggedRun], shown: LoggedRun) -> None:
    """Print the runs of a log that holds several; of many, the last."""
    if len(runs) == 1:
        return
    console = Console()
    console.print(Text(f"{len(runs)} runs in this log; number {shown.number} is shown, --run NUMBER shows another."))
    table = Table("run", "name", "began", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("first step", "last step", "records"):
        table.add_column(heading, justify="right")
    for entry in runs[-LISTED:]:
        began = datetime.fromtimestamp(entry.began, UTC).strftime("%Y-%m-%d %H:%M")
        numbers = map(str, (entry.steps[0], entry.steps[-1], entry.records))
        name = Text(printable(entry.name or "–"))
        table.add_row(str(entry.number), name, began, *numbers, style="bold" if entry is shown else "")
    console.print(table)
    console.print()


def conclusion(run: Run) -> str:
    """Return one sentence on the run."""
    kinds = sum(len(raised.group.findings) for raised in run.raised)
    return f"{counted(kinds, 'alarm')}; {_course(run)}."


def _course(run: Run) -> str:
    layers = len(run.layers)
    growing = [layer for layer in run.layers if layer.growth is not None and layer.growth.is_growing]
    highest = max((layer.effective_max for layer in run.layers if math.isfinite(layer.effective_max)), default=0.0)
    crossings = [
        (layer.crossing, layer.name)
        for layer in run.layers
        if layer.crossing is not None and layer.crossing.threshold > highest
    ]
    if crossings:
        crossing, name = min(crossings, key=lambda found: found[0].step)
        return f"forecast: {printable(name)} is the first to pass {crossing.threshold:,.0f}, {crossing}"
    if past := sum(layer.effective_max >= LAST for layer in growing):
        return f"the largest score of {past} of {layers} layers is past {LAST:,.0f} and growing"
    if held := sum(layer.is_clipped for layer in run.layers):
        return f"QK-Clip holds {held} of {layers} layers where they are"
    if highest >= FIRST:
        leading = next(layer for layer in run.layers if layer.effective_max == highest)
        how = "grows" if leading in growing else "does not grow any more"
        return f"the largest score, {number(leading.last_max)} in {printable(leading.name)}, {how}"
    if growing:
        return f"the largest score of {len(growing)} of {layers} layers grows, and none comes near a threshold"
    return "no layer's largest score grows by more than its error"


def columns() -> list[Column[LayerRun]]:
    """Return the columns of a layer: its largest score and its forecast, around the last record's statistics."""
    return [
        Column("max\nfirst", "first largest score", lambda layer: number(layer.first_max)),
        Column("max\nlast", "last largest score", lambda layer: number(layer.last_max)),
        Column("growth\n(steps)", "latest growth (steps)", _factor),
        *(_column(entry) for entry in in_place(Place.RUN)),
        Column("forecast:\nmax at step", "forecast: largest score at step", _crossing),
    ]


def _column(entry: Statistic) -> Column[LayerRun]:
    return Column.of(entry, lambda layer: layer.numbers.get(entry.name, math.nan))


def _factor(layer: LayerRun) -> str:
    return "–" if layer.growth is None else f"× {number(layer.growth.factor)} ({layer.growth.observed:.0f})"


def _crossing(layer: LayerRun) -> str:
    if layer.is_clipped:
        return "held by QK-Clip"
    return "–" if layer.crossing is None else f"{layer.crossing.threshold:,.0f} at {layer.crossing.step:.0f}"
