"""Which measurements still tell of the parameters as they are: a head that was clipped must be measured again.

A monitor keeps its last sampled step until the next, and clipping is called at every one between.
"""

import weakref
from collections.abc import Iterable, Mapping, MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from attnscale.measure.stats import ScoreStats
from attnscale.watching.layer import Layer

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
