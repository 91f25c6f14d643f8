"""What clipping did to a model so far: how much it took from each head, and which measurements are stale since."""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from attnscale.measure.stats import ScoreStats
from attnscale.module_paths import without_wrappers
from attnscale.watching.layer import Layer

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
    found: dict[tuple[str, int], float] | None = None
    for clipped in list(_TAKEN):
        before, surplus = ("", None) if clipped is model else (_prefix(clipped, model), _prefix(model, clipped))
        if (before, surplus) == (None, None):
            continue  # another model, whose reports are not waited for
        fetch = _FETCHING.get(clipped, lambda: None)()
        if fetch is not None:
            fetch()
        found = {} if found is None else found
        for (layer, head), factor in _TAKEN[clipped].items():
            name = f"{before}{layer}" if before is not None else layer.removeprefix(surplus or "")
            found[name, head] = found.get((name, head), 0.0) + factor
    return found


def _prefix(inner: nn.Module, outer: nn.Module) -> str | None:
    """What stands before the names of a model's layers in another that holds it; None where that does not."""
    found = (without_wrappers(path) for path, module in outer.named_modules() if module is inner)
    path = next(found, None)
    return path if not path else f"{path}."


# of a measurement, by its identity: each parameter that was changed by it, and the heads that this changed
_CHANGED: MutableMapping[ScoreStats, list[tuple["weakref.ref[Tensor]", frozenset[int]]]] = WeakIdKeyDictionary()


def fresh_maxima(layer: Layer, parameters: Mapping[str, Tensor]) -> Tensor:
    """The largest score and its bound, (2, heads), over the calls since a head was last changed; −∞ where none is."""
    measured = layer.measured or (layer.stats,)
    stale = [_stale_heads(stats, parameters) for stats in measured]
    if not any(stale):
        return _maxima(layer.stats)
    found = torch.full((2, layer.heads), -torch.inf, dtype=torch.float64)
    for stats, heads in zip(measured, stale, strict=True):
        of_call = _maxima(stats)
        of_call[:, sorted(heads)] = -torch.inf
        found = torch.maximum(found, of_call)
    return found


def note_changed(layer: Layer, heads: Iterable[tuple[Tensor, Iterable[int]]]) -> None:
    """Parameters were changed, each for some heads, by what was measured of this layer."""
    changed = [(weakref.ref(parameter), frozenset(numbers)) for parameter, numbers in heads]
    for stats in layer.measured or (layer.stats,):
        _CHANGED.setdefault(stats, []).extend(changed)


def _stale_heads(stats: ScoreStats, parameters: Mapping[str, Tensor]) -> set[int]:
    """Heads that this measurement changed, in a model with these parameters: a copy of it is as it was."""
    changed = _CHANGED.get(stats)
    if changed is None:
        return set()
    here = {id(parameter) for parameter in parameters.values()}
    return {head for parameter, heads in changed if id(parameter()) in here for head in heads}


def _maxima(stats: ScoreStats) -> Tensor:
    return torch.stack([stats.max, stats.max_bound]).double().cpu()
