"""A recorded training run in the terminal."""

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from attnscale.diagnose.alarm import told
from attnscale.diagnose.finding import Finding
from attnscale.diagnose.verdict import EXPLODING
from attnscale.show.check import STYLES
from attnscale.show.naming import by_pattern, printable
from attnscale.show.numbers import number, share
from attnscale.train.run import LayerRun, Run

HEADINGS = ("max\nat first", "max\nnow", "in 1,000\nsteps", "spread", "entropy\nof ln n", "grad.\ngain", "will pass")
STEPS = 1000  # a growth is told over
LAST = EXPLODING[0][0]  # published threshold


def show_run(run: Run, console: Console | None = None) -> None:
    """Print the layers with their growth and forecast, then the alarms. Names are data: nothing in them is markup."""
    console = console or Console()
    damaged = f", {run.damaged} damaged lines left out" if run.damaged else ""
    console.print(Text(f"steps {run.first_step}–{run.last_step}, {run.records} records{damaged}", style="bold"))
    layers = {layer.name: layer for layer in run.layers}
    worst = {alarm.layer: alarm.severity for _, alarm in run.alarms}
    for title, members in by_pattern(layers):
        _print_layers(title, [(index, layers[name]) for index, name in members], worst, console)
    for step, alarm in run.alarms:
        console.print()
        _print_alarm(step, alarm, console)
    console.print()
    console.print(Text(conclusion(run), style=f"bold {STYLES.get(run.worst or '', 'green')}"))


def conclusion(run: Run) -> str:
    """One sentence on the run."""
    crossings = {layer.name: layer.crossing for layer in run.layers if layer.crossing is not None}
    alarms = f"{len(run.alarms)} alarms" if len(run.alarms) != 1 else "1 alarm"
    if not crossings:
        growing = sum(layer.growth is not None and layer.growth.is_growing for layer in run.layers)
        if not growing:
            return f"{alarms}; no layer's largest score is certain to grow."
        return f"{alarms}; the largest score of {growing} of {len(run.layers)} layers is past {LAST:,.0f} and growing."
    name, crossing = min(crossings.items(), key=lambda found: found[1].step)
    return f"{alarms}; {printable(name)} will be the first to pass {crossing.threshold:,.0f}, {told(crossing)}."


def cells(layer: LayerRun) -> tuple[str, ...]:
    """The numbers of a layer, in the order of HEADINGS."""
    growth, crossing, now = layer.growth, layer.crossing, layer.numbers
    return (
        number(layer.first_max),
        number(layer.last_max),
        "–" if growth is None else f"× {growth.factor(STEPS):.3g}",
        number(now["spread"]),
        share(now["entropy_ratio"]),
        share(now["gradient_gain"]),
        "–" if crossing is None else f"{crossing.threshold:g} at {crossing.step:.0f}",
    )


def _print_layers(title: str, members: list[tuple[str, LayerRun]], worst: dict[str, str], console: Console) -> None:
    table = Table("layer", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for index, layer in members:
        table.add_row(Text(index or "·", style=STYLES.get(worst.get(layer.name, ""), "green")), *cells(layer))
    console.print()
    console.print(Text(printable(title), style="dim"))
    console.print(table)


def _print_alarm(step: int, alarm: Finding, console: Console) -> None:
    style = STYLES[alarm.severity]
    console.print(
        Text.assemble(
            (f"step {step} {alarm.severity} ", style), (alarm.code, f"bold {style}"), f"  {printable(alarm.place)}"
        )
    )
    console.print(Padding(Text(printable(f"{alarm.message} {alarm.advice}")), (0, 0, 0, 2), expand=False))
