"""Rows of parameters that produce the queries and keys of each head, and the exponent of its factor for each row.

Queries and keys are multiplied by the square root of the factor each, if no other head and no values use the rows that
produce the head's keys. Otherwise, as in GQA, MQA and MLA's rotary part, the queries are multiplied by the whole
factor. Heads that share rows for their queries, such as the gain of a QK-norm, form a family and get one factor.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from attnscale.acting.parameters import Frozen, part_with_shape, why_not_written
from attnscale.acting.replicas import LayerHeads
from attnscale.plain import printable
from attnscale.tracing.parameters import Origin, Source, UntraceableError

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]
Head = tuple[str, int]  # layer, head
# A head is clipped to slightly below the threshold, because rounding its parameters may increase a score.
ROUNDING = 1e-5
MIXED = "the parameters that produce its queries also produce some of its keys or values"
NOT_SHARDED = "the parameters of its queries are not sharded by head, and other tensor-parallel ranks use them too"


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


def report_text(what: str, heads: Sequence[Any], left: Sequence[SkippedHead]) -> str:
    """Return the lines of a report: changed heads with their parameters, then skipped heads."""
    lines = [f"{len(heads)} head{'s' * (len(heads) != 1)} {what}" + (":" if heads else "")]
    for head in heads:
        lines += [f"  {head}", *(f"    {touched}" for touched in head.touched)]
    return "\n".join([*lines, *(f"  {each}" for each in left)])


@dataclass(frozen=True, eq=False)
class Block:
    """A parameter with the shape that this rank computes with; its rows have the numbers from `first` to `last` - 1."""

    name: str
    parameter: torch.Tensor
    shape: tuple[int, ...]
    across: tuple[int, ...]
    offset: float
    first: int
    last: int


class Uses(NamedTuple):
    """Uses of rows: row `row[i]` contributes to feature `feature[i]` of head `head[i]`."""

    row: Indices
    head: Indices
    feature: Indices


def _joined(parts: Sequence[Uses]) -> Uses:
    return Uses(*np.concatenate([np.zeros((3, 0), dtype=np.int64), *parts], axis=1))


class HeadRows:
    """The heads of a watched model, and the rows of parameters that change the scores of each.

    Row `i` is multiplied by the factor of head `head[i]` to the power of `exponent[i]`; `head[i]` is −1 for a row that
    is not multiplied. All heads with the same number in `families` have one factor. `cuts` has the names of the
    parameters that are cut over each group of ranks that compute different heads.
    """

    def __init__(
        self, model: nn.Module, layers: Mapping[str, LayerHeads], frozen: Frozen, cuts: Sequence[frozenset[str]] = ()
    ) -> None:
        self._parameters, self._frozen = dict(model.named_parameters(remove_duplicate=False)), frozen
        self._blocks: dict[int, Block] = {}  # by the id of the parameter
        self._reasons: dict[str, str] = {}  # why a layer's heads cannot be multiplied
        self.count = 0  # of rows
        self.heads: list[Head] = [(name, head) for name, layer in layers.items() for head in range(layer.heads)]
        self.number_of = {head: number for number, head in enumerate(self.heads)}
        self.rounding = np.full(len(self.heads), ROUNDING)
        calls = [call for layer in layers.values() for call in layer.origins]
        self._widest = max((side.features for call in calls for side in (call.query, call.key) if side), default=1)
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
        self._main, self._partner, self._every = (_joined(each) for each in (main, partner, main + partner))
        self.blocks = list(self._blocks.values())
        self._ends = np.array([block.last for block in self.blocks], dtype=np.int64)
        self._of_values = np.zeros(self.count, dtype=np.bool_)
        self._of_values[_joined(values).row] = True
        self._divide(cuts)

    def why_fixed(self, number: int) -> str:
        """Return why a fixed head cannot be multiplied."""
        return self._reasons.get(self.heads[number][0], NOT_SHARDED if self._is_whole[number] else MIXED)

    def _follow(self, name: str, layer: LayerHeads) -> tuple[Uses, Uses, Uses]:
        """Return the uses of rows by queries, keys and values.

        If only the keys can be traced, their uses are returned first, in place of the queries.
        """
        query, key, value = (self._side(name, layer, side) for side in ("query", "key", "value"))
        none = _joined([])
        if isinstance(query, UntraceableError):
            if isinstance(key, UntraceableError):
                raise query
            query, key = key, none
        if isinstance(key, UntraceableError) or isinstance(value, UntraceableError):  # maybe the same rows
            key = none
        return query, key, none if isinstance(value, UntraceableError) else value

    def _side(self, name: str, layer: LayerHeads, side: str) -> Uses | UntraceableError:
        """Return the rows that produce the queries, keys or values of every call, or the error if they are unknown."""
        try:
            return _joined([self._uses(name, layer, getattr(call, side), side) for call in layer.origins])
        except UntraceableError as error:
            return error

    def _uses(self, name: str, layer: LayerHeads, origin: Origin | None, side: str) -> Uses:
        """Return the uses of rows by heads; a key head shared by several query heads counts for each of them."""
        if origin is None:
            raise UntraceableError("its scores are more than one product of queries and keys, or mix several heads")
        sources = origin.sources()
        if not sources:
            raise UntraceableError("no parameter makes its queries or keys")
        blocks = [self._block(source, side) for source in sources]
        shared = max(1, layer.heads // origin.heads)
        first = self.number_of[(name, 0)]
        found = []
        for source, block in zip(sources, blocks, strict=True):
            number = first + (source.heads[:, None] * shared + np.arange(shared)).ravel()
            if side != "value":
                self.rounding[number] = np.maximum(ROUNDING, torch.finfo(block.parameter.dtype).eps)
            feature = np.repeat(source.features, shared)
            found.append(Uses(block.first + np.repeat(source.rows, shared), number, number * self._widest + feature))
        return _joined(found)

    def _block(self, source: Source, side: str) -> Block:
        parameter = self._parameters.get(source.parameter)
        if parameter is None or part_with_shape(parameter, source.shape) is None:
            raise UntraceableError(f"{source.parameter} is not the parameter that was watched: sharded by tensor?")
        reason = None if side == "value" else why_not_written(source.parameter, parameter, self._frozen)
        if reason is not None:
            raise UntraceableError(reason)
        block = self._blocks.get(id(parameter))
        if block is None:
            rows = int(np.prod([size for axis, size in enumerate(source.shape) if axis not in source.across]))
            held = source.parameter, parameter, source.shape, source.across, source.offset
            block = self._blocks[id(parameter)] = Block(*held, self.count, self.count + rows)
            self.count += rows
        if (block.shape, block.across, block.offset) != (source.shape, source.across, source.offset):
            raise UntraceableError(f"{source.parameter} is used in two ways")
        return block

    def _divide(self, cuts: Sequence[frozenset[str]]) -> None:
        """Compute the families of heads, and the head and exponent of each row."""
        whole = np.zeros(self.count, dtype=np.bool_)
        for block in self.blocks:  # not cut, although ranks compute different heads
            whole[block.first : block.last] = any(block.name not in cut for cut in cuts)
        self.families = families = self._families()
        halved, is_mixed = self._halved(families, whole)
        self._is_whole = np.isin(families, families[self._main.head[whole[self._main.row]]])
        is_unknown = np.array([name in self._reasons for name, _ in self.heads], dtype=np.bool_)
        self.is_fixed = is_mixed | self._is_whole | is_unknown
        self.head, self.exponent = np.full(self.count, -1), np.zeros(self.count)
        for uses, share in ((self._main, np.where(halved, 0.5, 1.0)), (self._partner, np.where(halved, 0.5, 0.0))):
            takes = share[uses.feature] > 0
            self.head[uses.row[takes]], self.exponent[uses.row[takes]] = uses.head[takes], share[uses.feature[takes]]

    def _families(self) -> Indices:
        """Return the family of each head; heads that share a row for their queries have the same number."""
        makes_queries = np.zeros(self.count, dtype=np.bool_)
        makes_queries[self._main.row] = True
        chosen = makes_queries[self._every.row]
        row, head = self._every.row[chosen], self._every.head[chosen]
        family = np.arange(len(self.heads))
        while True:  # each iteration passes the smallest number of a row's heads to all of them
            least = np.full(self.count, len(family))
            np.minimum.at(least, row, family[head])
            now = family.copy()
            np.minimum.at(now, head, least[row])
            if (now == family).all():
                return family
            family = now

    def _halved(self, families: Indices, whole: Mask) -> tuple[Mask, Mask]:
        """Return two masks: features whose queries and keys share the factor; heads that cannot be multiplied."""
        main, partner, every = self._main, self._partner, self._every
        has_one_family = self._is_equal(every.row, families[every.head])
        own = has_one_family & ~self._of_values & ~whole
        halved = np.zeros(len(self.heads) * self._widest, dtype=np.bool_)
        halved[partner.feature] = True
        halved[partner.feature[~own[partner.row]]] = False
        is_torn = ~self._is_equal(every.row, halved[every.feature])  # rows of which some features are halved, some not
        torn = np.isin(families, families[every.head[is_torn[every.row]]])
        halved &= ~np.repeat(torn, self._widest)
        both = np.isin(main.row, partner.row) & ~halved[main.feature]
        mixed = main.head[both | self._of_values[main.row]]
        return halved, np.isin(families, families[mixed])

    def _is_equal(self, row: Indices, values: NDArray[np.generic]) -> Mask:
        """Return a mask of rows for which all values are equal."""
        low, high = np.full(self.count, np.inf), np.full(self.count, -np.inf)
        np.minimum.at(low, row, values.astype(np.float64))
        np.maximum.at(high, row, values.astype(np.float64))
        equal: Mask = low == high
        return equal

    def touched(self, factors: Floats) -> dict[int, tuple[Touched, ...]]:
        """Return the changed rows of every head that is multiplied, by its number, if heads have these factors."""
        if not len(factors):
            return {}
        by_row = np.where(self.head < 0, 1.0, factors[self.head] ** self.exponent)
        moved = (factors[self._every.head] != 1.0) & (by_row[self._every.row] != 1.0)
        head, row = np.unique(np.stack([self._every.head[moved], self._every.row[moved]]), axis=1)
        numbers = np.flatnonzero(factors != 1.0)
        bounds = np.searchsorted(head, [numbers, numbers + 1]).T.tolist()
        return {
            number: self._changes(row[begin:end], by_row)
            for number, (begin, end) in zip(numbers.tolist(), bounds, strict=True)
        }

    def _changes(self, row: Indices, by_row: Floats) -> tuple[Touched, ...]:
        """Group rows by parameter and factor."""
        block = np.searchsorted(self._ends, row, side="right")
        order = np.lexsort((row, by_row[row], block))
        row, block = row[order], block[order]
        starts = np.flatnonzero(np.diff(np.stack([block, by_row[row]]), prepend=-1.0, axis=1).any(0)).tolist()
        found = []
        for begin, end in pairwise([*starts, len(row)]):
            own = self.blocks[block[begin]]
            numbers = tuple((row[begin:end] - own.first).tolist())
            found.append(Touched(own.name, numbers, float(by_row[row[begin]]), own.across, own.offset))
        return tuple(found)
