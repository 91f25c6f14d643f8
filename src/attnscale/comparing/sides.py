"""Turn each side of a comparison into a profile: a model, its name, a saved check or the log of a run."""

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from torch import nn

from attnscale.comparing.backend_comparison import BackendComparison
from attnscale.comparing.backends import compare_backends, require_backends
from attnscale.comparing.comparison import TOLERANCE, Comparison, compare_profiles, require_tolerance
from attnscale.comparing.profiles import (
    COMPARED,
    LayerProfile,
    Profile,
    is_saved,
    measure_profile,
    read_profile,
    save_profile,
)  # fmt: skip
from attnscale.diagnose import audited
from attnscale.errors import SettingError
from attnscale.train.record import Record
from attnscale.train.run import survey

if TYPE_CHECKING:
    from attnscale.checking import Checked
    from attnscale.loading import Request

Side: TypeAlias = str | Path | nn.Module | Profile
SAMPLES = 8  # sequences to run a model on; their variance gives the error of a change
LATEST = 8  # latest records of a run; each is a sample from another batch
BUNDLED = "bundled"
LOGS = ".jsonl"


def compare(
    a: Side, b: Side, *args: Any, tolerance: float = TOLERANCE, rows: int | None = None, **kwargs: Any
) -> Comparison:
    """Compare `a` with `b`, head by head, with error bars.

    Each side is a model, run as model(*args, **kwargs) with every sequence of the batch as a sample; the name of a
    model, as in `attnscale check`; or a file: a saved check, or the log of a run, LOG.jsonl or LOG.jsonl#RUN.
    """
    require_tolerance(tolerance)
    names = ("the first model", "the second model")
    sides = [profile_of(side, name, args, kwargs, rows) for side, name in zip((a, b), names, strict=True)]
    return compare_profiles(sides[0], sides[1], tolerance)


def check_against(
    request: "Request",
    rows: int | None,
    what_if: str | None,
    save_as: Path | None,
    baseline: Path | None,
    tolerance: float,
) -> "tuple[Checked, Comparison | None]":
    """Check a model; save its profile to one file, and compare it with the profile saved in another."""
    require_tolerance(tolerance)
    before = None if baseline is None else read_profile(baseline)
    checked, profile = _checked_profile(request, rows, what_if)
    if save_as is not None:
        save_profile(profile, save_as)
    return checked, None if before is None else compare_profiles(before, profile, tolerance)


def profile_of(side: Side, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int | None) -> Profile:
    """Return the profile of a side of compare(): measured, or read from its file."""
    if isinstance(side, Profile):
        return side
    if isinstance(side, nn.Module):
        if not args and not kwargs:
            raise SettingError("Expected inputs to run the models on, as compare(a, b, batch), got none.")
        audit = audited(side, args, kwargs, rows=rows)
        return measure_profile(side, args, kwargs, audit, title=name, fed="the batch given", rows=rows)
    if not isinstance(side, str | Path):
        raise SettingError(f"Expected a model, its name, or a file to compare, got {type(side).__name__}.")
    from attnscale.loading import Request

    return profile_by_name(str(side), Request(), rows)


def profile_by_name(name: str, request: "Request", rows: int | None = None) -> Profile:
    """Read a log or a saved check, or load and run a model with the settings of `request`."""
    path, _, run = name.partition("#")
    if Path(path).suffix == LOGS:
        return _profile_of_run(Path(path), run or None)
    if Path(name).is_file() and is_saved(Path(name)):
        return read_profile(Path(name))
    return _checked_profile(replace(request, model=None if name == BUNDLED else name), rows)[1]


def compare_by_name(a: str, b: str, request: "Request", rows: int | None, tolerance: float) -> Comparison:
    """Compare two sides by their names on the command line."""
    require_tolerance(tolerance)
    before, after = (profile_by_name(name, request, rows) for name in (a, b))
    return compare_profiles(before, after, tolerance)


def backends_by_name(
    name: str, request: "Request", backends: tuple[str, ...], rows: int | None = None
) -> BackendComparison:
    """Load a model, and run it with each of these attention implementations."""
    from attnscale.loading import load_model, offline

    require_backends(backends)
    with offline():
        loaded = load_model(replace(request, model=None if name == BUNDLED else name))
        request.report("running the model with each backend")
        found = compare_backends(loaded.model, loaded.kwargs or loaded.args, backends, rows=rows)
    return replace(found, title=loaded.title, fed=loaded.input_description, notes=(*loaded.notes, *found.notes))


def _checked_profile(
    request: "Request", rows: int | None = None, what_if: str | None = None
) -> "tuple[Checked, Profile]":
    from attnscale.checking.checked import check_loaded
    from attnscale.loading import offline
    from attnscale.loading.model_errors import as_model_error, quiet

    checked, loaded = check_loaded(replace(request, samples=SAMPLES), rows, what_if)
    request.report("comparing sequences")
    with offline(), quiet(), as_model_error(f"run {loaded.title} on {loaded.input_description}"):
        texts: dict[str, Any] = {"title": checked.title, "fed": checked.fed}
        return checked, measure_profile(loaded.model, loaded.args, loaded.kwargs, checked.audit, rows=rows, **texts)


def _profile_of_run(path: Path, name: str | None = None) -> Profile:
    """Return the profile of a run: its latest records as samples, and all of its alarms as findings."""
    log = survey(path, name)
    run, latest, alarms = log.chosen, deque[Record](maxlen=LATEST), []
    for record in log.records():
        alarms += record.alarms
        latest.append(record)
    title = f"{path}{'' if run.name is None else f' ({run.name})'}"
    fed = f"its {len(latest)} records from step {latest[0].step} to {latest[-1].step}"
    names = dict.fromkeys(name for record in latest for name in record.layers)
    layers = {name: _layer_of_records([record for record in latest if name in record.layers], name) for name in names}
    found = {(alarm.layer, alarm.head, alarm.code): alarm for alarm in alarms}
    return Profile(title, fed, {name: layer for name, layer in layers.items() if layer.heads}, tuple(found.values()))


def _layer_of_records(records: list[Record], layer: str) -> LayerProfile:
    last = records[-1].layers[layer].numbers
    heads = len(next(iter(last.values()), ()))
    missing = [float("nan")] * heads
    samples = {}
    for name in (each for each in COMPARED if each in last):
        rows = [record.layers[layer].numbers.get(name, missing) for record in records]
        samples[name] = np.array([row for row in rows if len(row) == heads], dtype=np.float64)
    return LayerProfile(samples if len({numbers.shape for numbers in samples.values()}) == 1 else {})
