"""The demo in the terminal: both models while they train, then what happened."""

import math
import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from attnscale.lab.demo import Twins, TwinTraining
from attnscale.lab.training import Step
from attnscale.measure.statistics import STATISTICS

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 14  # of a curve, in characters
SMOOTH = 10  # steps over which a loss is averaged: single batches jump
TOLD = 50  # steps between two lines where nothing can be redrawn
FOLLOWED = (STATISTICS["entropy_ratio"], STATISTICS["jacobian_trace"])


class LiveTwins:
    """One line a twin: its loss, entropy and 1 − Σp², each with its course so far."""

    def __init__(self, training: TwinTraining, console: Console) -> None:
        self._training, self._console = training, console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> "LiveTwins":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, pair: dict[str, Step]) -> None:
        """Draw a step that is over, where the scores were measured; or print some of them as lines."""
        step = next(iter(pair.values()))
        is_last = step.number + 1 == self._training.step_count
        if self._live is not None and (step.record is not None or is_last):
            self._live.update(self._table(step.number + 1), refresh=True)
        elif self._live is None and (step.number + 1) % TOLD == 0:
            self._console.print(self._line(step.number + 1), highlight=False, soft_wrap=True)

    def _table(self, step: int) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left", title_style="dim")
        table.title = f"step {step} of {self._training.step_count}"
        for heading in ("", "loss", *(statistic.long for statistic in FOLLOWED)):
            table.add_column(heading, no_wrap=True)
        for name in self._training.models:
            losses = smoothed([loss for _, loss in self._training.losses[name]])
            curves = [Text.assemble(f"{losses[-1]:5.2f} ", (curve(losses, max(losses)), "cyan"))]
            for statistic in FOLLOWED:
                course = [record.whole(statistic.name) for record in self._training.records[name]]
                curves.append(Text.assemble(f"{course[-1]:4.0%} ", (curve(course, 1.0), "cyan")))
            table.add_row(Text(name, style="bold"), *curves)
        return table

    def _line(self, step: int) -> str:
        told = []
        for name in self._training.models:
            loss = smoothed([loss for _, loss in self._training.losses[name]])[-1]
            entropy, gain = (self._training.records[name][-1].whole(one.name) for one in FOLLOWED)
            told.append(f"{name}: loss {loss:.2f}, entropy {entropy:.0%}, 1 − Σp² {gain:.0%}")
        return f"step {step:3d}  {'  |  '.join(told)}"


def show_twins(twins: Twins, console: Console) -> None:
    """Print what happened and why, and the verdict on every layer of either."""
    console.print()
    console.print(Text(twins.verdict, style="bold"))
    for run in twins.runs:
        if run.audit is not None:
            words = ", ".join(f"{layer} {word}" for layer, word in run.audit.words.items())
            console.print(Text(f"{run.name}: {words}"))
    for paragraph in twins.explanation:
        console.print()
        console.print(Text(paragraph))


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return running means."""
    return [statistics.fmean(losses[max(0, at - SMOOTH + 1) : at + 1]) for at in range(len(losses))]


def curve(values: Sequence[float], top: float) -> str:
    """Draw a curve as bars of eight heights, the newest to the right.

    >>> curve([0.0, 0.5, 1.0], 1.0)
    '▁▅█'
    """
    points = [values[round(at * (len(values) - 1) / (WIDTH - 1))] for at in range(WIDTH)]
    shown = points if len(values) > WIDTH else values
    return "".join(_bar(value / top) if top > 0 and math.isfinite(value) else " " for value in shown)


def _bar(share: float) -> str:
    return BARS[min(len(BARS) - 1, max(0, math.floor(share * len(BARS))))]
