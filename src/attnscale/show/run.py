"""A recorded training run in the terminal."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.text import Text

from attnscale.diagnose.scores import EXPLODING
from attnscale.plain import counted, printable
from attnscale.show.tables import run_table, table_of
from attnscale.show.terminal import STYLES, print_group, print_table, say
from attnscale.show.text import number
from attnscale.train.run import LoggedRun, Run

LISTED = 20  # most runs of a log to list
LAST, FIRST = EXPLODING[0][0], EXPLODING[-1][0]  # published thresholds


def show_run(run: Run) -> None:
    """Print the layers with their growth and forecast, then the alarms and the conclusion."""
    console = Console()
    loss = "" if run.losses is None else f", loss {' → '.join(map(number, run.losses))}"
    say(f"steps {run.first_step}–{run.last_step}, {run.records} records{loss}", console, "bold")
    if run.damaged:
        say(f"{counted(run.damaged, 'damaged line')} skipped:", console, "yellow")
        for reason in run.damage:
            console.print(Text(printable(reason)), soft_wrap=True)
        if run.damaged > len(run.damage):
            say(f"and {run.damaged - len(run.damage)} more", console)
    print_table(run_table(run), console)
    for raised in run.raised:
        print_group(raised.group, console, after=f" · {raised.when}")
    console.print()
    say(conclusion(run), console, f"bold {STYLES[run.worst or 'fine']}")


def show_runs(runs: Sequence[LoggedRun], shown: LoggedRun) -> None:
    """Print the runs of a log that has several, or the last LISTED of them."""
    if len(runs) == 1:
        return
    console = Console()
    say(f"{len(runs)} runs in this log; number {shown.number} is shown, --run NUMBER shows another.", console)
    rows = []
    for entry in runs[-LISTED:]:
        began = datetime.fromtimestamp(entry.began, UTC).strftime("%Y-%m-%d %H:%M")
        steps = map(str, (entry.steps[0], entry.steps[-1], len(entry.steps)))
        rows.append((str(entry.number), entry.name or "–", began, *steps))
    print_table(table_of(("run", "name", "began", "first step", "last step", "records"), rows, text=(1, 2)), console)
    console.print()


def conclusion(run: Run) -> str:
    """Return a one-sentence summary of the run."""
    kinds = sum(len(raised.group.findings) for raised in run.raised)
    return f"{counted(kinds, 'alarm')}; {_score_sentence(run)}."


def _score_sentence(run: Run) -> str:
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
    if clipped := sum(layer.is_clipped for layer in run.layers):
        return f"QK-Clip limits the largest score of {clipped} of {layers} layers"
    if highest >= FIRST:
        leading = next(layer for layer in run.layers if layer.effective_max == highest)
        how = "grows" if leading in growing else "has stopped growing"
        return f"the largest score, {number(leading.last_max)} in {printable(leading.name)}, {how}"
    if growing:
        return f"the largest score of {len(growing)} of {layers} layers grows, and none comes near a threshold"
    return "no layer's largest score grows by more than its error"
