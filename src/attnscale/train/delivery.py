"""Delivery: a record on its way to the sinks, and its alarms to whoever asked; a failure of one loses nothing."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attnscale.diagnose.finding import Finding
from attnscale.diagnose.grouped import grouped
from attnscale.errors import AttnscaleWarning, SinkWarning
from attnscale.train.bars import bars_aside
from attnscale.train.record import Record
from attnscale.train.sinks import Sink

LOGGER = logging.getLogger("attnscale")


@dataclass(frozen=True)
class Delivery:
    """Where the records of a run go; `tell` warns once of each thing that failed."""

    sinks: Sequence[Sink]
    on_alarm: Callable[[Finding], None] | None
    tell: Callable[[AttnscaleWarning], None]

    def write(self, record: Record) -> None:
        """Hand it to every sink."""
        for sink in self.sinks:
            try:
                sink(record)
            except Exception as error:
                told = f"A sink failed and is tried again at the next record: {type(error).__name__}: {error}"
                self.tell(SinkWarning(told))

    def alarm(self, record: Record, *, is_logged: bool) -> None:
        """Raise its alarms; the log tells those that say the same of many layers once."""
        if record.alarms and is_logged:
            with bars_aside():
                for group in grouped(record.alarms):
                    LOGGER.warning("step %d: %s", record.step, group)
        for alarm in record.alarms if self.on_alarm is not None else ():
            assert self.on_alarm is not None  # asked just above
            try:
                self.on_alarm(alarm)
            except Exception as error:
                told = f"on_alarm failed and is called again at the next alarm: {type(error).__name__}: {error}"
                self.tell(SinkWarning(told))

    def close(self) -> None:
        """Close the sinks that can be."""
        for sink in self.sinks:
            closing = getattr(sink, "close", None)
            if closing is not None:
                closing()
