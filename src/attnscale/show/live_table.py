"""Records as a table in the terminal that follows the run."""

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from attnscale.diagnose.finding import Finding, severity_rank
from attnscale.diagnose.grouped import grouped
from attnscale.diagnose.verdict import worst_code
from attnscale.measure.statistics import Place, in_place
from attnscale.plain import printable
from attnscale.show.check import STYLES, place
from attnscale.show.numbers import number
from attnscale.train.record import Record

SHOWN_ALARMS = 5
UNTOLD = "–"  # without an alarm a record is not judged


class LiveTable:
    """One row a layer, redrawn at every sampled step; the alarms below it, by what they say, the worst first."""

    def __init__(self) -> None:
        self._live = Live(console=Console(), auto_refresh=False)
        self._alarms: dict[tuple[str, str], Finding] = {}  # by layer and code, the latest

    def __call__(self, record: Record) -> None:
        """Draw the table anew."""
        if record.rank:
            return
        self._live.start()
        for alarm in record.alarms:
            self._alarms.pop((alarm.layer, alarm.code), None)
            self._alarms[alarm.layer, alarm.code] = alarm
        self._live.update(self._table(record), refresh=True)

    def close(self) -> None:
        """Leave the last table standing."""
        self._live.stop()

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


def _title(record: Record) -> str:
    """The step, with its loss and learning rate where they are known."""
    learned = {"loss": record.loss, "learning rate": record.lr}
    known = [f"{name} {number(value)}" for name, value in learned.items() if value is not None]
    return " · ".join([f"step {record.step}", *known])
