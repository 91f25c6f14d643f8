"""What QK-Clip took from the scores of a model so far: whoever follows their growth must know it."""

import math
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary, WeakMethod

from torch import nn

from attnscale.watching.running import uncompiled

_TAKEN: WeakKeyDictionary[nn.Module, dict[tuple[str, int], float]] = WeakKeyDictionary()
_FETCHING: WeakKeyDictionary[nn.Module, "WeakMethod[Callable[[], object]]"] = WeakKeyDictionary()


def arrives_by(model: nn.Module, fetch: Callable[[], object]) -> None:
    """Reports of this model may be on their way from a device; `fetch`, a method, waits for them."""
    note_taken(model, ())
    _FETCHING[model] = WeakMethod(fetch)


def note_taken(model: nn.Module, factors: Iterable[tuple[str, int, float]]) -> None:
    """A clip is at work at a model, and multiplied the scores of these layers and heads."""
    logs = _TAKEN.setdefault(model, {})
    for layer, head, factor in factors:
        logs[layer, head] = logs.get((layer, head), 0.0) + math.log(factor)


def taken_from(model: nn.Module) -> dict[tuple[str, int], float] | None:
    """Logarithms of what scores were multiplied by, by layer and head, as layers are called in this model.

    None where no clip was ever at work.
    """
    for fetch in list(_FETCHING.values()):
        method = fetch()
        if method is not None:
            method()
    found: dict[tuple[str, int], float] | None = None
    for clipped, logs in list(_TAKEN.items()):
        before, surplus = _prefix(clipped, model), _prefix(model, clipped)
        if (before, surplus) == (None, None):
            continue
        found = {} if found is None else found
        for (layer, head), factor in logs.items():
            name = f"{before}{layer}" if before is not None else layer.removeprefix(surplus or "")
            found[name, head] = found.get((name, head), 0.0) + factor
    return found


def _prefix(inner: nn.Module, outer: nn.Module) -> str | None:
    """What stands before the names of a model's layers in another that holds it; None where that does not."""
    found = (uncompiled(path) for path, module in outer.named_modules() if module is inner)
    path = next(found, None)
    return path if not path else f"{path}."
