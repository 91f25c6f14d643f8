"""What QK-Clip took from the scores of a model so far: whoever follows their growth must know it."""

from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakMethod

import numpy as np
from numpy.typing import NDArray
from torch import nn

from attnscale.acting.clip import ClipReport
from attnscale.watching.running import uncompiled

Logs = dict[str, NDArray[np.float64]]  # of the factors of each head, by layer

_TAKEN: WeakKeyDictionary[nn.Module, dict[tuple[str, int], float]] = WeakKeyDictionary()
_FETCHING: WeakKeyDictionary[nn.Module, "WeakMethod[Callable[[], object]]"] = WeakKeyDictionary()


def arrives_by(model: nn.Module, fetch: Callable[[], object]) -> None:
    """Reports of this model may be on their way from a device; `fetch`, a method, waits for them."""
    _FETCHING[model] = WeakMethod(fetch)


def note_taken(model: nn.Module, report: ClipReport) -> None:
    """Heads of a model were clipped."""
    logs = _TAKEN.setdefault(model, {})
    for head in report.heads:
        key = head.layer, head.head
        logs[key] = logs.get(key, 0.0) + float(np.log(head.gamma))


def taken_from(model: nn.Module) -> dict[tuple[str, int], float]:
    """Logarithms of what scores were multiplied by, by layer and head, as layers are called in this model."""
    for fetch in list(_FETCHING.values()):
        method = fetch()
        if method is not None:
            method()
    found: dict[tuple[str, int], float] = {}
    for clipped, logs in list(_TAKEN.items()):
        before, surplus = _prefix(clipped, model), _prefix(model, clipped)
        for (layer, head), factor in logs.items() if (before, surplus) != (None, None) else ():
            name = f"{before}{layer}" if before is not None else layer.removeprefix(surplus or "")
            found[name, head] = found.get((name, head), 0.0) + factor
    return found


def _prefix(inner: nn.Module, outer: nn.Module) -> str | None:
    """What stands before the names of a model's layers in another that holds it; None where that does not."""
    found = (uncompiled(path) for path, module in outer.named_modules() if module is inner)
    path = next(found, None)
    return path if not path else f"{path}."
