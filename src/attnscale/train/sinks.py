"""Sinks: where records go. Any callable that takes a Record is one; those in SINKS have names."""

import errno
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from attnscale.diagnose.finding import grouped
from attnscale.errors import SettingError, SinkWarning
from attnscale.extras import needing
from attnscale.measure.statistics import logged
from attnscale.train.log import file_numbers, numbered
from attnscale.train.record import LEARNING, Record, new_name

Sink = Callable[[Record], None]

# How a sink is asked for, with its argument in capitals where it takes one, and the class that is made then and not
# before: one stands in a room that is built on this one.
SINKS = {
    "tensorboard:DIR": "attnscale.train.sinks:TensorBoard",
    "wandb": "attnscale.train.sinks:WeightsAndBiases",
    "mlflow": "attnscale.train.sinks:MLflow",
    "table": "attnscale.show.live_table:LiveTable",
}
LOGS = (".jsonl", ".json")  # what the path of a log ends in
DEFAULT_LIMIT = 250 * 10**6  # bytes of a file; at a megabyte a record, as of 126 layers of 128 heads, 250 records
PREFIX = "attnscale_"  # of curves
STEP = "attnscale/step"  # the axis of W&B's curves: the step that it counts itself is not the training step
LONGEST_TAG = 5000  # characters of the text of a tag of MLflow


def sink_from(given: str | Path | Sink) -> Sink:
    """Return the sink of a name in SINKS, or of the path of a .jsonl file; a callable is one already."""
    if callable(given):
        return given
    name, _, argument = str(given).partition(":")
    for written, home in SINKS.items():
        known, _, takes = written.partition(":")
        if isinstance(given, str) and name == known and bool(argument) == bool(takes):
            module, _, kind = home.partition(":")
            with needing("This sink"):
                sink: Sink = getattr(import_module(module), kind)(*[argument] * bool(takes))
            return sink
    if isinstance(given, Path) or (isinstance(given, str) and given.endswith(LOGS)):
        return JsonLines(given)
    known = ", ".join(["a path of a .jsonl file", *map(repr, SINKS)])
    got = repr(given) if isinstance(given, str) else type(given).__name__
    raise SettingError(f"Expected a sink as {known}, or any callable, got {got}.")


