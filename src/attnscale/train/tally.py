"""Tally: what one rank saw of one layer in one step, as sums that add up over ranks, and as bytes that travel.

Scores keep the counts, means and sums of ScoreStats, 24 float64 a head; where an alarm is near also what the errors of
the numbers are told from that raise it, 41 more. Norms and multipliers are weighted by the rows they stand for.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from attnscale.measure.pool import pooled_together, tables_of
from attnscale.measure.pooled import NUMBERS as POOLED_NUMBERS
from attnscale.measure.pooled import SUMS, Pooled, merged
from attnscale.measure.stats import ScoreStats
from attnscale.train.merged_errors import ERRORS, NO_FLOORS, Floors, MergedStats, errors_of, is_near, summed
from attnscale.watching.layer import Layer
from attnscale.watching.seen import LayerNumbers

WEIGHTED = ("scale", "query_norm", "key_norm", "cosine")  # means over rows, of squares but for the scale
ADDED = ("query_gradient", "key_gradient", "ranks")
POOLED = len(POOLED_NUMBERS) + len(SUMS)
WIDTH = POOLED + len(WEIGHTED) + len(ADDED)
ROWS = SUMS.index("rows")


Key = tuple[str, int, int]  # layer, part (of its heads, where ranks share them out), heads


@dataclass(frozen=True)
class Tally:
    """Sums over the rows of one layer, all those of a head in one row: (heads, WIDTH) in float64."""

    packed: Tensor
    errors: Tensor | None = None  # what merged_errors tells; None where a rank does not know it

    @classmethod
    def of(cls, pooled: Pooled, columns: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> "Tally":
        """Rows that were pooled, with the multiplier, ‖q‖², ‖k‖² and cos² of their heads, and squares of gradients."""
        rows = pooled.sums[:, ROWS]
        nothing = torch.full_like(rows, math.nan)
        weighted = [torch.where(rows > 0, column.double() * rows, 0.0) for column in columns]
        added = [nothing if each is None else each for each in gradients] + [torch.ones_like(rows)]
        return cls(torch.cat([_columns([pooled]), torch.stack(weighted + added, dim=-1)], dim=-1))

    @property
    def pooled(self) -> Pooled:
        """The rows of every head in one."""
        return _unpack_pooled(self.packed[:, : len(POOLED_NUMBERS)], self.packed[:, len(POOLED_NUMBERS) : POOLED])

    def __add__(self, other: "Tally") -> "Tally":
        pooled = _columns([merged([self.pooled, other.pooled])])
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
    """What one rank saw, on its way to the host: what lies on a GPU is fetched in one copy, behind all it has to do."""

    def __init__(self, layers: Mapping[str, LayerNumbers | Layer], part: int) -> None:
        self._keys = [(name, part, layer.heads) for name, layer in layers.items()]
        seen = list(layers.values())
        self._scales = [layer.scales for layer in seen]
        self._copies: list[tuple[list[int], Tensor]] = []
        self._events: list[torch.cuda.Event] = []
        for here, numbers in _pooled_columns([layer.stats for layer in seen]):
            device = numbers.device
            packed = torch.cat([numbers, _squares([seen[index] for index in here], numbers)], dim=-1)
            self._copies.append((here, packed.to("cpu", non_blocking=packed.is_cuda)))
            if packed.is_cuda:
                self._events.append(torch.cuda.current_stream(device).record_event())

    @property
    def is_here(self) -> bool:
        """Whether tallies() would not wait."""
        return all(event.query() for event in self._events)

    def tallies(self) -> Tallies:
        """Wait for it."""
        if not self._keys:
            return {}
        for event in self._events:
            event.synchronize()
        heads, fetched = [heads for *_, heads in self._keys], dict[int, Tensor]()
        for here, packed in self._copies:
            fetched |= dict(zip(here, packed.split([heads[index] for index in here]), strict=True))
        numbers, sums, norms, gradients = torch.cat([fetched[index] for index in range(len(heads))]).split(
            [len(POOLED_NUMBERS), len(SUMS), 3, 2], dim=-1
        )
        scales = torch.cat([scales.double().cpu() for scales in self._scales]).abs()
        together = Tally.of(_unpack_pooled(numbers, sums), (scales, *norms.unbind(-1)), gradients.unbind(-1))
        return dict(zip(self._keys, map(Tally, together.packed.split(heads)), strict=True))


def _pooled_columns(many: Sequence[ScoreStats]) -> Iterator[tuple[list[int], Tensor]]:
    """Which statistics lie on each device, and their numbers and sums, (heads of all, …): in few operations."""
    tables = tables_of(many)
    pooled = pooled_together(many) if tables is None else []
    devices = [each.mean.device for each in pooled] if tables is None else [each.columns.device for each in tables]
    for device in dict.fromkeys(devices):
        here = [index for index, own in enumerate(devices) if own == device]
        if tables is None:
            yield here, _columns([pooled[index] for index in here])
        else:
            yield here, torch.cat([tables[index].columns for index in here])[:, :POOLED]


def _columns(pooled: Sequence[Pooled]) -> Tensor:
    numbers = [torch.cat([getattr(each, name) for each in pooled]).double() for name in POOLED_NUMBERS]
    return torch.cat([torch.stack(numbers, dim=-1), torch.cat([each.sums for each in pooled])], dim=-1)


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


def _unpack_pooled(numbers: Tensor, sums: Tensor) -> Pooled:
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
