"""What a person names -> its portrait: a model as `attnscale check` takes it, a saved check, or a run's log."""

from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscale.comparing.measuring import portray
from attnscale.comparing.portrait import COMPARED, LayerPortrait, Portrait
from attnscale.comparing.saved import is_saved, read
from attnscale.train.log import Damage, choose_run, records_of, scan
from attnscale.train.record import Record

if TYPE_CHECKING:
    from attnscale.checking import Checked
    from attnscale.loading import Request

SAMPLES = 8  # sequences that a model is run on: errors are told from how much they differ
LATEST = 8  # records of a run, each of another batch
BUNDLED = "bundled"
LOGS = ".jsonl"


@dataclass(frozen=True)
class Asked:
    """Something to compare, by name; `request` says how a model is run."""

    name: str
    request: "Request"
    rows: int | None = None

    def portrait(self) -> Portrait:
        """Read it, or load and run it."""
        path, _, run = self.name.partition("#")
        if Path(path).suffix == LOGS:
            return of_run(Path(path), run or None)
        if Path(self.name).is_file() and is_saved(Path(self.name)):
            return read(Path(self.name))
        named = None if self.name == BUNDLED else self.name
        return checked_portrait(replace(self.request, model=named), self.rows)[1]


def checked_portrait(
    request: "Request", rows: int | None = None, what_if: str | None = None
) -> "tuple[Checked, Portrait]":
    """Check a model on several sequences, and keep what each of them showed."""
    from attnscale.checking.checked import check_loaded
    from attnscale.loading import offline
    from attnscale.loading.model_errors import as_model_error, quiet

    checked, loaded = check_loaded(replace(request, samples=SAMPLES), rows, what_if)
    request.report("comparing sequences")
    with offline(), quiet(), as_model_error(f"run {loaded.title} on {loaded.input_description}"):
        known: dict[str, Any] = {"title": checked.title, "fed": checked.fed, "rows": rows}
        return checked, portray(loaded.model, loaded.args, loaded.kwargs, checked.audit, **known)


def of_run(path: Path, name: str | None = None) -> Portrait:
    """The latest records of a run, each a sample, with all alarms that were raised."""
    run = choose_run(scan(path, lambda record: None, Damage()), name)
    latest, alarms = deque[Record](maxlen=LATEST), []
    for record in records_of(path, run):
        alarms += record.alarms
        latest.append(record)
    title = f"{path}{'' if run.name is None else f' ({run.name})'}"
    fed = f"its {len(latest)} records from step {latest[0].step} to {latest[-1].last_step}"
    layers = {layer: _layer([record for record in latest if layer in record.layers], layer) for layer in _names(latest)}
    found = {(alarm.layer, alarm.head, alarm.code): alarm for alarm in alarms}
    return Portrait(title, fed, {name: layer for name, layer in layers.items() if layer.heads}, tuple(found.values()))


def _names(records: deque[Record]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record.layers))


def _layer(records: list[Record], layer: str) -> LayerPortrait:
    last = records[-1].layers[layer].numbers
    heads = len(next(iter(last.values()), ()))
    missing = [float("nan")] * heads
    samples = {}
    for name in (each for each in COMPARED if each in last):
        rows = [record.layers[layer].numbers.get(name, missing) for record in records]
        samples[name] = np.array([row for row in rows if len(row) == heads], dtype=np.float64)
    return LayerPortrait(samples if len({numbers.shape for numbers in samples.values()}) == 1 else {})
