"""Records as a table in the terminal that follows the run."""

import sys
from collections.abc import Callable
from typing import TextIO

from rich import get_console
from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.table import Table
from rich.text import Text

from attnscale.diagnose.finding import Finding, grouped, severity_rank
from attnscale.diagnose.verdict import worst_code
from attnscale.measure.statistics import Place, in_place
from attnscale.plain import printable
from attnscale.show.bar_lines import BarLines
from attnscale.show.check import STYLES, place
from attnscale.show.numbers import number
from attnscale.train.delivery import bars_on_terminal
from attnscale.train.record import Record

SHOWN_ALARMS = 5
UNTOLD = "–"  # without an alarm a record is not judged


class LiveTable:
    """One row a layer, redrawn at every sampled step; the alarms below it, by what they say, the worst first.

    Where the loop has bars of tqdm on the terminal, the table stands below them. Where it has bars of rich, as
    Lightning has by default, a table at every sampled step stands above them.
    """

    def __init__(self) -> None:
        self._console = Console()
        self._live: Live | None = None
        self._beside: BarLines | None = None
        self._alarms: dict[tuple[str, str], Finding] = {}  # by layer and code, the latest

    def __call__(self, record: Record) -> None:
        """Draw the table anew."""
        if record.rank:
            return
        for alarm in record.alarms:
            self._alarms.pop((alarm.layer, alarm.code), None)
            self._alarms[alarm.layer, alarm.code] = alarm
        table, bars = self._table(record), bars_on_terminal()
        if self._beside is None and bars:
            self._step_aside()
            self._beside = BarLines(bars[0])
        if self._beside is not None:
            self._beside.show(self._lines(table))
            return
        if is_live(get_console()):
            self._step_aside()
            get_console().print(table)
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, redirect_stderr=False)
            self._live.start()
            if self._console.is_terminal:
                sys.stderr = LinesAbove(self._console, sys.stderr, self._step_aside)
        self._live.update(table, refresh=True)

    def close(self) -> None:
        """Leave the last table standing."""
        self._step_aside()
        if self._beside is not None:
            self._beside.close()
            self._beside = None

    def _step_aside(self) -> None:
        """Leave the table where it is, and begin another with the next record."""
        live, self._live = self._live, None
        if live is not None:
            if isinstance(sys.stderr, LinesAbove):
                sys.stderr = sys.stderr.end()
            live.stop()

    def _lines(self, table: Table) -> list[str]:
        with self._console.capture() as drawn:
            self._console.print(table)
        return drawn.get().rstrip("\n").split("\n")

    def _table(self, record: Record) -> Table:
        alarms = list(self._alarms.values())
        worst = {alarm.layer: alarm.severity for alarm in sorted(alarms, key=lambda one: severity_rank(one.severity))}
        table = Table(title=_title(record), box=None, pad_edge=False, title_justify="left")
        table.add_column("layer", overflow="fold")
        statistics = in_place(Place.LIVE)
        for statistic in statistics:
            table.add_column(statistic.short, justify="right")
        table.add_column("verdict")
        for name, layer in record.layers.items():
            style = STYLES.get(worst.get(name, ""), "")
            numbers = (number(layer.whole(one.name)) for one in statistics)
            word = worst_code(name, alarms) or UNTOLD
            table.add_row(Text(printable(name), style=style), *numbers, Text(printable(word), style=style))
        table.caption = Text(
            "\n".join(
                printable(f"{group.first.severity}: {place(group)}: {group.first.message}")
                for group in grouped(alarms[::-1])[:SHOWN_ALARMS]
            )
        )
        table.caption_justify = "left"
        return table


class LinesAbove(FileProxy):
    """Standard error while the table is drawn: lines stand above it, and for a bar it steps aside."""

    def __init__(self, console: Console, file: TextIO, step_aside: Callable[[], None]) -> None:
        super().__init__(console, file)
        self._file, self._step_aside, self._is_over = file, step_aside, False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """By which a bar knows what it can be drawn with."""
        return self._file.encoding

    def isatty(self) -> bool:
        """Whether bars are drawn there."""
        return self._file.isatty()

    def write(self, text: str) -> int:
        """Bars are drawn over and over on one line, which begins with a carriage return."""
        if text.startswith("\r") and not self._is_over:
            self._step_aside()
        return self._file.write(text) if self._is_over else super().write(text)

    def flush(self) -> None:
        """Where a line is not ended it is now."""
        self._file.flush() if self._is_over else super().flush()

    def end(self) -> TextIO:
        """What it stood for; whoever holds it still writes there."""
        self.flush()
        self._is_over = True
        return self._file


def is_live(console: Console) -> bool:
    """Whether something else is drawn on a console over and over: rich kept one such thing, and keeps several now."""
    return bool(getattr(console, "_live_stack", None) or getattr(console, "_live", None))


def _title(record: Record) -> str:
    """The step, with its loss and learning rate where they are known."""
    learned = {"loss": record.loss, "learning rate": record.lr}
    known = [f"{name} {number(value)}" for name, value in learned.items() if value is not None]
    return " · ".join([f"step {record.step}", *known])
