"""Rows of parameters that produce the queries and keys of each head, and the exponent of its factor for each row.

Queries and keys are multiplied by the square root of the factor each, if no other head and no values use the rows that
produce the head's keys. Otherwise, as in GQA, MQA and MLA's rotary part, the queries are multiplied by the whole
factor. Heads that share rows for their queries, such as the gain of a QK-norm, form a family and get one factor.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from attnscale.acting.parameters import Frozen, held_as, why_not_written
from attnscale.acting.replicas import Axis, Block, Floats, LayerHeads
from attnscale.plain import printable
from attnscale.tracing.parameters import Origin, Source, UntraceableError

Indices = NDArray[np.int64]
Head = tuple[str, int]  # layer, head
BROKEN = "the parameters of its queries also make some of its keys or values"
WHOLE = "the parameters of its queries are not sharded by head, and other ranks use them too (tensor parallel)"


@dataclass(frozen=True)
class Touched:
    """Rows of a parameter that were multiplied by one factor.

    A row extends along the axes `across`; row numbers count over the other axes. `factor` multiplies value + offset: a
    gain that is stored as weight and used as 1 + weight has an offset of 1.
    """

    parameter: str
    rows: tuple[int, ...]
    factor: float
    across: tuple[int, ...] = ()
    offset: float = 0.0

    def __str__(self) -> str:
        spans = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in _spans(self.rows))
        return printable(f"{self.parameter}, rows {spans}: × {self.factor:.4g}")


def _spans(rows: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    start = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[at - 1] + 1:
            yield rows[start], rows[at - 1]
            start = at


@dataclass(frozen=True)
class SkippedHead:
    """A head that was not changed, and the reason."""

    layer: str
    head: int
    reason: str

    def __str__(self) -> str:
        return printable(f"{self.layer}, head {self.head}: not changed: {self.reason}")


@dataclass(frozen=True)
class ScaledHead:
    """A head whose scores were multiplied, and the changes to its parameters."""

    layer: str
    head: int
    factor: float
    touched: tuple[Touched, ...]


@dataclass(frozen=True)
class Uses:
    """Uses of rows: row `row[i]` contributes to feature `feature[i]` of head `head[i]`."""

    row: Indices
    head: Indices
    feature: Indices

    @staticmethod
    def joined(parts: "Sequence[Uses]") -> "Uses":
        """Concatenate the uses of several parts."""
        none = np.zeros(0, dtype=np.int64)
        names = ("row", "head", "feature")
        return Uses(*(np.concatenate([none, *(getattr(part, name) for part in parts)]) for name in names))


@dataclass(frozen=True, eq=False)
class Shares:
    """Factors of rows: row `i` is multiplied by the factor of `head[i]` to the power of `exponent[i]`."""

    families: Indices  # family of every head; a family has one factor
    fixed: NDArray[np.bool_]  # heads that cannot be multiplied
    head: Indices  # −1 for a row that is not multiplied
    exponent: Floats


class HeadRows:
    """Rows of parameters and the features of heads that they produce, in a watched model."""

    def __init__(self, model: nn.Module, layers: Mapping[str, LayerHeads], frozen: Frozen) -> None:
        self._model, self._parameters = model, dict(model.named_parameters(remove_duplicate=False))
        self._frozen: Frozen = frozen
        self._ways: dict[int, tuple[object, ...]] = {}  # shape, axes and offset with which each parameter is used
        self._blocks: dict[tuple[object, ...], Block] = {}
        self._rows = 0
        self.heads: list[Head] = [(name, head) for name, layer in layers.items() for head in range(layer.heads)]
        self.number_of = {head: number for number, head in enumerate(self.heads)}
        calls = [call for layer in layers.values() for call in layer.origins]
        self._widest = max((side.features for call in calls for side in (call.query, call.key) if side), default=1)
        self._reasons: dict[str, str] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        main, partner, values = [], [], []
        for name, layer in layers.items():
            try:
                first, second, value = self._follow(name, layer)
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
        """Return the dtype of the parameters that produce a layer's queries."""
        return self._dtypes.get(layer, torch.float32)

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """Yield the parameters that produce the heads, each with the end of its row numbers."""
        yield from zip(
            self._blocks.values(), [*(block.first for block in self._blocks.values()), self._rows][1:], strict=True
        )

    def parameter(self, name: str) -> torch.Tensor:
        """Return the parameter with this name."""
        return self._parameters[name]

    def why_fixed(self, number: int) -> str:
        """Return why a fixed head cannot be multiplied."""
        return self._reasons.get(self.heads[number][0], WHOLE if self._is_whole[number] else BROKEN)

    def shares(self, axes: Sequence[Axis] = ()) -> Shares:
        """Return the head and the exponent of each row; `axes` name the parameters that are cut over ranks."""
        families, whole = self._families(), self._whole_on_ranks(axes)
        self._is_whole = np.isin(families, families[self._main.head[whole[self._main.row]]])
        halved, broken = self._halved(families, whole)
        unknown = np.array([name in self._reasons for name, _ in self.heads], dtype=bool)
        head, exponent = np.full(self._rows, -1), np.zeros(self._rows)
        for uses, share in ((self._main, np.where(halved, 0.5, 1.0)), (self._partner, np.where(halved, 0.5, 0.0))):
            takes = share[uses.feature] > 0
            head[uses.row[takes]], exponent[uses.row[takes]] = uses.head[takes], share[uses.feature[takes]]
        here = dist.get_rank() * 2**32 if axes else 0  # makes the numbers unique over ranks
        return Shares(families + here, broken | self._is_whole | unknown, head, exponent)

    def _whole_on_ranks(self, axes: Sequence[Axis]) -> NDArray[np.bool_]:
        """Return a mask of rows whose parameter is not cut, although ranks compute different heads."""
        whole = np.zeros(self._rows, dtype=np.bool_)
        cutting = [axis.cut for axis in axes if axis.cut]
        for block, last in self.blocks():
            whole[block.first : last] = any(block.name not in cut for cut in cutting)
        return whole

    def _follow(self, name: str, layer: LayerHeads) -> tuple[Uses, Uses, Indices]:
        """Return the uses by queries, the uses by keys and the rows of values.

        If only the keys can be traced, their uses are returned first, in place of the queries.
        """
        query, key, value = (self._side(name, layer, side) for side in ("query", "key", "value"))
        if isinstance(query, UntraceableError):
            if isinstance(key, UntraceableError):
                raise query
            query, key = key, Uses.joined([])
        if isinstance(key, UntraceableError) or isinstance(value, UntraceableError):  # maybe the same rows
            key = Uses.joined([])
        return query, key, Uses.joined([]).row if isinstance(value, UntraceableError) else value.row

    def _side(self, name: str, layer: LayerHeads, side: str) -> Uses | UntraceableError:
        """Return the rows that produce the queries, keys or values of every call, or the error if they are unknown."""
        origins = [getattr(call, side) for call in layer.origins]
        try:
            known = [self._known(origin, side) for origin in origins]
            return Uses.joined([self._uses(name, layer, *each) for each in zip(known, origins, strict=True)])
        except UntraceableError as error:
            return error

    def _known(self, origin: Origin | None, side: str) -> tuple[Source, ...]:
        if origin is None:
            raise UntraceableError("its scores are more than one product of queries and keys, or mix several heads")
        sources = origin.sources()
        if not sources:
            raise UntraceableError("no parameter makes its queries or keys")
        for source in sources:
            parameter = self._parameters.get(source.parameter)
            if parameter is None or held_as(parameter, source.shape) is None:
                raise UntraceableError(f"{source.parameter} is not the parameter that was watched: sharded by tensor?")
            reason = None if side == "value" else why_not_written(source.parameter, parameter, self._frozen)
            if reason is not None:
                raise UntraceableError(reason)
            ways = self._ways.setdefault(id(parameter), (source.shape, source.across, source.offset))
            if ways != (source.shape, source.across, source.offset):
                raise UntraceableError(f"{source.parameter} is used in two ways")
        return sources

    def _uses(self, name: str, layer: LayerHeads, sources: Iterable[Source], origin: Origin) -> Uses:
        """Return the uses of rows by heads; a key head shared by several query heads counts for each of them."""
        shared = max(1, layer.heads // origin.heads)
        found = []
        for source in sources:
            block = self._block(source)
            self._dtypes.setdefault(name, self._parameters[source.parameter].dtype)
            number = self.number_of[(name, 0)] + (source.heads[:, None] * shared + np.arange(shared)).ravel()
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
        """Return the family of each head; heads that share a row for their queries have the same number."""
        makes_queries = np.zeros(self._rows, dtype=bool)
        makes_queries[self._main.row] = True
        every = Uses.joined([self._main, self._partner])
        chosen = makes_queries[every.row]
        row, head = every.row[chosen], every.head[chosen]
        family = np.arange(len(self.heads))
        while True:  # each iteration passes the smallest number of a row's heads to all of them
            least = np.full(self._rows, len(family))
            np.minimum.at(least, row, family[head])
            now = family.copy()
            np.minimum.at(now, head, least[row])
            if (now == family).all():
                return family
            family = now

    def _halved(self, families: Indices, whole: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return masks of features whose keys are multiplied too, and of heads that cannot be multiplied at all."""
        main, partner = self._main, self._partner
        every = Uses.joined([main, partner])
        low, high = extremes(families[every.head].astype(np.float64), every.row, self._rows)
        own = (low == high) & ~self._of_values & ~whole
        halved = np.zeros(len(self.heads) * self._widest, dtype=bool)
        halved[partner.feature] = True
        halved[partner.feature[~own[partner.row]]] = False
        low, high = extremes(halved[every.feature].astype(np.float64), every.row, self._rows)
        torn = np.isin(families, families[every.head[low[every.row] != high[every.row]]])
        halved &= ~np.repeat(torn, self._widest)
        both = np.isin(main.row, partner.row) & ~halved[main.feature]
        broken = main.head[both | self._of_values[main.row]]
        return halved, np.isin(families, families[broken])

    def scaled(self, factors: Floats, by_row: Floats) -> Iterator[ScaledHead]:
        """Yield every head that was multiplied, with the changed rows grouped by parameter and factor."""
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
            yield ScaledHead(*self.heads[number], factor, tuple(touched[first:last]))


def extremes(values: Floats, at: Indices, size: int) -> tuple[Floats, Floats]:
    """Return the smallest and largest value at each of `size` indices; ∞ and −∞ for an index without values."""
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(low, at, values)
    np.maximum.at(high, at, values)
    return low, high
