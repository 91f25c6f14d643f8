"""Load, run once, diagnose."""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from attnscale.checking.checked import Checked
from attnscale.diagnose import Audit, diagnose, is_trained
from attnscale.diagnose.unchecked import unchecked
from attnscale.errors import NotFollowedWarning
from attnscale.loading import Loaded, Request, load_model, offline
from attnscale.loading.huggingface import quiet
from attnscale.loading.telling import telling
from attnscale.watching.settings import Settings
from attnscale.watching.watch import watched


def check_model(request: Request, rows: int | None = None, what_if: str | None = None) -> Checked:
    """Check the model asked for: `rows` are looked at per head, all where None; `what_if` names a layer to try on."""
    with offline(), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        loaded = load_model(request)
        audit = _watched(loaded, rows, request)
        request.report("diagnosing")
        notes = (*loaded.notes, *_unfollowed(heard))
        checked = Checked(loaded.title, loaded.fed, request.device, rows, notes, audit, what_if)
        if what_if is not None:
            _ = checked.what_if  # a layer that was not seen is told now
        return checked


def _watched(loaded: Loaded, rows: int | None, request: Request) -> Audit:
    request.report("running the model")
    doing = f"run {loaded.title} on {loaded.fed}"
    settings = Settings(rows, keep=True, may_be_empty=True)
    with quiet(), telling(doing), torch.no_grad(), watched(loaded.model, settings) as seen:
        loaded.model(*loaded.args, **loaded.kwargs)
    found = diagnose(seen.layers, trained=is_trained(loaded.model))
    return replace(found, unchecked=unchecked(seen.layers, seen.overlooked))


def _unfollowed(heard: Iterable[warnings.WarningMessage]) -> Iterator[str]:
    """What watching says of itself is passed on; what a model's own code warns of is not about its attention."""
    for warning in heard:
        if issubclass(warning.category, NotFollowedWarning):
            yield f"{' '.join(str(warning.message).split()).rstrip('.')}."
