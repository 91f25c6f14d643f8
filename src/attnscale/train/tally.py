"""Tally: what one rank saw of one layer in one step, as sums that add up over ranks, and as bytes that travel.

Scores keep the counts, means and sums of ScoreStats, 24 float64 a head; where an alarm is near also what the errors of
the numbers are told from that raise it, 41 more. Norms and multipliers are weighted by the rows they stand for.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from attnscale.measure.pooled import NUMBERS as POOLED_NUMBERS
from attnscale.measure.pooled import SUMS, Pooled, merged
from attnscale.measure.stats import ScoreStats, merged_when_read
from attnscale.probes.calls import COLUMNS, POOLED, ProbedCall, pooled_columns
from attnscale.train.merged_errors import ERRORS, NO_FLOORS, Floors, MergedStats, errors_of, is_near, summed
from attnscale.watching.layer import Layer
from attnscale.watching.seen import LayerNumbers, Seen

WEIGHTED = ("scale", "query_norm", "key_norm", "cosine")  # means over rows, of squares but for the scale
ADDED = ("query_gradient", "key_gradient", "ranks")
WIDTH = POOLED + len(WEIGHTED) + len(ADDED)
ROWS = SUMS.index("rows")


Key = tuple[str, int, int]  # layer, part (of its heads, where ranks share them out), heads


@dataclass(frozen=True)
class Tally:
    """Sums over the rows of one layer, all those of a head in one row: (heads, WIDTH) in float64."""

    packed: Tensor
    errors: Tensor | None = None  # what merged_errors tells; None where a rank does not know it

    @classmethod
    def of(cls, pooled: Pooled | Tensor, columns: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> "Tally":
        """Rows that were pooled, with the multiplier, ‖q‖², ‖k‖² and cos² of their heads, and squares of gradients.

        Rows are given as Pooled, or as its columns, (heads, POOLED).
        """
        own = pooled if isinstance(pooled, Tensor) else pooled_columns([pooled])
        rows = own[:, len(POOLED_NUMBERS) + ROWS]
        weighted = torch.where(rows > 0, torch.stack([*columns]).double() * rows, 0.0)
        nothing = torch.full_like(rows, math.nan)
        added = torch.stack([*(nothing if each is None else each for each in gradients), torch.ones_like(rows)])
        return cls(torch.cat([own, torch.cat([weighted, added]).mT], dim=-1))

    @property
    def pooled(self) -> Pooled:
        """The rows of every head in one."""
        return _unpack_pooled(self.packed[:, :POOLED])

    def __add__(self, other: "Tally") -> "Tally":
        pooled = pooled_columns([merged([self.pooled, other.pooled])])
        rest = self.packed[:, POOLED:] + other.packed[:, POOLED:]
        return Tally(torch.cat([pooled, rest], dim=-1), summed([self.errors, other.errors]))

    def beside(self, other: "Tally") -> "Tally":
        """These heads and then the other's: how tensor-parallel ranks, each with heads of its own, become one."""
        known = [each for each in (self.errors, other.errors) if each is not None]
        return Tally(torch.cat([self.packed, other.packed]), torch.cat(known) if len(known) == 2 else None)

    @property
    def stats(self) -> ScoreStats:
        """The statistics over all ranks."""
        return MergedStats(len(self.packed), exact=False, pool=lambda: self.pooled, errors=self.errors)


Tallies = dict[Key, Tally]


def seen_tallies(layers: Mapping[str, LayerNumbers | Layer], part: int, floors: Floors = NO_FLOORS) -> Tallies:
    """What one rank saw, with errors where a number is so low that an alarm is near."""
    found = Arriving(layers, part).tallies()
    return {
        key: replace(tally, errors=errors_of(layers[key[0]].stats)) if is_near(tally.stats, floors) else tally
        for key, tally in found.items()
    }


