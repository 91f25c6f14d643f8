"""Scores of single heads multiplied, through the parameters that make their queries and keys.

Half of a factor goes to the queries and half to the keys, each a square root, where the rows that make a head's keys
make nothing else. Where other heads share them, as in GQA, MQA and MLA's rotary part, or values are made of them too,
all of it goes to the queries. Heads that share what makes their queries, as the gain of a QK-norm, are one family and
take one factor.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attnscale.acting.writing import Touched, held_as, multiply_rows_
from attnscale.tracing.parameters import Origin, Source, UntraceableError
from attnscale.watching.layer import Layer

Indices = NDArray[np.int64]
Head = tuple[str, int]  # layer, head


@dataclass(frozen=True)
class Left:
    """A head that was left as it is, and why."""

    layer: str
    head: int
    reason: str

    def __str__(self) -> str:
        return f"{self.layer}, head {self.head}: left as it is: {self.reason}"


@dataclass(frozen=True)
class Folded:
    """A head whose scores were multiplied, and by what changes."""

    layer: str
    head: int
    factor: float
    touched: tuple[Touched, ...]


@dataclass(frozen=True)
class _Block:
    """A parameter whose rows are known by numbers from `first` on."""

    name: str
    parameter: Tensor
    across: tuple[int, ...]
    offset: float
    first: int


class Folding:
    """Who makes what in a watched model: rows of parameters, features of heads."""

    def __init__(self, model: nn.Module, layers: Mapping[str, Layer]) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._blocks: dict[tuple[object, ...], _Block] = {}
        self._rows = 0
        self._heads: list[Head] = [(name, head) for name, layer in layers.items() for head in range(layer.heads)]
        self._number = {head: number for number, head in enumerate(self._heads)}
        calls = [call for layer in layers.values() for call in layer.origins]
        self._widest = max((side.features for call in calls for side in (call.query, call.key) if side), default=1)
        self._reasons: dict[str, str] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        main, partner, values = [], [], []
        for name, layer in layers.items():
            try:
                first, second, value = self._follow(layer)
            except UntraceableError as error:
                self._reasons[name] = str(error)
                continue
            main.append(first)
            partner.append(second)
            values.append(value)
        self._main, self._partner = _Uses.joined(main), _Uses.joined(partner)
        self._of_values = np.zeros(self._rows, dtype=bool)
        self._of_values[np.concatenate([*values, np.zeros(0, dtype=np.int64)])] = True

    def dtype(self, layer: str) -> torch.dtype:
        """Of the parameters that make a layer's queries."""
        return self._dtypes.get(layer, torch.float32)

    def multiply_(
        self, wanted: Mapping[Head, float], merge: Callable[[Sequence[float]], float]
    ) -> tuple[list[Folded], list[Left]]:
        """Multiply the scores of these heads; `merge` makes one factor of those of a family."""
        left = [Left(*head, self._reasons[head[0]]) for head in wanted if head[0] in self._reasons]
        families = self._families()
        factors = np.ones(len(self._heads))
        for family in np.unique(families):
            members = np.flatnonzero(families == family)
            known = [wanted.get(self._heads[member], 1.0) for member in members]
            factors[members] = known[0] if len(known) == 1 else merge(known)
        halved, broken = self._halved(families)
        for number in np.flatnonzero(broken & (factors != 1.0)):
            left.append(Left(*self._heads[number], "what makes its queries makes its keys, or values, in part"))
        factors[broken] = 1.0
        factors[[number for head, number in self._number.items() if head[0] in self._reasons]] = 1.0
        by_row = np.ones(self._rows)
        for uses, share in ((self._main, np.where(halved, 0.5, 1.0)), (self._partner, np.where(halved, 0.5, 0.0))):
            moved = factors[uses.head] != 1.0
            feature = uses.feature[moved]
            by_row[uses.row[moved]] = factors[uses.head[moved]] ** share[feature]
        self._write(by_row)
        return self._told(factors, by_row), left

    def _follow(self, layer: Layer) -> "tuple[_Uses, _Uses, Indices]":
        """Uses by queries, uses by keys, and rows of values; the keys' first where only they can be followed."""
        query, key, value = (self._side(layer, side) for side in ("query", "key", "value"))
        if isinstance(query, UntraceableError):
            if isinstance(key, UntraceableError):
                raise query
            query, key = key, _Uses.joined([])
        if isinstance(key, UntraceableError) or isinstance(value, UntraceableError):  # perhaps made as the keys are
            key = _Uses.joined([])
        return query, key, _Uses.joined([]).row if isinstance(value, UntraceableError) else value.row

    def _side(self, layer: Layer, side: str) -> "_Uses | UntraceableError":
        """What makes the queries, keys or values of every call."""
        origins = [getattr(call, side) for call in layer.origins]
        try:
            return _Uses.joined([self._uses(layer, self._known(origin), origin) for origin in origins])
        except UntraceableError as error:
            return error

    def _known(self, origin: Origin | None) -> tuple[Source, ...]:
        if origin is None:
            raise UntraceableError("its scores are more than one product of queries and keys")
        sources = origin.sources()
        if not sources:
            raise UntraceableError("no parameter makes its queries or keys")
        for source in sources:
            parameter = held_as(self._parameters.get(source.parameter), source.shape)
            if parameter is None:
                raise UntraceableError(f"{source.parameter} is not the parameter that was watched: sharded by tensor?")
            if not parameter.is_floating_point():
                raise UntraceableError(f"{source.parameter} is quantised, {parameter.dtype}")
            for block in self._blocks.values():
                if block.parameter is parameter and (block.across, block.offset) != (source.across, source.offset):
                    raise UntraceableError(f"{source.parameter} is used in two ways")
        return sources

    def _uses(self, layer: Layer, sources: Iterable[Source], origin: Origin) -> "_Uses":
        """Numbers of rows, heads and features; a key head that stands for several query heads counts for each."""
        shared = max(1, layer.heads // origin.heads)
        found = []
        for source in sources:
            block = self._block(source)
            self._dtypes.setdefault(layer.name, block.parameter.dtype)
            number = self._number[(layer.name, 0)] + (source.heads[:, None] * shared + np.arange(shared)).ravel()
            feature = np.repeat(source.features, shared)
            found.append(_Uses(block.first + np.repeat(source.rows, shared), number, number * self._widest + feature))
        return _Uses.joined(found)

    def _block(self, source: Source) -> _Block:
        parameter = held_as(self._parameters[source.parameter], source.shape)
        assert parameter is not None
        key = (id(parameter), source.across)
        if key not in self._blocks:
            self._blocks[key] = _Block(source.parameter, parameter, source.across, source.offset, self._rows)
            self._rows += int(np.prod([s for axis, s in enumerate(source.shape) if axis not in source.across]))
        return self._blocks[key]

    def _families(self) -> Indices:
        """One number for all heads that share a row which makes queries."""
        family = np.arange(len(self._heads))
        makes_queries = np.zeros(self._rows, dtype=bool)
        makes_queries[self._main.row] = True
        every = _Uses.joined([self._main, self._partner])
        chosen = makes_queries[every.row]
        row, head = np.unique(np.stack([every.row[chosen], every.head[chosen]]), axis=1)
        same = row[1:] == row[:-1]
        for first, second in np.unique(np.stack([head[:-1][same], head[1:][same]]), axis=1).T:
            family[family == family[second]] = family[first]
        return family

    def _halved(self, families: Indices) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Features whose keys take half of the factor, and heads that cannot be multiplied at all."""
        main, partner = self._main, self._partner
        every = _Uses.joined([main, partner])
        low, high = _extremes(families[every.head], every.row, self._rows)
        own = (low == high) & ~self._of_values
        halved = np.zeros(len(self._heads) * self._widest, dtype=bool)
        halved[partner.feature] = True
        halved[partner.feature[~own[partner.row]]] = False
        low, high = _extremes(halved[every.feature].astype(np.int64), every.row, self._rows)
        torn = np.isin(families, families[every.head[low[every.row] != high[every.row]]])
        halved &= ~np.repeat(torn, self._widest)
        both = np.isin(main.row, partner.row) & ~halved[main.feature]
        broken = np.isin(families, families[main.head[both | self._of_values[main.row]]])
        return halved, broken

    def _write(self, by_row: NDArray[np.float64]) -> None:
        for block, rows, factors in self._changed(by_row):
            multiply_rows_(block.parameter, block.across, rows, factors, block.offset)

    def _changed(self, by_row: NDArray[np.float64]) -> Iterable[tuple[_Block, Indices, NDArray[np.float64]]]:
        bounds = [block.first for block in self._blocks.values()] + [self._rows]
        for block, last in zip(self._blocks.values(), bounds[1:], strict=True):
            rows = np.flatnonzero(by_row[block.first : last] != 1.0)
            if len(rows):
                yield block, rows, by_row[block.first + rows]

    def _told(self, factors: NDArray[np.float64], by_row: NDArray[np.float64]) -> list[Folded]:
        found = []
        for number in np.flatnonzero(factors != 1.0):
            used = np.concatenate([uses.row[uses.head == number] for uses in (self._main, self._partner)])
            touched = []
            for block, rows, row_factors in self._changed(by_row):
                mine = np.isin(block.first + rows, used)
                for factor in np.unique(row_factors[mine]):
                    same = rows[mine & (row_factors == factor)]
                    touched.append(Touched(block.name, tuple(same.tolist()), float(factor), block.across, block.offset))
            found.append(Folded(*self._heads[number], float(factors[number]), tuple(touched)))
        return found


@dataclass(frozen=True)
class _Uses:
    """Row `row[i]` takes part in feature `feature[i]` of head `head[i]`."""

    row: Indices
    head: Indices
    feature: Indices

    @staticmethod
    def joined(parts: "Sequence[_Uses]") -> "_Uses":
        """All uses of several parts."""
        none = np.zeros(0, dtype=np.int64)
        names = ("row", "head", "feature")
        return _Uses(*(np.concatenate([none, *(getattr(part, name) for part in parts)]) for name in names))


def _extremes(values: Indices, at: Indices, size: int) -> tuple[Indices, Indices]:
    """The lowest and the highest of the values at each of `size` places."""
    low, high = np.full(size, np.iinfo(np.int64).max), np.full(size, np.iinfo(np.int64).min)
    np.minimum.at(low, at, values)
    np.maximum.at(high, at, values)
    return low, high
