"""Scores of single heads multiplied, through the parameters that make their queries and keys.

Half of a factor goes to the queries and half to the keys, each a square root, where the rows that make a head's keys
make nothing else. Where other heads share them, as in GQA, MQA and MLA's rotary part, or values are made of them too,
all of it goes to the queries. Heads that share what makes their queries, as the gain of a QK-norm, are one family and
take one factor.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from attnscale.acting.common import Block, Common
from attnscale.acting.parametrized import why_not_multiplied
from attnscale.acting.replicas import Axis, Changes, agreed_changes
from attnscale.acting.uses import Floats, Indices, Shares, Uses, extremes, groups
from attnscale.acting.writing import Change, Touched, held_as
from attnscale.plain import printable
from attnscale.tracing.parameters import Origin, Source, UntraceableError
from attnscale.watching.layer import Layer

Head = tuple[str, int]  # layer, head
BROKEN = "what makes its queries makes its keys, or values, in part"


@dataclass(frozen=True)
class Left:
    """A head that was left as it is, and why."""

    layer: str
    head: int
    reason: str

    def __str__(self) -> str:
        return printable(f"{self.layer}, head {self.head}: left as it is: {self.reason}")


@dataclass(frozen=True)
class Folded:
    """A head whose scores were multiplied, and by what changes."""

    layer: str
    head: int
    factor: float
    touched: tuple[Touched, ...]


class Folding:
    """Who makes what in a watched model: rows of parameters, features of heads."""

    def __init__(self, model: nn.Module, layers: Mapping[str, Layer]) -> None:
        self._model, self._parameters = model, dict(model.named_parameters(remove_duplicate=False))
        self._ways: dict[int, tuple[object, ...]] = {}  # in which each parameter is used
        self._blocks: dict[tuple[object, ...], Block] = {}
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
        self._main, self._partner = Uses.joined(main), Uses.joined(partner)
        self._of_values = np.zeros(self._rows, dtype=bool)
        self._of_values[np.concatenate([*values, np.zeros(0, dtype=np.int64)])] = True

    def dtype(self, layer: str) -> torch.dtype:
        """Of the parameters that make a layer's queries."""
        return self._dtypes.get(layer, torch.float32)

    def multiply_(
        self, wanted: Mapping[Head, float], merge: Callable[[Sequence[float]], float], axes: Sequence[Axis] = ()
    ) -> tuple[list[Folded], list[Left]]:
        """Multiply the scores of these heads; `merge` makes one factor of those of a family.

        Along the axes every rank takes part; families may then span ranks, and take the least of their factors.
        """
        left = [Left(*head, self._reasons[head[0]]) for head in wanted if head[0] in self._reasons]
        common = Common([axis for axis in axes if axis.cut], list(self._blocks.values()), self._rows)
        factors = np.array([wanted.get(head, 1.0) for head in self._heads])
        own = self._families()
        for members in groups(own):
            factors[members] = merge(factors[members].tolist())
        families, factors = self._linked(common, own, factors)
        shares = self._shares(families, common)
        left += (Left(*self._heads[number], BROKEN) for number in np.flatnonzero(shares.broken & (factors != 1.0)))
        factors[shares.fixed] = 1.0
        by_row = shares.by_row(factors)
        for name, change in agreed_changes(axes, self._changes(by_row), len(self._heads)).items():
            change.apply_(self._parameters[name])
        return list(self.told(factors, by_row)), left

    @property
    def heads(self) -> list[Head]:
        """All heads, in the order in which factors are given."""
        return self._heads

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """The parameters that make them, each with the number behind its last row."""
        yield from zip(
            self._blocks.values(), [*(block.first for block in self._blocks.values()), self._rows][1:], strict=True
        )

    def parameter(self, name: str) -> torch.Tensor:
        """The parameter of this name."""
        return self._parameters[name]

    def why_fixed(self, number: int) -> str:
        """Why a head that cannot be multiplied cannot."""
        return self._reasons.get(self._heads[number][0], BROKEN)

    def shares(self, axes: Sequence[Axis] = ()) -> Shares:
        """Which rows take which share of whose factor, whatever the factors are; along the axes all ranks take part."""
        common = Common([axis for axis in axes if axis.cut], list(self._blocks.values()), self._rows)
        families, _ = self._linked(common, self._families(), np.ones(len(self._heads)))
        return self._shares(families, common)

    def _shares(self, families: Floats, common: Common) -> Shares:
        halved, broken = self._halved(families, common)
        unknown = np.array([name in self._reasons for name, _ in self._heads], dtype=bool)
        head, exponent = np.full(self._rows, -1), np.zeros(self._rows)
        for uses, share in ((self._main, np.where(halved, 0.5, 1.0)), (self._partner, np.where(halved, 0.5, 0.0))):
            takes = share[uses.feature] > 0
            head[uses.row[takes]], exponent[uses.row[takes]] = uses.head[takes], share[uses.feature[takes]]
        return Shares(families, broken, broken | unknown, head, exponent)

    def _follow(self, layer: Layer) -> "tuple[Uses, Uses, Indices]":
        """Uses by queries, uses by keys, and rows of values; the keys' first where only they can be followed."""
        query, key, value = (self._side(layer, side) for side in ("query", "key", "value"))
        if isinstance(query, UntraceableError):
            if isinstance(key, UntraceableError):
                raise query
            query, key = key, Uses.joined([])
        if isinstance(key, UntraceableError) or isinstance(value, UntraceableError):  # perhaps made as the keys are
            key = Uses.joined([])
        return query, key, Uses.joined([]).row if isinstance(value, UntraceableError) else value.row

    def _side(self, layer: Layer, side: str) -> "Uses | UntraceableError":
        """What makes the queries, keys or values of every call."""
        origins = [getattr(call, side) for call in layer.origins]
        try:
            known = [self._known(origin) for origin in origins]
            sources = [source for each in known for source in each]
            reason = None if side == "value" else why_not_multiplied(self._model, sources)  # a value is not multiplied
            if reason is not None:
                raise UntraceableError(reason)
            return Uses.joined([self._uses(layer, *each) for each in zip(known, origins, strict=True)])
        except UntraceableError as error:
            return error

    def _known(self, origin: Origin | None) -> tuple[Source, ...]:
        if origin is None:
            raise UntraceableError("its scores are more than one product of queries and keys")
        sources = origin.sources()
        if not sources:
            raise UntraceableError("no parameter makes its queries or keys")
        for source in sources:
            parameter = self._parameters.get(source.parameter)
            if parameter is None or held_as(parameter, source.shape) is None:
                raise UntraceableError(f"{source.parameter} is not the parameter that was watched: sharded by tensor?")
            if not parameter.is_floating_point():
                raise UntraceableError(f"{source.parameter} is quantised, {parameter.dtype}")
            ways = self._ways.setdefault(id(parameter), (source.shape, source.across, source.offset))
            if ways != (source.shape, source.across, source.offset):
                raise UntraceableError(f"{source.parameter} is used in two ways")
        return sources

    def _uses(self, layer: Layer, sources: Iterable[Source], origin: Origin) -> "Uses":
        """Numbers of rows, heads and features; a key head that stands for several query heads counts for each."""
        shared = max(1, layer.heads // origin.heads)
        found = []
        for source in sources:
            block = self._block(source)
            self._dtypes.setdefault(layer.name, self._parameters[source.parameter].dtype)
            number = self._number[(layer.name, 0)] + (source.heads[:, None] * shared + np.arange(shared)).ravel()
            feature = np.repeat(source.features, shared)
            found.append(Uses(block.first + np.repeat(source.rows, shared), number, number * self._widest + feature))
        return Uses.joined(found)

    def _block(self, source: Source) -> Block:
        key = (id(self._parameters[source.parameter]), source.shape, source.across)
        if key not in self._blocks:
            self._blocks[key] = Block(source.parameter, source.shape, source.across, source.offset, self._rows)
            self._rows += int(np.prod([s for axis, s in enumerate(source.shape) if axis not in source.across]))
        return self._blocks[key]

    def _families(self) -> Indices:
        """One number for all heads that share a row which makes queries."""
        makes_queries = np.zeros(self._rows, dtype=bool)
        makes_queries[self._main.row] = True
        every = Uses.joined([self._main, self._partner])
        chosen = makes_queries[every.row]
        row, head = every.row[chosen], every.head[chosen]
        family = np.arange(len(self._heads))
        while True:  # each round the least number of a row's heads reaches all of them
            least = np.full(self._rows, len(family))
            np.minimum.at(least, row, family[head])
            now = family.copy()
            np.minimum.at(now, head, least[row])
            if (now == family).all():
                return family
            family = now

    def _linked(self, common: Common, families: Indices, factors: Floats) -> tuple[Floats, Floats]:
        """Families and their factors over all ranks: those that share a row which makes queries are one."""
        if not common.axes:
            return families.astype(np.float64), factors
        here: Floats = families + np.float64(dist.get_rank() * 2**32)  # a number that no other rank has
        main, changed = self._main, True
        while changed:
            before = here.copy()
            by_row = [extremes(values[main.head], main.row, self._rows)[0] for values in (here, factors)]
            for values, least in zip((here, factors), common.least(*by_row)[0], strict=True):
                of_family = np.full(len(values), np.inf)
                np.minimum.at(of_family, families[main.head], least[main.row])
                np.minimum(values, of_family[families], out=values)
            changed = common.least(np.full(self._rows, np.inf), flag=-float((here != before).any()))[1] < 0
        return here, factors

    def _halved(self, families: Floats, common: Common) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Features whose keys take half of the factor, and heads that cannot be multiplied at all."""
        main, partner = self._main, self._partner
        every = Uses.joined([main, partner])
        low, high = extremes(families[every.head], every.row, self._rows)
        (low, high, values), _ = common.least(low, -high, np.where(self._of_values, -1.0, np.inf))
        own, of_values = (low == -high) & (values >= 0), values < 0
        halved = np.zeros(len(self._heads) * self._widest, dtype=bool)
        halved[partner.feature] = True
        halved[partner.feature[~own[partner.row]]] = False
        low, high = extremes(halved[every.feature].astype(np.float64), every.row, self._rows)
        (low, high), _ = common.least(low, -high)
        torn = self._of_families(families, every.head[low[every.row] != -high[every.row]], common)
        halved &= ~np.repeat(torn, self._widest)
        both = np.isin(main.row, partner.row) & ~halved[main.feature]
        return halved, self._of_families(families, main.head[both | of_values[main.row]], common)

    def _of_families(self, families: Floats, heads: Indices, common: Common) -> NDArray[np.bool_]:
        """All heads of the families of these, and of those of other ranks."""
        chosen = np.isin(families, families[heads])
        _, high = extremes(chosen[self._main.head].astype(np.float64), self._main.row, self._rows)
        (low,), _ = common.least(-high)
        everywhere: NDArray[np.bool_] = np.isin(families, families[self._main.head[low[self._main.row] < 0]])
        return chosen | everywhere

    def _changes(self, by_row: Floats) -> Changes:
        found: Changes = {}
        for block, last in self.blocks():
            rows = np.flatnonzero(by_row[block.first : last] != 1.0)
            if len(rows):
                factors = by_row[block.first + rows]
                found[block.name] = Change(block.shape, block.across, block.offset, rows, factors)
        return found

    def told(self, factors: Floats, by_row: Floats) -> Iterator[Folded]:
        """Of every head that was multiplied, the rows of each parameter that took one factor."""
        every = Uses.joined([self._main, self._partner])
        moved = (factors[every.head] != 1.0) & (by_row[every.row] != 1.0)
        head, row = np.divmod(np.unique(every.head[moved] * self._rows + every.row[moved]), self._rows)
        blocks = list(self._blocks.values())
        block = np.searchsorted([each.first for each in blocks], row, side="right") - 1
        order = np.lexsort((row, by_row[row], block, head))
        head, row, block = head[order], row[order], block[order]
        starts = np.flatnonzero(np.diff(np.stack([head, block, by_row[row]]), prepend=-1.0, axis=1).any(0))
        own = (row - np.array([each.first for each in blocks], dtype=np.int64)[block]).tolist()
        spans = pairwise([*starts.tolist(), len(own)])
        touched = [
            Touched(each.name, tuple(own[start:stop]), factor, each.across, each.offset)
            for each, factor, (start, stop) in zip(
                [blocks[number] for number in block[starts].tolist()], by_row[row[starts]].tolist(), spans, strict=True
            )
        ]
        numbers = np.flatnonzero(factors != 1.0)
        bounds = np.searchsorted(head[starts], [numbers, numbers + 1]).T.tolist()
        for number, factor, (first, last) in zip(numbers.tolist(), factors[numbers].tolist(), bounds, strict=True):
            yield Folded(*self._heads[number], factor, tuple(touched[first:last]))