class Arriving:
    """What one rank saw of a step, on its way to the host: nobody waits for a GPU before its numbers are asked for.

    Calls that probes measured lie in buffers that are being copied. What was traced is packed, and copied from each
    device at once, behind all the device has to do.
    """

    def __init__(self, layers: Mapping[str, LayerNumbers | Layer | Sequence[ProbedCall]], part: int) -> None:
        self._part, self._layers = part, layers
        self._probed = {name: layer for name, layer in layers.items() if isinstance(layer, Sequence)}
        self._traced = {name: layer for name, layer in layers.items() if not isinstance(layer, Sequence)}
        self._hosts = {id(call.host): call.host for calls in self._probed.values() for call in calls}
        self._copies: list[tuple[list[str], Tensor]] = []
        self._events: list[torch.cuda.Event] = []
        for names, numbers in _pooled_columns({name: layer.stats for name, layer in self._traced.items()}):
            device = numbers.device
            packed = torch.cat([numbers, _squares([self._traced[name] for name in names], numbers)], dim=-1)
            self._copies.append((names, packed.to("cpu", non_blocking=packed.is_cuda)))
            if packed.is_cuda:
                self._events.append(torch.cuda.current_stream(device).record_event())

    @classmethod
    def of(cls, seen: Seen, part: int) -> "Arriving":
        """Return the layers that were seen in a step."""
        return cls(
            {
                name: calls if isinstance(calls[0], ProbedCall) else LayerNumbers.of([call.seen for call in calls])  # type: ignore[misc]
                for name, (_, calls) in seen.calls_by_layer().items()
            },
            part,
        )

    @property
    def is_here(self) -> bool:
        """True if tallies() would not wait."""
        return all(event.query() for event in self._events) and all(
            host is not None and host.is_here for host in self._hosts.values()
        )

    def tallies(self) -> Tallies:
        """Wait for them."""
        keys = {name: (name, self._part, _heads(layer)) for name, layer in self._layers.items()}
        found = _of_probed({keys[name]: calls for name, calls in self._probed.items()}) | self._of_traced(keys)
        return {key: found[key] for key in keys.values()}

    def stats(self) -> dict[str, ScoreStats]:
        """Statistics of each layer, which know how far sampled numbers may be off."""
        return {name: layer.stats for name, layer in self._traced.items()} | {
            name: merged_when_read([call.statistics for call in calls]) for name, calls in self._probed.items()
        }

    def _of_traced(self, keys: Mapping[str, Key]) -> Tallies:
        if not self._traced:
            return {}
        for event in self._events:
            event.synchronize()
        fetched: dict[str, Tensor] = {}
        for names, packed in self._copies:
            fetched |= dict(zip(names, packed.split([keys[name][2] for name in names]), strict=True))
        pooled, norms, gradients = torch.cat([fetched[name] for name in self._traced]).split([POOLED, 3, 2], dim=-1)
        scales = torch.cat([layer.scales.double().cpu() for layer in self._traced.values()]).abs()
        together = Tally.of(pooled, (scales, *norms.unbind(-1)), gradients.unbind(-1))
        parts = together.packed.split([keys[name][2] for name in self._traced])
        return {keys[name]: Tally(part) for name, part in zip(self._traced, parts, strict=True)}


def _heads(layer: LayerNumbers | Layer | Sequence[ProbedCall]) -> int:
    return layer[0].heads if isinstance(layer, Sequence) else layer.heads


def _of_probed(layers: Mapping[Key, Sequence[ProbedCall]]) -> Tallies:
    """Return the tallies of probed calls, from the buffers on the host: all calls of all layers at once."""
    calls = [call for some in layers.values() for call in some]
    if not calls:
        return {}
    heads, columns = [call.heads for call in calls], torch.cat([call.columns for call in calls])
    pooled, lengths, gradients, scales, cosines = columns.split(COLUMNS, dim=1)
    factors = torch.from_numpy(np.concatenate([call.factors for call in calls], axis=1))
    stated = [math.nan if call.multiplier is None else call.multiplier for call in calls]
    multiplier = torch.tensor(stated, dtype=torch.float64)
    known = torch.tensor([(*call.has_gradients, call.has_cosine) for call in calls])
    known, multiplier = (each.repeat_interleave(torch.tensor(heads), 0) for each in (known, multiplier))
    scale = torch.where(multiplier.isnan(), scales[:, 0], multiplier * factors.prod(0)).abs()
    squares = (lengths.mT / factors).square()
    cosine_square = torch.where(known[:, 2], cosines[:, 0].square(), math.nan)
    reached = torch.where(known[:, :2], gradients.square(), 0.0).unbind(1)
    packed = iter(Tally.of(pooled, (scale, *squares, cosine_square), reached).packed.split(heads))
    parts: list[Tallies] = [{} for _ in range(max(map(len, layers.values())))]
    for key, some in layers.items():
        for number in range(len(some)):
            parts[number][key] = Tally(next(packed))
    found = parts[0] if len(parts) == 1 else merge(parts)
    for key, some in layers.items():
        if len(some) > 1:
            found[key].packed[:, -1] = 1.0  # all calls are of one rank
        for side in range(2):
            if not any(call.has_gradients[side] for call in some):
                found[key].packed[:, side - len(ADDED)] = math.nan
    return found


