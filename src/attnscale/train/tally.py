"""Tallies: sums over each layer on one rank in a step. They merge over calls and ranks, and records are made from them.

A tally is a float64 tensor, (heads, WIDTH): counts, means and sums of ScoreStats, then scales and squared norms
weighted by their number of rows, then squared gradient norms.
"""

import math
import pickle
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.measure.pooled import NUMBERS as POOLED_NUMBERS
from attnscale.measure.pooled import SUMS, Pooled, merged
from attnscale.measure.statistics import logged
from attnscale.measure.stats import ScoreStats, merged_when_read
from attnscale.probes.calls import BOUND, COLUMNS, POOLED, ProbedCall, pooled_columns, score_bound
from attnscale.train.record import LayerRecord
from attnscale.watching.layer import Layer
from attnscale.watching.seen import Seen

WEIGHTED = ("scale", "query_norm", "key_norm", "cosine")  # means over rows, of squares except for the scale
ADDED = ("query_gradient", "key_gradient", "ranks")
WIDTH = POOLED + len(WEIGHTED) + len(ADDED)
ROWS = SUMS.index("rows")

Array = NDArray[np.float64]
Key = tuple[str, int, int]  # layer, index of the part of its heads (tensor parallel), number of heads
Tallies = dict[Key, Tensor]
Layers = Mapping[str, Layer | Sequence[ProbedCall]]


class MergedStats(ScoreStats):
    """Statistics over the rows of several ranks, without standard errors, since ranks do not exchange them."""

    def stderr(self, name: str) -> Tensor:
        """Return NaN, since the error is unknown."""
        return torch.full_like(self.mean, torch.nan)


class PendingTallies:
    """Tallies of a step, read from the GPU on request.

    Buffers of probed calls are already being copied to the host. Traced layers are copied on request.
    """

    def __init__(self, layers: Layers, part: int) -> None:
        self._probed = {name: layer for name, layer in layers.items() if isinstance(layer, Sequence)}
        self._traced = {name: layer for name, layer in layers.items() if not isinstance(layer, Sequence)}
        heads = {name: layer[0].heads for name, layer in self._probed.items()}
        heads |= {name: layer.heads for name, layer in self._traced.items()}
        self._keys: dict[str, Key] = {name: (name, part, heads[name]) for name in layers}
        self._hosts = {id(call.host): call.host for calls in self._probed.values() for call in calls}

    @classmethod
    def of(cls, seen: Seen, part: int) -> "PendingTallies":
        """Return the tallies of the layers measured in a step."""
        layers = {
            name: calls if isinstance(calls[0], ProbedCall) else seen.layer_of(name, path, calls)
            for name, (path, calls) in seen.calls_by_layer().items()
        }
        return cls(layers, part)  # type: ignore[arg-type]

    @property
    def has_arrived(self) -> bool:
        """True if tallies() would not wait."""
        return all(host is not None and host.has_arrived for host in self._hosts.values())

    def tallies(self) -> Tallies:
        """Return the tallies; waits for a GPU."""
        found = _of_probed({self._keys[name]: calls for name, calls in self._probed.items()})
        found |= {self._keys[name]: _of_traced(layer) for name, layer in self._traced.items()}
        return {key: found[key] for key in self._keys.values()}

    def stats(self) -> dict[str, ScoreStats]:
        """Return the statistics of each layer, with their standard errors."""
        return {name: layer.stats for name, layer in self._traced.items()} | {
            name: merged_when_read([call.statistics for call in calls]) for name, calls in self._probed.items()
        }


@np.errstate(all="ignore")
def _packed(pooled: Array, columns: Sequence[Array], gradients: Sequence[Array]) -> Tensor:
    """Return tallies from pooled rows, the columns scale, ‖q‖², ‖k‖² and cos² of the heads, and squared gradients."""
    rows = pooled[:, len(POOLED_NUMBERS) + ROWS]
    weighted = np.where(rows > 0, np.stack([*columns]) * rows, 0.0)
    added = np.stack([*gradients, np.ones_like(rows)])
    return torch.from_numpy(np.concatenate([pooled, np.concatenate([weighted, added]).T], axis=1))


@np.errstate(all="ignore")
def _of_probed(layers: Mapping[Key, Sequence[ProbedCall]]) -> Tallies:
    """Return the tallies of probed calls, from the buffers on the host: all calls of all layers at once."""
    calls = [call for some in layers.values() for call in some]
    if not calls:
        return {}
    heads, columns = [call.heads for call in calls], np.concatenate([call.columns for call in calls])
    pooled, lengths, gradients, scales = np.split(columns, np.cumsum(COLUMNS)[:-1], axis=1)
    factors = np.concatenate([call.factors for call in calls], axis=1)
    known = np.repeat([call.has_gradients for call in calls], heads, axis=0)
    by_lengths = np.repeat([call.needs_bound for call in calls], heads)
    multiplier = np.repeat([math.nan if call.multiplier is None else call.multiplier for call in calls], heads)
    bound = np.where(by_lengths, score_bound(multiplier, lengths[:, 2], lengths[:, 5]), -math.inf)
    pooled[:, BOUND] = np.maximum(pooled[:, BOUND], bound)
    scale = np.abs(np.where(np.isnan(multiplier), scales[:, 0], multiplier * factors.prod(0)))
    squares = (lengths[:, ::3] / lengths[:, 1::3].clip(min=1.0)).T / np.square(factors)
    reached = list(np.where(known, gradients[:, ::3], 0.0).T)
    no_cosine = np.full_like(scale, math.nan)  # records() computes it from the spread
    packed = iter(_packed(pooled, (scale, *squares, no_cosine), reached).split(heads))
    found = {key: added([next(packed) for _ in some]) for key, some in layers.items()}
    for key, some in layers.items():
        if len(some) > 1:
            found[key][:, -1] = 1.0  # all calls are from one rank
        for side in range(2):
            if not any(call.has_gradients[side] for call in some):
                found[key][:, side - len(ADDED)] = math.nan
    return found


