"""Tally: what one rank saw of one layer in one step, as sums that add up over ranks, and as bytes that travel.

Scores keep the counts, means and sums of ScoreStats, without the covariances that only standard errors need: 22
float64 a head. Norms and multipliers are weighted by the rows they stand for.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from attnscale.errors import SettingError
from attnscale.measure.stats import NUMBERS as POOLED_NUMBERS
from attnscale.measure.stats import SUMS, Pooled, ScoreStats, merged
from attnscale.train.record import NUMBERS, LayerRecord
from attnscale.watching.layer import Layer

WEIGHTED = ("scale", "query_norm", "key_norm")  # means over rows, the norms of squares
ADDED = ("query_gradient", "key_gradient", "ranks")
WIDTH = len(POOLED_NUMBERS) + len(SUMS) + len(WEIGHTED) + len(ADDED)
ROWS = SUMS.index("rows")


class MergedStats(ScoreStats):
    """Statistics whose rows were looked at elsewhere."""

    def stderr(self, name: str) -> Tensor:
        """Refused: what it is told from does not travel."""
        raise SettingError("Standard errors are known where the rows were seen; of several ranks they are not merged.")


Key = tuple[str, int, int]  # layer, part (of its heads, where ranks share them out), heads


@dataclass(frozen=True)
class Tally:
    """Sums over the rows of one layer, (heads, …) in float64."""

    pooled: Pooled
    weighted: Tensor
    added: Tensor

    @classmethod
    def of(cls, layer: Layer) -> "Tally":
        """What one rank saw."""
        seen = layer.stats.pooled
        numbers = (seen.rows.cpu(), seen.count.cpu(), seen.mean.cpu(), seen.max.cpu(), seen.max_bound.cpu())
        pooled = Pooled(*numbers, seen.sums.cpu(), None)
        rows = pooled.sums[:, ROWS]
        columns = (layer.scales.cpu().double().abs(), layer.query_norm.double() ** 2, layer.key_norm.double() ** 2)
        nothing = torch.full_like(rows, math.nan)
        gradients = [
            nothing if gradient is None else gradient.double() ** 2
            for gradient in (layer.query_gradient, layer.key_gradient)
        ]
        return cls(
            pooled,
            torch.stack([torch.where(rows > 0, column * rows, 0.0) for column in columns], dim=-1),
            torch.stack([*gradients, torch.ones_like(rows)], dim=-1),
        )  # fmt: skip

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(merged([self.pooled, other.pooled]), self.weighted + other.weighted, self.added + other.added)

    def beside(self, other: "Tally") -> "Tally":
        """These heads and then the other's: how tensor-parallel ranks, each with heads of its own, become one."""
        return _unpack(torch.cat([self.pack(), other.pack()]))

    def pack(self) -> Tensor:
        """Everything of every head in one row, (heads, 22)."""
        numbers = [getattr(self.pooled, name).double() for name in POOLED_NUMBERS]
        return torch.cat([torch.stack(numbers, dim=-1), self.pooled.sums, self.weighted, self.added], dim=-1)

    @property
    def stats(self) -> ScoreStats:
        """The statistics over all ranks."""
        return MergedStats(len(self.pooled.mean), exact=False, pool=lambda: self.pooled)

    def record(self) -> LayerRecord:
        """The numbers of every head.

        A gradient is that of the loss averaged over ranks, as data-parallel training averages it: each rank's own
        gradient over their number.
        """
        stats, rows = self.stats, self.pooled.sums[:, ROWS]
        scale, query_norm, key_norm = (self.weighted / torch.where(rows > 0, rows, torch.nan)[:, None]).unbind(-1)
        query_norm, key_norm = query_norm.sqrt(), key_norm.sqrt()
        gradients, ranks = self.added[:, :2].sqrt(), self.added[:, 2]
        size = (stats.variance + stats.mean.square()).sqrt()
        found = {
            "spread": stats.std,
            "max": torch.where(rows > 0, stats.max, torch.nan),
            "max_bound": torch.where(rows > 0, stats.max_bound, torch.nan),
            "scale": scale,
            "query_norm": query_norm,
            "key_norm": key_norm,
            "alignment": size / (scale * query_norm * key_norm).clamp(min=1e-300),
            "query_gradient": gradients[:, 0] / ranks,
            "key_gradient": gradients[:, 1] / ranks,
        }
        lists = {name: (found[name] if name in found else getattr(stats, name)).tolist() for name in NUMBERS}
        known = {name: values for name, values in lists.items() if not name.endswith("gradient") or _any(values)}
        broken = int(((rows > 0) & ~torch.isfinite(stats.std)).sum())
        return LayerRecord(int(self.pooled.rows.sum()), known, broken)


def _any(values: list[float]) -> bool:
    return not all(map(math.isnan, values))


def _unpack(packed: Tensor) -> Tally:
    numbers, sums, weighted, added = packed.split([len(POOLED_NUMBERS), len(SUMS), len(WEIGHTED), len(ADDED)], dim=-1)
    rows, count, mean, largest, bound = numbers.unbind(-1)
    pooled = Pooled(rows.to(torch.int64), count.to(torch.int64), mean, largest, bound, sums, None)
    return Tally(pooled, weighted, added)


Tallies = dict[Key, Tally]


def merge(parts: Iterable[Tallies]) -> Tallies:
    """The layers of all parts, those of the same name and place added up."""
    seen = list(parts)
    keys = list(seen[0])
    if keys and all(list(part) == keys for part in seen):  # as ranks mostly do: all heads of all layers at once
        heads = [heads for _, _, heads in keys]
        total = reduce(lambda a, b: a + b, (_unpack(_packed(part)) for part in seen))
        return dict(zip(keys, map(_unpack, total.pack().split(heads)), strict=True))
    found: dict[Key, list[Tally]] = {}
    for part in seen:
        for key, tally in part.items():
            found.setdefault(key, []).append(tally)
    return {key: reduce(lambda a, b: a + b, tallies) for key, tallies in found.items()}


def _packed(tallies: Tallies) -> Tensor:
    return torch.cat([tally.pack() for tally in tallies.values()]) if tallies else torch.zeros(0, WIDTH)


def whole_layers(tallies: Tallies) -> dict[str, Tally]:
    """Layers by name, the parts of their heads side by side."""
    parts: dict[str, list[tuple[int, Tally]]] = {}
    for (name, part, _), tally in tallies.items():
        parts.setdefault(name, []).append((part, tally))
    ordered = {name: sorted(found, key=lambda pair: pair[0]) for name, found in parts.items()}
    return {name: reduce(Tally.beside, (tally for _, tally in found)) for name, found in ordered.items()}


def to_bytes(tallies: Tallies) -> bytes:
    """A line of JSON that names the layers, and the numbers of all their heads."""
    head = json.dumps(list(tallies)).encode()
    return head + b"\n" + _packed(tallies).double().contiguous().numpy().tobytes()


def from_bytes(payload: bytes) -> Tallies:
    """What to_bytes() gave."""
    head, _, body = payload.partition(b"\n")
    keys: list[Key] = [(name, part, heads) for name, part, heads in json.loads(head)]
    if not keys:
        return {}
    numbers = torch.frombuffer(bytearray(body), dtype=torch.float64).view(-1, WIDTH)
    return dict(zip(keys, map(_unpack, numbers.split([heads for _, _, heads in keys])), strict=True))
