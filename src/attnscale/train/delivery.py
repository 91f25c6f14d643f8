"""Delivery: records to sinks, alarms to the log and to on_alarm; a sink or callback that fails stops nothing.

Also decides what the loggers of a trainer get besides sinks, and keeps the lines of tqdm's progress bars whole.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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


class Delivery:
    """The sinks of a run, and the lines of the log; `warn` warns of each failure once.

    The log says an alarm once; the same in other layers or at later steps is counted.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        on_alarm: Callable[[Finding], None] | None,
        warn: Callable[[AttnscaleWarning], None],
    ) -> None:
        self._sinks, self._on_alarm, self._warn = sinks, on_alarm, warn
        self._said: dict[str, int] = {}  # the worst severity that was said, by kind
        self._repeated: list[tuple[int, Finding]] = []  # steps and alarms since the last line

    def write(self, record: Record) -> None:
        """Call every sink with a record."""
        for sink in self._sinks:
            self._call(sink, record, "A sink failed and is tried again at the next record")

    def alarm(self, record: Record, *, is_logged: bool, is_over: bool = False) -> None:
        """Raise the alarms of a record; `is_over` where no alarm of an earlier record stands any more."""
        if is_logged:
            self._log(record)
            if is_over:
                self._end_log()
        for alarm in record.alarms if self._on_alarm is not None else ():
            self._call(self._on_alarm, alarm, "on_alarm failed and is called again at the next alarm")

    def close(self) -> None:
        """Say how many alarms were counted, and close the sinks that can be closed."""
        self._end_log()
        for sink in self._sinks:
            getattr(sink, "close", lambda: None)()

    def _call(self, function: Any, argument: Record | Finding, failure: str) -> None:
        try:
            function(argument)
        except Exception as error:
            self._warn(SinkWarning(f"{failure}: {type(error).__name__}: {error}"))

    def _log(self, record: Record) -> None:
        """Say each kind of alarm that is new, or more serious than before."""
        for group in grouped(record.alarms):
            kind = "scores" if group.first.code in OF_SCORES else group.first.code
            rank = severity_rank(group.first.severity)
            if rank > self._said.get(kind, -1):
                self._said[kind] = rank
                _say(f"step {record.step}: {group}")
            else:
                self._repeated += [(record.step, alarm) for alarm in group.findings]

    def _end_log(self) -> None:
        """Say how many alarms were counted only; later ones are said again."""
        repeated, self._repeated = self._repeated, []
        self._said.clear()
        if repeated:
            layers = len({alarm.layer for _, alarm in repeated})
            alarms = f"{len(repeated)} more such alarm{'s' * (len(repeated) > 1)}"
            _say(f"{alarms} in {layers} layer{'s' * (layers > 1)} until step {repeated[-1][0]}")


def _say(line: str) -> None:
    with bars_aside():
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