def _of_traced(layer: Layer) -> Tensor:
    """Return the tally of a traced layer, with NaN for unknown numbers."""
    missing = np.full(layer.heads, math.nan)
    names = ("query_norm", "key_norm", "cosine", "query_gradient", "key_gradient")
    norms = (getattr(layer, name) for name in names)
    squares = [missing if norm is None else np.square(norm.double().cpu().numpy()) for norm in norms]
    pooled, scale = pooled_columns([layer.stats.pooled]).cpu().numpy(), layer.scales.double().abs().cpu().numpy()
    return _packed(pooled, (scale, *squares[:3]), squares[3:])


def pooled_of(tally: Tensor) -> Pooled:
    """Return the pooled rows of a tally."""
    numbers, sums = tally[:, :POOLED].split([len(POOLED_NUMBERS), len(SUMS)], dim=-1)
    rows, count, mean, largest, bound, above = numbers.unbind(-1)
    return Pooled(rows.to(torch.int64), count.to(torch.int64), mean, largest, bound, above, sums, None)


def added(tallies: Sequence[Tensor]) -> Tensor:
    """Return the sum of several tallies."""
    if len(tallies) == 1:
        return tallies[0]
    pooled = pooled_columns([merged([pooled_of(tally) for tally in tallies])])
    return torch.cat([pooled, torch.stack([tally[:, POOLED:] for tally in tallies]).sum(0)], dim=-1)


def merge(parts: Iterable[Tallies]) -> Tallies:
    """Merge the tallies of all parts, adding those with equal keys."""
    found: dict[Key, list[Tensor]] = {}
    for part in parts:
        for key, tally in part.items():
            found.setdefault(key, []).append(tally)
    return {key: added(tallies) for key, tallies in found.items()}


def whole_layers(tallies: Tallies) -> dict[str, Tensor]:
    """Return tallies by layer name, with the parts of the heads concatenated."""
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for (name, part, _), tally in tallies.items():
        parts.setdefault(name, []).append((part, tally))
    return {
        name: torch.cat([tally for _, tally in sorted(found, key=lambda pair: pair[0])])
        for name, found in parts.items()
    }


def to_bytes(tallies: Tallies) -> bytes:
    """Serialise tallies for other ranks of this job."""
    return pickle.dumps([(key, tally.numpy()) for key, tally in tallies.items()])


def from_bytes(payload: bytes) -> Tallies:
    """Deserialise the tallies of another rank of this job."""
    return {key: torch.from_numpy(numbers) for key, numbers in pickle.loads(payload)}


def records(layers: Mapping[str, Tensor]) -> dict[str, LayerRecord]:
    """Return the record of every layer, computed for all heads at once.

    Gradients are those of the loss averaged over ranks, as in data-parallel training: each rank's own gradient is
    divided by the number of ranks.
    """
    if not layers:
        return {}
    whole = torch.cat(list(layers.values()))
    pooled = pooled_of(whole)
    stats, rows = ScoreStats(len(whole), exact=False, pool=pooled), pooled.sums[:, ROWS]
    has_rows = rows > 0
    weighted, summed = whole[:, POOLED:].split([len(WEIGHTED), len(ADDED)], dim=-1)
    scale, *squares = (weighted / torch.where(has_rows, rows, torch.nan)[:, None]).unbind(-1)
    query_norm, key_norm, cosine = (square.sqrt() for square in squares)
    query_gradient, key_gradient = (summed[:, :2].sqrt() / summed[:, 2:]).unbind(-1)
    size = (stats.variance + stats.mean.square()).sqrt()
    computed = (size / (scale * query_norm * key_norm).clamp(min=1e-300)).clamp(max=1.0)
    of_layer = {
        "scale_applied": scale, "query_norm": query_norm, "key_norm": key_norm,
        "alignment": torch.where(cosine.isnan(), computed, cosine),
        "query_gradient": query_gradient, "key_gradient": key_gradient,
    }  # fmt: skip
    names = logged()
    of_head = [of_layer[name] if entry.attribute is None else entry.of(stats) for name, entry in names.items()]
    keys, *values = torch.where(has_rows, torch.stack([stats.keys, *of_head]), torch.nan).numpy().tolist()
    looked_at, broken = torch.stack([pooled.rows, has_rows & ~torch.isfinite(stats.std)]).tolist()
    found, end = dict[str, LayerRecord](), 0
    for layer, tally in layers.items():
        at = slice(end, end := end + len(tally))
        numbers = {name: every[at] for name, every in zip(names, values, strict=True)}
        for name, entry in names.items():
            if entry.may_be_unknown and all(map(math.isnan, numbers[name])):
                del numbers[name]
        known = [own for own in keys[at] if math.isfinite(own)]
        mean = math.fsum(known) / len(known) if known else None
        found[layer] = LayerRecord(sum(looked_at[at]), numbers, sum(broken[at]), keys=mean)
    return found
