"""Live table of a run: in the terminal, or in the output of a notebook cell."""

import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

from rich import get_console
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from attnscale.diagnose.finding import Finding, grouped
from attnscale.plain import printable
from attnscale.show.tables import record_table
from attnscale.show.terminal import grids
from attnscale.show.text import number, place
from attnscale.train.record import Record

SHOWN_ALARMS = 5


class LiveTable:
    """Table with one row per layer, redrawn at every sampled step; below it the alarms, the worst first.

    If the loop shows progress bars of tqdm or rich, each table is printed above them.
    """

    def __init__(self) -> None:
        self._console = Console()
        self._live: Live | None = None
        self._cell: Any = None  # display handle of the notebook cell
        self._alarms: dict[tuple[str, str], Finding] = {}  # latest alarm by layer and code

    def __call__(self, record: Record) -> None:
        """Draw the table."""
        if record.rank:
            return
        for alarm in record.alarms:
            self._alarms.pop((alarm.layer, alarm.code), None)
            self._alarms[alarm.layer, alarm.code] = alarm
        record = replace(record, alarms=list(self._alarms.values()))
        if _is_in_notebook():
            self._show_in_notebook(record)
            return
        table = self._drawn(record)
        if bars := bars_on_terminal():
            self.close()
            with self._console.capture() as drawn:
                self._console.print(table)
            bars[0].write(drawn.get(), file=sys.stdout, end="")
        elif is_live(get_console()):
            self.close()
            get_console().print(table)
        else:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False)
                self._live.start()
            self._live.update(table, refresh=True)

    def close(self) -> None:
        """Stop redrawing; the last table stays on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show_in_notebook(self, record: Record) -> None:
        display = import_module("IPython.display")
        shown = display.HTML(record._repr_html_())
        if self._cell is None:
            self._cell = display.display(shown, display_id=True)
        else:
            self._cell.update(shown)

    def _drawn(self, record: Record) -> Group:
        ((_, grid),) = grids(record_table(record), self._console.width)
        groups = grouped(record.alarms[::-1])[:SHOWN_ALARMS]
        alarms = (f"{group.first.severity}: {place(group)}: {group.first.message}" for group in groups)
        return Group(Text(_title(record)), grid, *(Text(printable(alarm)) for alarm in alarms))


def bars_on_terminal() -> list[Any]:
    """Return the tqdm bars on a terminal; a disabled bar has no file."""
    tqdm = sys.modules.get("tqdm.std")
    bars = [] if tqdm is None else list(tqdm.tqdm._instances)
    files = ((bar, getattr(bar, "fp", None)) for bar in bars if hasattr(bar, "start_t"))
    return [bar for bar, file in files if file is not None and not file.closed and file.isatty()]


def _is_in_notebook() -> bool:
    """Return True in a Jupyter kernel; IPython in a terminal has no kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def is_live(console: Console) -> bool:
    """Return True if rich redraws something else on the console; newer versions keep a stack of these."""
    return bool(getattr(console, "_live_stack", None) or getattr(console, "_live", None))


def _title(record: Record) -> str:
    values = {"loss": record.loss, "learning rate": record.lr}
    parts = [f"{name} {number(value)}" for name, value in values.items() if value is not None]
    return " · ".join([f"step {record.step}", *parts])
