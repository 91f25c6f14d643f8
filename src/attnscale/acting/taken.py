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
        place = _place(clipped, model)
        for (layer, head), factor in logs.items() if place is not None else ():
            name = f"{place}{layer}" if isinstance(place, str) else layer.removeprefix(place[0])
            found[name, head] = found.get((name, head), 0.0) + factor
    return found


def _place(clipped: nn.Module, model: nn.Module) -> str | tuple[str] | None:
    """What stands before the names of a clipped model's layers in another that holds it, or, (…,), the other way."""
    for outer, inner in ((model, clipped), (clipped, model)):
        for path, module in outer.named_modules():
            if module is inner:
                prefix = f"{uncompiled(path)}." if uncompiled(path) else ""
                return prefix if outer is model else (prefix,)
    return None
