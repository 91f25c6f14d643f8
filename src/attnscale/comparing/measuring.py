"""A model and its inputs -> its portrait: every sequence of the batch is run alone, and is one sample."""

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnscale.comparing.making import made_by
from attnscale.comparing.portrait import SHARES, LayerPortrait, Numbers, Portrait
from attnscale.diagnose import Audit
from attnscale.measure.statistics import STATISTICS
from attnscale.watching.layer import Layer
from attnscale.watching.settings import Settings
from attnscale.watching.watch import watched

Call = tuple[tuple[Any, ...], dict[str, Any]]
OF_STATS = ("spread", *SHARES)
OF_LAYERS = {"scale": "scales", "query_norm": "query_norm", "key_norm": "key_norm", "alignment": "alignment"}
ONE = "It was run on one sequence, from which no error can be told: a batch of several tells it."


def portray(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    audit: Audit,
    *,
    title: str,
    fed: str,
    rows: int | None = None,
    notes: tuple[str, ...] = (),
) -> Portrait:
    """The portrait of a model that was audited on these inputs; `rows` are looked at per head, all where None."""
    calls = _apart(tuple(args), dict(kwargs))
    seen = [_seen(model, call, rows) for call in calls]
    if len(calls) > 1 and not _is_the_same(audit.layers, seen):
        calls = [(tuple(args), dict(kwargs))]
        seen = [_seen(model, calls[0], rows)]
    made = made_by(model, seen[0])
    layers = {name: _layer([each[name] for each in seen if name in each], made[name]) for name in seen[0]}
    told = (*notes, ONE) if len(calls) == 1 else notes
    return Portrait(title, fed, layers, tuple(audit.findings), _digest(calls), told)


def _seen(model: nn.Module, call: Call, rows: int | None) -> Mapping[str, Layer]:
    with warnings.catch_warnings(), torch.no_grad(), watched(model, Settings(rows, may_be_empty=True)) as seen:
        warnings.simplefilter("ignore")  # what there is to say was said by the audit
        model(*call[0], **call[1])
    return seen.layers


def _layer(seen: Sequence[Layer], made: tuple[str, ...]) -> LayerPortrait:
    numbers = {name: [_host(STATISTICS[name].of(layer.stats)) for layer in seen] for name in OF_STATS}
    numbers |= {name: [_host(getattr(layer, own)) for layer in seen] for name, own in OF_LAYERS.items()}
    return LayerPortrait({name: np.stack(values) for name, values in numbers.items()}, made)


def _host(values: Tensor) -> Numbers:
    found: Numbers = values.detach().double().cpu().numpy()
    return found


def _is_the_same(whole: Mapping[str, Layer], apart: Sequence[Mapping[str, Layer]]) -> bool:
    """Whether what was cut apart were sequences: each has as many queries and keys as the batch, and none is lost."""
    for name, layer in whole.items():
        parts = [each.get(name) for each in apart]
        sizes = {None if part is None else (part.heads, part.query_len, part.key_len) for part in parts}
        if sizes != {(layer.heads, layer.query_len, layer.key_len)}:
            return False
        if sum(part.queries for part in parts if part is not None) != layer.queries:
            return False
    return True


def _apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
    """The calls of single sequences, where every tensor has as many along its first axis; else the one call."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in _tensors((args, kwargs))}
    if len(sizes) != 1 or (size := sizes.pop()) < 2:
        return [(args, kwargs)]
    return [_part((args, kwargs), slice(index, index + 1)) for index in range(size)]


def _part(value: Any, which: slice) -> Any:
    if isinstance(value, Tensor):
        return value[which]
    if type(value) is dict:
        return {name: _part(entry, which) for name, entry in value.items()}
    return type(value)(_part(entry, which) for entry in value) if type(value) in (list, tuple) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)


def _digest(calls: Sequence[Call]) -> str:
    found = hashlib.sha256()
    for tensor in _tensors(calls):
        found.update(f"{tuple(tensor.shape)}".encode())
        found.update(tensor.detach().double().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
