"""Load, run once, diagnose."""

import warnings
from collections.abc import Iterable, Iterator

from attnscale.checking.checked import Checked
from attnscale.diagnose import Audit, audited
from attnscale.errors import NotFollowedWarning
from attnscale.loading import Loaded, Request, load_model, offline
from attnscale.loading.fetching import fetch
from attnscale.loading.huggingface import quiet
from attnscale.loading.telling import telling

# Shares of tokens that the model has no word for: from where it is told, and from where trained scores are not judged.
TOLD, UNJUDGED = 0.05, 0.30


def check_model(request: Request, rows: int | None = None, what_if: str | None = None) -> Checked:
    """Check the model asked for: `rows` are looked at per head, all where None; `what_if` names a layer to try on."""
    return check_loaded(request, rows, what_if)[0]


def check_loaded(request: Request, rows: int | None = None, what_if: str | None = None) -> tuple[Checked, Loaded]:
    """The same, and the model with its inputs, to run it again."""
    if request.download:
        fetch(request)
    with offline(), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        loaded = load_model(request)
        audit = _watched(loaded, rows, request)
        request.report("diagnosing")
        notes = (*_told_first(loaded.unknown), *loaded.notes, *_unfollowed(heard))
        checked = Checked(loaded.title, loaded.fed, request.device, rows, notes, audit, what_if)
        if what_if is not None:
            _ = checked.what_if  # a layer that was not seen is told now
        return checked, loaded


def _watched(loaded: Loaded, rows: int | None, request: Request) -> Audit:
    request.report("running the model")
    doing = f"run {loaded.title} on {loaded.fed}"
    with quiet(), telling(doing):
        return audited(loaded.model, loaded.args, loaded.kwargs, rows=rows, unlike=_unlike(loaded.unknown))


def _unlike(unknown: float) -> str:
    """Why what a trained model does with these tokens says nothing; empty where it does."""
    if unknown <= UNJUDGED:
        return ""
    return f"{unknown:.0%} of the tokens are unknown to the model, so its scores on them are not judged; give --text."


def _told_first(unknown: float) -> tuple[str, ...]:
    told = f"{unknown:.0%} of the tokens are unknown to the model: give it a text of its own kind (--text, --data)."
    return (told,) if unknown > TOLD else ()


def _unfollowed(heard: Iterable[warnings.WarningMessage]) -> Iterator[str]:
    """What watching says of itself is passed on; what a model's own code warns of is not about its attention."""
    for warning in heard:
        if issubclass(warning.category, NotFollowedWarning):
            yield f"{' '.join(str(warning.message).split()).rstrip('.')}."