def _pooled_columns(many: Mapping[str, ScoreStats]) -> Iterator[tuple[list[str], Tensor]]:
    """Which statistics lie on each device, and their numbers and sums, (heads of all, …): in few operations."""
    pooled = {name: stats.pooled for name, stats in many.items()}
    for device in dict.fromkeys(each.mean.device for each in pooled.values()):
        here = [name for name, each in pooled.items() if each.mean.device == device]
        yield here, pooled_columns([pooled[name] for name in here])


def _squares(layers: Sequence[LayerNumbers | Layer], like: Tensor) -> Tensor:
    """‖q‖², ‖k‖², cos² and those of gradients, (heads of all, 5); NaN where one is not known."""
    each = (
        [layer.query_norm for layer in layers], [layer.key_norm for layer in layers],
        [layer.cosine for layer in layers],
        [layer.query_gradient for layer in layers], [layer.key_gradient for layer in layers],
    )  # fmt: skip
    found = [_known(norm, layer, like) for norms in each for norm, layer in zip(norms, layers, strict=True)]
    return torch.cat(found).to(like).square().view(len(each), -1).mT


def _known(norm: Tensor | None, layer: LayerNumbers | Layer, like: Tensor) -> Tensor:
    return like.new_full((layer.heads,), math.nan) if norm is None else norm.to(like.device)


def _unpack_pooled(columns: Tensor) -> Pooled:
    numbers, sums = columns.split([len(POOLED_NUMBERS), len(SUMS)], dim=-1)
    rows, count, mean, largest, bound, above = numbers.unbind(-1)
    return Pooled(rows.to(torch.int64), count.to(torch.int64), mean, largest, bound, above, sums, None)


def merge(parts: Iterable[Tallies]) -> Tallies:
    """The layers of all parts, those of the same name and place added up."""
    seen = list(parts)
    keys = list(seen[0])
    if keys and all(list(part) == keys for part in seen):  # as ranks mostly do: all heads of all layers at once
        heads = [heads for _, _, heads in keys]
        total = reduce(lambda a, b: a + b, (Tally(_packed(part)) for part in seen))
        of_layers = zip(keys, map(Tally, total.packed.split(heads)), strict=True)
        return {key: replace(tally, errors=summed([part[key].errors for part in seen])) for key, tally in of_layers}
    found: dict[Key, list[Tally]] = {}
    for part in seen:
        for key, tally in part.items():
            found.setdefault(key, []).append(tally)
    return {key: reduce(lambda a, b: a + b, tallies) for key, tallies in found.items()}


def _packed(tallies: Tallies) -> Tensor:
    return torch.cat([tally.packed for tally in tallies.values()]) if tallies else torch.zeros(0, WIDTH)


def whole_layers(tallies: Tallies) -> dict[str, Tally]:
    """Layers by name, the parts of their heads side by side."""
    parts: dict[str, list[tuple[int, Tally]]] = {}
    for (name, part, _), tally in tallies.items():
        parts.setdefault(name, []).append((part, tally))
    ordered = {name: sorted(found, key=lambda pair: pair[0]) for name, found in parts.items()}
    return {name: reduce(Tally.beside, (tally for _, tally in found)) for name, found in ordered.items()}


def to_bytes(tallies: Tallies) -> bytes:
    """A line of JSON that names the layers, and the numbers of all their heads, then those of their errors."""
    errors = [tally.errors.flatten() for tally in tallies.values() if tally.errors is not None]
    head = [(*key, tally.errors is not None) for key, tally in tallies.items()]
    numbers = torch.cat([_packed(tallies).flatten(), *errors]).double().contiguous()
    return json.dumps(head).encode() + b"\n" + numbers.numpy().tobytes()


def from_bytes(payload: bytes) -> Tallies:
    """What to_bytes() gave."""
    head, _, body = payload.partition(b"\n")
    keys: dict[Key, bool] = {(name, part, heads): has_errors for name, part, heads, has_errors in json.loads(head)}
    if not keys:
        return {}
    numbers = torch.frombuffer(bytearray(body), dtype=torch.float64)
    sizes = [heads * WIDTH for _, _, heads in keys] + [heads * ERRORS for (*_, heads), has in keys.items() if has]
    parts = iter(numbers.split(sizes))
    found = {key: Tally(part.view(-1, WIDTH)) for key, part in zip(keys, parts, strict=False)}
    return {
        key: replace(tally, errors=next(parts).view(-1, ERRORS)) if keys[key] else tally for key, tally in found.items()
    }
