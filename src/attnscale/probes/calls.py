"""Calls of a probed step, with their numbers in a buffer on the model's device that is then copied to the host.

While the model runs, only the sizes of a call and its place in the buffer are recorded. A MeasuredCall, the result of a
trace, is built from the plan and the buffer on request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.measure.cuda.sampled import SampledRows
from attnscale.measure.lengths import BOUND_SLACK, add_lengths_
from attnscale.measure.pooled import NUMBERS, SUMS, TABLE, Pooled
from attnscale.measure.stats import ScoreStats
from attnscale.numerics import constant_on, wide_dtype
from attnscale.torch_internals import copy_each_
from attnscale.tracing.coordinates import Indices
from attnscale.watching.gradients import GradientLengths, shares_as_kernels_do
from attnscale.watching.layer import Factors, MeasuredCall
from attnscale.watching.plan import PlannedCall

POOLED = len(NUMBERS) + len(SUMS)  # columns of a table that add up over calls
BOUND = NUMBERS.index("max_bound")
LENGTHS = 6  # for queries, then for keys: Σ‖·‖², the number of vectors, and the largest ‖·‖²
NUMBERS_A_HEAD = TABLE + 2 * LENGTHS + 1
COLUMNS = (POOLED, LENGTHS, LENGTHS, 1)  # numbers per head: table, lengths, gradients, scale


class CallNumbers(NamedTuple):
    """Numbers of one call, float64: views of its row of a buffer."""

    table: Tensor  # (heads, TABLE); the first POOLED columns are always written
    lengths: Tensor  # (2, 3, heads), for queries and keys
    gradients: Tensor  # (2, 3, heads), for the gradients of queries and keys
    scales: Tensor  # (heads,), written if the plan does not determine them

    @classmethod
    def of_row(cls, row: Tensor, heads: int) -> "CallNumbers":
        """Split a row into its views."""
        sizes = [heads * size for size in (TABLE, LENGTHS, LENGTHS, 1)]
        table, lengths, gradients, scales, _ = row.split([*sizes, len(row) - sum(sizes)])
        return cls(table.view(heads, TABLE), lengths.view(2, 3, heads), gradients.view(2, 3, heads), scales)


class NumbersBuffer:
    """Buffer on one device with a row for each planned call; every step reuses the same rows."""

    def __init__(self, device: torch.device, calls: int, heads: int) -> None:
        self.device, self._shape = device, (calls, heads * NUMBERS_A_HEAD)
        self._parts: list[Tensor] = []  # grows with the number of micro-batches
        self._numbers: list[CallNumbers] = []
        self._used = 0

    def begin(self) -> None:
        """Start a step: reuse the rows from the first one, and set them to zero."""
        self._used = 0
        for part in self._parts:
            part.zero_()

    def next(self, heads: int) -> tuple[int, CallNumbers]:
        """Return the index of the next row, and its views."""
        number, self._used = self._used, self._used + 1
        if number == len(self._numbers) or len(self._numbers[number].scales) != heads:
            part, row = divmod(number, self._shape[0])
            if part == len(self._parts):
                self._parts.append(torch.zeros(self._shape, dtype=torch.float64, device=self.device))
            self._numbers[number : number + 1] = [CallNumbers.of_row(self._parts[part][row], heads)]
        return number, self._numbers[number]

    def to_host(self) -> "HostNumbers":
        """Copy the rows that this step has written, without a synchronisation."""
        is_cuda = self.device.type == "cuda"
        parts = self._parts[: -(-self._used // self._shape[0])]
        copies = [part.to("cpu", non_blocking=True) if is_cuda else part.cpu().clone() for part in parts]
        event = torch.cuda.current_stream(self.device).record_event() if is_cuda else None
        return HostNumbers(copies, tuple(len(each.scales) for each in self._numbers[: self._used]), event)


@dataclass(frozen=True, eq=False)
class HostNumbers:
    """Buffer of a step on the host; the copy may still be in progress."""

    _parts: list[Tensor]
    heads: tuple[int, ...]  # number of heads of each row
    _event: "torch.cuda.Event | None"

    @property
    def has_arrived(self) -> bool:
        """True if the copy is complete."""
        return self._event is None or self._event.query()

    @cached_property
    def _rows(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)

    def of(self, number: int) -> CallNumbers:
        """Return the numbers of a call; waits for the copy."""
        return CallNumbers.of_row(self._rows[number], self.heads[number])

    @cached_property
    def columns(self) -> list[NDArray[np.float64]]:
        """Numbers of each call that can be summed over calls, (heads, COLUMNS).

        In NumPy: torch may start a thread for every core, which takes longer than so few numbers.
        """
        if not self.heads:
            return []
        columns = self._rows.numpy().ravel()[_column_index(self.heads, self._rows.shape[1])]
        return np.split(columns, np.cumsum(self.heads)[:-1])


@lru_cache(maxsize=16)
def _column_index(heads: tuple[int, ...], width: int) -> Indices:
    """Return the indices of the columns of each head, (total heads, COLUMNS), in rows of this width."""
    found = []
    for row, own in zip(torch.arange(len(heads) * width).view(-1, width), heads, strict=True):
        numbers = CallNumbers.of_row(row, own)
        by_head = [numbers.lengths.flatten(0, 1), numbers.gradients.flatten(0, 1), numbers.scales[None]]
        found.append(torch.cat([numbers.table[:, :POOLED], torch.cat(by_head).mT], dim=1))
    return torch.cat(found).numpy()


@dataclass(eq=False, repr=False)
class ProbedCall:
    """One call of a probed step."""

    planned: PlannedCall
    depth: int  # earlier runs of its module in the same forward
    batch: int
    query_len: int
    key_len: int
    dtype: torch.dtype
    key_heads: int
    softcap: float | None
    place: int  # row of the buffer
    buffer: CallNumbers
    multiplier: float | None = None  # scale of q·k; None if the buffer has the scale of each head
    padding: Tensor | None = None
    stats: ScoreStats | None = None  # statistics to pool into the buffer, if no kernel wrote to it
    probed: SampledRows | None = None  # sampled rows, if a kernel wrote to the buffer
    has_gradients: tuple[bool, bool] = (False, False)  # True if the buffer has those of queries, and of keys
    is_over: bool = False  # True if its step has ended, even by an error
    host: HostNumbers | None = None  # set at the end of the step

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.planned.template.heads

    @property
    def head_dim(self) -> int:
        """Number of features of a head."""
        return self.planned.template.head_dim

    @property
    def rescaled(self) -> tuple[str, ...]:
        """Sides, query or key, that pass a norm or a temperature after their projection."""
        return self.planned.template.rescaled

    @property
    def first_row(self) -> tuple[object, ...]:
        """Row of a parameter that produces the query of the first head; empty if unknown."""
        return self.planned.template.first_row

    @property
    def factors(self) -> Factors:
        """Constants that multiplied queries and keys before the call, (2, heads)."""
        return self.planned.head_factors(self.key_heads)

    @cached_property
    def numbers(self) -> CallNumbers:
        """Numbers of this call on the host; waits for the copy."""
        assert self.host is not None  # set at the end of the step
        return self.host.of(self.place)

    @property
    def columns(self) -> NDArray[np.float64]:
        """Numbers that can be summed over calls, (heads, COLUMNS), on the host; waits for the copy."""
        assert self.host is not None  # set at the end of the step
        return self.host.columns[self.place]

    @cached_property
    def statistics(self) -> ScoreStats:
        """Statistics of the scores; numbers from a kernel are read when a statistic is first read."""
        return self.stats or ScoreStats(self.heads, exact=False, pool=self._pooled)

    @property
    def needs_bound(self) -> bool:
        """True if the upper bound of the scores must come from the longest query and key."""
        return self.probed is not None and self.multiplier is not None

    def _pooled(self) -> Pooled:
        assert self.probed is not None  # otherwise self.stats is set
        table, (queries, keys) = self.numbers.table, self.numbers.lengths[:, 2]
        if self.multiplier is not None:
            table[:, BOUND] = torch.maximum(table[:, BOUND], score_bound(self.multiplier, queries, keys))
        return self.probed.on_host(table)

    def add_gradients(self, query: Tensor, key: Tensor) -> None:
        """Add the gradients of queries and keys, or of the operands of a matrix product."""
        if self.is_over:
            return  # the next step may use this row
        if self.planned.written is not None:
            query, key = self.planned.written.layout.operands(query, key)
        own, copies = _key_copies(self.planned, key.shape[1])
        if copies > 1:  # the gradient of a key is the sum over its copies
            key = key.unflatten(1, (-1, copies)).sum(2, dtype=wide_dtype(key))
        elif own is not None and copies == 0:
            index, wide = constant_on(key.device, own), key.to(wide_dtype(key))
            key = torch.zeros_like(wide[:, : int(own.max()) + 1]).index_add_(1, index, wide)[:, index]
        add_lengths_(self.buffer.gradients, query.to(key.dtype), key)
        self.has_gradients = (True, own is not None)

    @cached_property
    def seen(self) -> MeasuredCall:
        """The call in the form that a trace returns."""
        return self._seen(self.numbers, self.statistics)

    def _seen(self, numbers: CallNumbers, stats: ScoreStats) -> MeasuredCall:
        seen, factors = self.planned.seen(), constant_on(numbers.lengths.device, self.factors)
        query_norm, key_norm = (numbers.lengths[:, 0] / numbers.lengths[:, 1].clamp(min=1.0)).sqrt() / factors
        scales = numbers.scales if self.multiplier is None else torch.from_numpy(self.multiplier * self.factors.prod(0))
        seen.batch, seen.query_len, seen.key_len, seen.dtype = self.batch, self.query_len, self.key_len, self.dtype
        seen.stats, seen.scales = stats, scales
        seen.padding = None if self.padding is None else self.padding.to(numbers.lengths.device)
        seen.query_norm, seen.key_norm, seen.depth = query_norm, key_norm, self.depth
        lengths = numbers.gradients[:, 0].sqrt()
        query, key = (row if known else None for row, known in zip(lengths, self.has_gradients, strict=True))
        seen.gradients = GradientLengths(query, key)
        return seen


@lru_cache(maxsize=4096)
def _key_copies(planned: PlannedCall, keys: int) -> tuple[Indices | None, int]:
    """Return the key head of each repeated key, None if unknown, and the number of adjacent copies, else 0."""
    owners, group = planned.template.key_owners, planned.template.heads // keys
    if owners is None or shares_as_kernels_do(planned.template.heads, keys, owners):
        return np.arange(keys), 1
    own = owners[::group]
    if len(own) != keys or (owners != own.repeat(group)).any():
        return None, 0
    copies = keys // (int(own.max()) + 1)
    return own, copies if (own == np.arange(keys) // copies).all() else 0


Numbers = TypeVar("Numbers", Tensor, NDArray[np.float64])


def score_bound(multiplier: Numbers | float, queries: Numbers, keys: Numbers) -> Numbers:
    """Return an upper bound of the scores of each head, from the squared norms of its longest query and key."""
    bound = abs((queries * keys) ** 0.5 * multiplier)
    return bound + BOUND_SLACK * bound.clip(min=1.0)


def finish(calls: Sequence[ProbedCall], buffers: Sequence[NumbersBuffer]) -> None:
    """Pool the remaining statistics into the buffers, and start to copy the buffers to the host."""
    unpooled = [(call, call.stats) for call in calls if call.stats is not None]
    pooled = [stats.pooled for _, stats in unpooled]
    hosts = []
    for buffer in buffers:
        here = [
            (call.buffer.table[:, :POOLED], each)
            for (call, _), each in zip(unpooled, pooled, strict=True)
            if call.buffer.table.device == buffer.device
        ]
        if here:
            columns = pooled_columns([each for _, each in here])
            copy_each_([table for table, _ in here], columns.split([len(table) for table, _ in here]))
        hosts.append(buffer.to_host())
    by_device = {buffer.device: host for buffer, host in zip(buffers, hosts, strict=True)}
    for call in calls:
        call.host = by_device[call.buffer.table.device]


def pooled_columns(pooled: Sequence[Pooled]) -> Tensor:
    """Concatenate the numbers and sums of all heads, float64 (heads, POOLED)."""
    numbers = [torch.cat([getattr(each, name) for each in pooled]).double() for name in NUMBERS]
    return torch.cat([torch.stack(numbers, dim=-1), torch.cat([each.sums for each in pooled])], dim=-1)
