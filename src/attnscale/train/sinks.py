"""Sinks, which receive records: any callable that accepts a Record, or a name in SINKS."""

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

# Names of sinks, with an argument in capitals, and their classes. They are imported on use, because LiveTable is in a
# package that imports this one.
SINKS = {
    "tensorboard:DIR": "attnscale.train.sinks:TensorBoard",
    "wandb": "attnscale.train.sinks:WeightsAndBiases",
    "mlflow": "attnscale.train.sinks:MLflow",
    "table": "attnscale.show.live_table:LiveTable",
}
LOGS = (".jsonl", ".json")  # suffixes of log files
DEFAULT_LIMIT = 250 * 10**6  # bytes per file: 250 records of 126 layers with 128 heads, at one megabyte each
PREFIX = "attnscale_"  # prefix of curve names
STEP = "attnscale/step"  # x-axis of W&B's curves, because W&B's own step is not the training step
LONGEST_TAG = 5000  # largest number of characters of an MLflow tag


def sink_from(given: str | Path | Sink) -> Sink:
    """Return the sink for a name in SINKS or the path of a .jsonl file; return a callable unchanged."""
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
    """Append records to a file, one file per rank; a full disk causes one warning and never stops training.

    A record without a run gets the run of this sink. If a file would exceed `limit` bytes, the log continues in FILE.1,
    then in FILE.2 and so on (`scores.1.jsonl`). Several processes may write one log.
    """

    def __init__(self, path: str | Path, limit: int = DEFAULT_LIMIT) -> None:
        self.path, self.limit = Path(path), limit
        self.run = new_name()
        self._warned = False

    def __call__(self, record: Record) -> None:
        """Append one line."""
        line = (record if record.run is not None else replace(record, run=self.run)).to_line()
        path = self.path
        if record.rank:  # ranks other than 0 have their number in the file name
            path = path.with_name(f"{path.stem}.rank{record.rank}{path.suffix}")
        try:
            self._append(path, line)
        except OSError as error:
            if not self._warned:
                self._warned = True
                message = f"Could not write {path}: {error.strerror or error}. Training goes on; records are left out"
                warnings.warn(f"{message} until it can be written again.", SinkWarning, stacklevel=2)

    def _append(self, path: Path, line: bytes) -> None:
        """Append a line to a file in one write; start a new line if the last one is incomplete."""
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
    """Yield `attnscale_NUMBER/LAYER` and the value of each layer, if finite; tools group curves by the first part.

    `names=None` yields all statistics, with `attnscale/loss` and `attnscale/lr`. With `heads`, each head also has its
    own curve, `attnscale_NUMBER/LAYER/head_0`.
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
    """Write curves to an event file in a folder, and alarms as text. With `heads`, each head also has its own curve."""

    def __init__(self, folder: str, *, heads: bool = False) -> None:
        _package("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._heads, self._writer = heads, SummaryWriter(folder)
        charts = {name: ["Multiline", [f"^{PREFIX}{name}/"]] for name in logged()}
        self._writer.add_custom_scalars({"attnscale": charts})  # layers share a chart

    def __call__(self, record: Record) -> None:
        """Add a point to every curve; ignores records of other ranks than 0."""
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
    """Log curves over `attnscale/step`, and alarms as alerts. With `heads`, each head also has its own curve."""

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
        # W&B drops values with a step below its own. Pass the training step, so that a loop that logs with it too keeps
        # working, but not if W&B's step is already larger.
        at: dict[str, Any] = {"step": record.step} if record.step >= run.step else {}
        run.log({**dict(scalars(record, heads=self._heads)), STEP: record.step}, **at)
        for group in grouped(record.alarms):
            run.alert(title=f"attnscale: {group.first.code} in {group.first.place}", text=str(group))


class MLflow:
    """Log one metric per layer and statistic at the step of the record, and each alarm as a tag with its step."""

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
    """Replace characters that MLflow does not allow in a name by underscores.

    >>> _allowed("attnscale_spread/layer[3]")
    'attnscale_spread/layer_3_'
    """
    return "".join(sign if sign.isascii() and (sign.isalnum() or sign in "_-./ ") else "_" for sign in name)
