"""Records as a table in the terminal that follows the run."""

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from attnscale.diagnose.finding import Finding
from attnscale.diagnose.verdict import worst_code
from attnscale.measure.statistics import Place, in_place
from attnscale.plain import printable
from attnscale.show.check import STYLES
from attnscale.show.numbers import number
from attnscale.train.record import Record

SHOWN_ALARMS = 5
UNTOLD = "–"  # a record does not say how many keys rows see, so without an alarm nothing can be told


class LiveTable:
    """One row a layer, redrawn at every sampled step; the alarms below it, the newest last."""

    def __init__(self) -> None:
        self._live = Live(console=Console(), auto_refresh=False)
        self._alarms: list[Finding] = []

    def __call__(self, record: Record) -> None:
        """Draw the table anew."""
        if record.rank:
            return
        self._live.start()
        self._alarms = (self._alarms + record.alarms)[-SHOWN_ALARMS:]
        self._live.update(self._table(record), refresh=True)

    def close(self) -> None:
        """Leave the last table standing."""
        self._live.stop()

    def _table(self, record: Record) -> Table:
        worst = {alarm.layer: alarm.severity for alarm in self._alarms}
        table = Table(title=f"step {record.step}", box=None, pad_edge=False, title_justify="left")
        table.add_column("layer", overflow="fold")
        statistics = in_place(Place.LIVE)
        for statistic in statistics:
            table.add_column(statistic.short, justify="right")
        table.add_column("verdict")
        for name, layer in record.layers.items():
            style = STYLES.get(worst.get(name, ""), "")
            numbers = (number(layer.whole(one.name)) for one in statistics)
            word = worst_code(name, self._alarms) or UNTOLD
            table.add_row(Text(printable(name), style=style), *numbers, Text(printable(word), style=style))
        table.caption = Text(
            "\n".join(printable(f"{alarm.severity}: {alarm.place}: {alarm.message}") for alarm in self._alarms)
        )
        table.caption_justify = "left"
        return table
