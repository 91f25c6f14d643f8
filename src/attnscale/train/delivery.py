"""Delivery: records to sinks, alarms to the log and to on_alarm; a sink or callback that fails stops nothing.

Also decides what the loggers of a trainer get besides sinks, and keeps the lines of tqdm's progress bars whole.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from attnscale.diagnose.finding import Finding, grouped, severity_rank
from attnscale.errors import AttnscaleWarning, SettingError, SinkWarning
from attnscale.measure.statistics import Place, in_place, logged
from attnscale.train.record import Record
from attnscale.train.sinks import Sink

LOGGER = logging.getLogger("attnscale")
LogChoice = bool | Sequence[str]
CLIPPED_HEADS = "attnscale/clipped_heads"  # number of heads that QK-Clip lowered since the log before


OF_SCORES = ("sharp", "exploding", "non_finite")  # codes of one course of events, which is said once


class AlarmLog:
    """Lines of the log: an alarm is said once; the same in other layers or at later steps is counted."""

    def __init__(self) -> None:
        self._said: dict[str, int] = {}  # the worst severity that was said, by kind
        self._repeated: list[Finding] = []  # alarms since the last line
        self._last_step = 0

    def lines(self, record: Record) -> Iterator[str]:
        """Yield a line for each kind of alarm that is new, or more serious than before."""
        for group in grouped(record.alarms):
            kind = "scores" if group.first.code in OF_SCORES else group.first.code
            rank = severity_rank(group.first.severity)
            if rank > self._said.get(kind, -1):
                self._said[kind] = rank
                yield f"step {record.step}: {group}"
            else:
                self._repeated += group.findings
                self._last_step = record.step

    def end(self) -> Iterator[str]:
        """Yield a line with the number of alarms that were counted only, and say later ones again."""
        self._said.clear()
        repeated, self._repeated = self._repeated, []
        if repeated:
            layers = len({alarm.layer for alarm in repeated})
            alarms = "1 more such alarm" if len(repeated) == 1 else f"{len(repeated)} more such alarms"
            where = "1 layer" if layers == 1 else f"{layers} layers"
            yield f"{alarms} in {where} until step {self._last_step}"


@dataclass(frozen=True)
class Delivery:
    """The sinks of a run; `warn` warns of each failure once."""

    sinks: Sequence[Sink]
    on_alarm: Callable[[Finding], None] | None
    warn: Callable[[AttnscaleWarning], None]
    log: AlarmLog = field(default_factory=AlarmLog)

    def write(self, record: Record) -> None:
        """Call every sink with a record."""
        for sink in self.sinks:
            try:
                sink(record)
            except Exception as error:
                self._warn("A sink failed and is tried again at the next record", error)

    def alarm(self, record: Record, *, is_logged: bool, is_over: bool = False) -> None:
        """Raise the alarms of a record; `is_over` where no alarm of an earlier record stands any more."""
        if is_logged:
            _say([*self.log.lines(record), *(self.log.end() if is_over else ())])
        for alarm in record.alarms if self.on_alarm is not None else ():
            assert self.on_alarm is not None  # checked just above
            try:
                self.on_alarm(alarm)
            except Exception as error:
                self._warn("on_alarm failed and is called again at the next alarm", error)

    def close(self) -> None:
        """Say how many alarms were counted, and close the sinks that can be closed."""
        _say(list(self.log.end()))
        for sink in self.sinks:
            close = getattr(sink, "close", None)
            if close is not None:
                close()

    def _warn(self, what: str, error: Exception) -> None:
        self.warn(SinkWarning(f"{what}: {type(error).__name__}: {error}"))


def _say(lines: Sequence[str]) -> None:
    if lines:
        with bars_aside():
            for line in lines:
                LOGGER.warning("%s", line)


def logged_statistics(choice: LogChoice) -> tuple[str, ...]:
    """Return the statistics for a trainer's loggers: those of the live table, those that are named, or none.

    >>> logged_statistics(["spread", "max"]), logged_statistics(False)
    (('spread', 'max'), ())
    """
    if isinstance(choice, bool):
        return tuple(entry.name for entry in in_place(Place.LIVE)) if choice else ()
    known = logged()
    if isinstance(choice, str) or not all(name in known for name in choice):
        raise SettingError(f"Expected log as True, False or a list of {', '.join(known)}; got {choice!r}.")
    return tuple(choice)


def is_fed_by_sink(logger: object, sinks: Iterable[Sink]) -> bool:
    """Return True if a sink writes the same curves to the tool that a logger writes to."""
    names = [kind.__name__.lower() for kind in type(logger).__mro__]
    tools = [tool for sink in sinks if (tool := getattr(sink, "tool", None)) is not None]
    return any(name.startswith(tool) for name in names for tool in tools)


def bars_on_terminal() -> list[Any]:
    """Return tqdm's bars that are drawn on a terminal now; one that is disabled has no file."""
    tqdm = sys.modules.get("tqdm.std")
    bars = [] if tqdm is None else list(tqdm.tqdm._instances)
    files = ((bar, getattr(bar, "fp", None)) for bar in bars if hasattr(bar, "start_t"))
    return [bar for bar, file in files if file is not None and not file.closed and file.isatty()]


@contextmanager
def bars_aside() -> Iterator[None]:
    """Clear tqdm's bars while something else is written, and draw them again below it."""
    if not bars_on_terminal():
        yield
        return
    with sys.modules["tqdm.std"].tqdm.external_write_mode(file=sys.stderr):
        yield
