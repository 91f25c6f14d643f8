"""Sinks: where records go. Any callable that takes a Record is one; some have names."""

from collections.abc import Callable, Iterator
from pathlib import Path

from attnscale.errors import SettingError
from attnscale.train.jsonlines import JsonLines
from attnscale.train.record import NUMBERS, Record

Sink = Callable[[Record], None]
NAMED = "a path of a .jsonl file, 'tensorboard:DIR', 'wandb', 'table', or any callable"


def sink_from(given: str | Path | Sink) -> Sink:
    """The sink of a name: a path of a .jsonl file, `tensorboard:DIR`, `wandb`, `table`; a callable is one already."""
    if callable(given):
        return given
    if not isinstance(given, (str, Path)):
        raise SettingError(f"Expected a sink as {NAMED}, got {type(given).__name__}.")
    kind, _, argument = str(given).partition(":")
    if kind == "tensorboard" and argument:
        from attnscale.train.tensorboard import TensorBoard

        return TensorBoard(argument)
    if given == "wandb":
        from attnscale.train.wandb import WeightsAndBiases

        return WeightsAndBiases()
    if given == "table":
        from attnscale.train.live_table import LiveTable

        return LiveTable()
    if isinstance(given, Path) or str(given).endswith((".jsonl", ".json")):
        return JsonLines(given)
    raise SettingError(f"Expected a sink as {NAMED}, got {given!r}.")


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """`attnscale/LAYER/NUMBER` and its value over the heads, for tools that draw curves."""
    for layer, found in record.layers.items():
        for name in NUMBERS:
            if name in found.numbers:
                yield f"attnscale/{layer}/{name}", found.whole(name)