class JsonLines:
    """Append records to a file, one a rank; a full disk is told once and never stops training.

    A record that names no run belongs to this sink's own. Where a file would pass `limit` bytes, the log goes on in
    FILE.1, then in FILE.2 and so on (`scores.1.jsonl`). Several processes may write one log.
    """

    def __init__(self, path: str | Path, limit: int = DEFAULT_LIMIT) -> None:
        self.path, self.limit = Path(path), limit
        self.run = new_name()
        self._warned = False

    def __call__(self, record: Record) -> None:
        """Append one line."""
        line = (record if record.run is not None else replace(record, run=self.run)).to_line()
        path = self.path
        if record.rank:  # others than rank 0 have their number in the name
            path = path.with_name(f"{path.stem}.rank{record.rank}{path.suffix}")
        try:
            self._append(path, line)
        except OSError as error:
            if not self._warned:
                self._warned = True
                message = f"Could not write {path}: {error.strerror or error}. Training goes on; records are left out"
                warnings.warn(f"{message} until it can be written again.", SinkWarning, stacklevel=2)

    def _append(self, path: Path, line: bytes) -> None:
        """Write a whole line at once to the end of a file, on a line of its own also after one that was cut short."""
        path.parent.mkdir(parents=True, exist_ok=True)
        number = file_numbers(path)[-1]
        newest = numbered(path, number)
        if newest.exists() and (size := newest.stat().st_size) and size + len(line) > self.limit:
            newest = numbered(path, number + 1)
        handle = os.open(newest, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        try:
            if os.fstat(handle).st_size:
                os.lseek(handle, -1, os.SEEK_END)
                line = line if os.read(handle, 1) == b"\n" else b"\n" + line
            if os.write(handle, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(handle)


def scalars(record: Record, names: Iterable[str] | None = None, *, heads: bool = False) -> Iterator[tuple[str, float]]:
    """Yield `attnscale_NUMBER/LAYER` and its value over the heads, where finite; tools group by what stands first.

    Where no names are given it is all numbers, with `attnscale/loss` and `attnscale/lr`. With `heads` each head has
    its own curve as well, `attnscale_NUMBER/LAYER/head_0`.
    """
    for name in LEARNING if names is None else ():
        value = getattr(record, name)
        if value is not None and math.isfinite(value):
            yield f"attnscale/{name}", value
    names = list(logged() if names is None else names)
    for layer, found in record.layers.items():
        for name in names:
            curves = {f"{PREFIX}{name}/{layer}": found.whole(name)}
            if heads:
                values = found.numbers.get(name, ())
                curves |= {f"{PREFIX}{name}/{layer}/head_{head}": value for head, value in enumerate(values)}
            yield from ((curve, value) for curve, value in curves.items() if math.isfinite(value))


def _package(tool: str) -> Any:
    try:
        return import_module(tool)
    except ImportError:
        raise SettingError(f"The sink '{tool}' needs the package {tool}; run 'pip install {tool}'.") from None


class TensorBoard:
    """Write to an event file in a folder; alarms as text. With `heads` each head has its own curve as well."""

    def __init__(self, folder: str, *, heads: bool = False) -> None:
        _package("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._heads, self._writer = heads, SummaryWriter(folder)
        charts = {name: ["Multiline", [f"^{PREFIX}{name}/"]] for name in logged()}
        self._writer.add_custom_scalars({"attnscale": charts})  # layers share a chart

    def __call__(self, record: Record) -> None:
        """Add a point to every curve; those of ranks that were not merged are rank 0's."""
        if record.rank:
            return
        for tag, value in scalars(record, heads=self._heads):
            self._writer.add_scalar(tag, value, record.step)
        for group in grouped(record.alarms):
            self._writer.add_text("attnscale/alarms", str(group), record.step)
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()


class WeightsAndBiases:
    """Log curves over `attnscale/step`, and alarms as alerts. With `heads` each head has its own curve as well."""

    def __init__(self, *, heads: bool = False) -> None:
        self._wandb, self._heads, self._run = _package("wandb"), heads, None

    def __call__(self, record: Record) -> None:
        """Log one point of every curve."""
        if record.rank:
            return
        run = self._wandb.run
        if run is None:
            raise SettingError("The sink 'wandb' needs an open run; call wandb.init() before training.")
        if run is not self._run:
            run.define_metric(STEP, hidden=True)
            for curves in ("attnscale/*", f"{PREFIX}*"):
                run.define_metric(curves, step_metric=STEP)
            self._run = run
        # W&B drops what comes with a step below its own. So a loop that logs with its training step must find W&B's
        # step no further than that, and records after W&B's step passed theirs need rows of their own.
        at: dict[str, Any] = {"step": record.step} if record.step >= run.step else {}
        run.log({**dict(scalars(record, heads=self._heads)), STEP: record.step}, **at)
        for group in grouped(record.alarms):
            run.alert(title=f"attnscale: {group.first.code} in {group.first.place}", text=str(group))


class MLflow:
    """Log one metric a layer and number, at the step of the record; every alarm as a tag of its own, with its step."""

    def __init__(self) -> None:
        self._mlflow = _package("mlflow")

    def __call__(self, record: Record) -> None:
        """Log one point of every curve."""
        if record.rank:
            return
        if self._mlflow.active_run() is None:
            raise SettingError("The sink 'mlflow' needs an active run; call mlflow.start_run() before training.")
        self._mlflow.log_metrics({_allowed(name): value for name, value in scalars(record)}, step=record.step)
        for group in grouped(record.alarms):
            tag = f"attnscale.{group.first.code}.{group.first.severity}.step_{record.step}"
            self._mlflow.set_tag(_allowed(tag), f"step {record.step}: {group}"[:LONGEST_TAG])


def _allowed(name: str) -> str:
    """Replace what MLflow does not take in a name by underscores.

    >>> _allowed("attnscale_spread/layer[3]")
    'attnscale_spread/layer_3_'
    """
    return "".join(sign if sign.isascii() and (sign.isalnum() or sign in "_-./ ") else "_" for sign in name)
