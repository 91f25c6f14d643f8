"""Sinks: where records go. Any callable that takes a Record is one; those in SINKS have names."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from attnscale.errors import SettingError
from attnscale.extras import needing
from attnscale.train.record import Record
from attnscale.train.sinks.jsonlines import JsonLines

Sink = Callable[[Record], None]

# How a sink is asked for, with its argument in capitals where it takes one, and the class that is made then and not
# before: some need packages that nobody else does, and one stands in a room that is built on this one.
SINKS = {
    "tensorboard:DIR": "attnscale.train.sinks.tensorboard:TensorBoard",
    "wandb": "attnscale.train.sinks.wandb:WeightsAndBiases",
    "mlflow": "attnscale.train.sinks.mlflow:MLflow",
    "table": "attnscale.show.live_table:LiveTable",
}
LOGS = (".jsonl", ".json")  # what the path of a log ends in


def sink_from(given: str | Path | Sink) -> Sink:
    """The sink of a name in SINKS, or of the path of a .jsonl file; a callable is one already."""
    if callable(given):
        return given
    if not isinstance(given, (str, Path)):
        raise SettingError(f"Expected a sink as {known_sinks()}, got {type(given).__name__}.")
    name, _, argument = str(given).partition(":")
    for written, home in SINKS.items():
        known, _, takes = written.partition(":")
        if isinstance(given, str) and name == known and bool(argument) == bool(takes):
            return _made(home, *[argument] * bool(takes))
    if isinstance(given, Path) or given.endswith(LOGS):
        return JsonLines(given)
    raise SettingError(f"Expected a sink as {known_sinks()}, got {given!r}.")


def known_sinks() -> str:
    """Every way to ask for a sink, in words."""
    return ", ".join(["a path of a .jsonl file", *map(repr, SINKS)]) + ", or any callable"


def _made(home: str, *arguments: str) -> Sink:
    module, _, name = home.partition(":")
    with needing("This sink"):
        sink: Sink = getattr(import_module(module), name)(*arguments)
    return sink
