"""The calls of a probed step: their numbers lie in a buffer on the model's device, and on the host when it is copied.

While the model runs, a call is a note of its sizes and a place in the buffer. What a traced call has beside that, a
MeasuredCall, is made of the plan and the buffer when it is asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
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
LENGTHS = 6  # of queries, then of keys: Σ‖·‖², how many, and the largest ‖·‖²
NUMBERS_A_HEAD = TABLE + 2 * LENGTHS + 1
COLUMNS = (POOLED, LENGTHS, LENGTHS, 1)  # what is recorded of a head: table, lengths, gradients, scale


class CallNumbers(NamedTuple):
    """The numbers of one call, float64: views of its row of a buffer."""

    table: Tensor  # (heads, TABLE), of which the columns of POOLED are always written
    lengths: Tensor  # (2, 3, heads): of queries and keys
    gradients: Tensor  # (2, 3, heads): of what reaches them
    scales: Tensor  # (heads,), written where the plan does not say them

    @classmethod
    def of_row(cls, row: Tensor, heads: int) -> "CallNumbers":
        """Return the views of a row."""
        sizes = [heads * size for size in (TABLE, LENGTHS, LENGTHS, 1)]
        table, lengths, gradients, scales, _ = row.split([*sizes, len(row) - sum(sizes)])
        return cls(table.view(heads, TABLE), lengths.view(2, 3, heads), gradients.view(2, 3, heads), scales)


class NumbersBuffer:
    """A buffer on one device, with a row for each planned call; the same rows are used again at every step."""

    def __init__(self, device: torch.device, calls: int, heads: int) -> None:
        self.device, self._shape = device, (calls, heads * NUMBERS_A_HEAD)
        self._parts: list[Tensor] = []  # further ones for further micro-batches
        self._numbers: list[CallNumbers] = []
        self._used = 0

    def begin(self) -> None:
        """Use it from its beginning; what several calls add up to begins at zero."""
        self._used = 0
        for part in self._parts:
            part.zero_()

    def next(self, heads: int) -> tuple[int, CallNumbers]:
        """Return the number of the next row, and its views."""
        number, self._used = self._used, self._used + 1
        if number == len(self._numbers) or len(self._numbers[number].scales) != heads:
            part, row = divmod(number, self._shape[0])
            if part == len(self._parts):
                self._parts.append(torch.zeros(self._shape, dtype=torch.float64, device=self.device))
            self._numbers[number : number + 1] = [CallNumbers.of_row(self._parts[part][row], heads)]
        return number, self._numbers[number]

    def to_host(self) -> "HostNumbers":
        """Copy what this step has written, without waiting for a GPU."""
        is_cuda = self.device.type == "cuda"
        parts = self._parts[: -(-self._used // self._shape[0])]
        copies = [part.to("cpu", non_blocking=True) if is_cuda else part.cpu().clone() for part in parts]
        event = torch.cuda.current_stream(self.device).record_event() if is_cuda else None
        return HostNumbers(copies, tuple(len(each.scales) for each in self._numbers[: self._used]), event)


@dataclass(frozen=True, eq=False)
class HostNumbers:
    """A step's buffer, while it is copied to the host and after."""

    _parts: list[Tensor]
    heads: tuple[int, ...]  # of each row
    _event: "torch.cuda.Event | None"

    @property
    def has_arrived(self) -> bool:
        """True if reading it does not wait for a GPU."""
        return self._event is None or self._event.query()

    @cached_property
    def _rows(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)

    def of(self, number: int) -> CallNumbers:
        """Wait for it, and return the numbers of a call."""
        return CallNumbers.of_row(self._rows[number], self.heads[number])

    @cached_property
    def columns(self) -> tuple[Tensor, ...]:
        """Numbers of each call that add up over calls, (heads, COLUMNS)."""
        if not self.heads:
            return ()
        columns = self._rows.flatten()[_column_index(self.heads, self._rows.shape[1])]
        return torch.split(columns, list(self.heads))


@lru_cache(maxsize=16)
def _column_index(heads: tuple[int, ...], width: int) -> Tensor:
    """Return where the columns of each head lie, (heads of all, COLUMNS), in rows so wide."""
    found = []
    for row, own in zip(torch.arange(len(heads) * width).view(-1, width), heads, strict=True):
        numbers = CallNumbers.of_row(row, own)
        by_head = [numbers.lengths.flatten(0, 1), numbers.gradients.flatten(0, 1), numbers.scales[None]]
        found.append(torch.cat([numbers.table[:, :POOLED], torch.cat(by_head).mT], dim=1))
    return torch.cat(found)


@dataclass(eq=False, repr=False)
class ProbedCall:
    """One call of a probed step."""

    planned: PlannedCall
    depth: int  # runs of its module before this one, in the same forward
    batch: int
    query_len: int
    key_len: int
    dtype: torch.dtype
    key_heads: int
    softcap: float | None
    place: int  # in the buffer
    buffer: CallNumbers
    multiplier: float | None = None  # of q·k; None where the buffer has the scale of each head
    padding: Tensor | None = None
    stats: ScoreStats | None = None  # to be pooled into the buffer, where no kernel writes there
    probed: SampledRows | None = None  # what a kernel leaves beside the buffer
    has_gradients: tuple[bool, bool] = (False, False)  # of queries and of keys, in the buffer
    is_over: bool = False  # its step, to its end or not
    host: HostNumbers | None = None  # once the step is over

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.planned.template.heads

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.planned.template.head_dim

    @property
    def rescaled(self) -> tuple[str, ...]:
        """Sides that are normalised, or given a temperature, after their projection."""
        return self.planned.template.rescaled

    @property
    def first_row(self) -> tuple[object, ...]:
        """Row of a parameter that makes the query of the first head; empty where that is unknown."""
        return self.planned.template.first_row

    @property
    def factors(self) -> Factors:
        """Constants that multiplied queries and keys before the call, (2, heads)."""
        return self.planned.head_factors(self.key_heads)

    @cached_property
    def numbers(self) -> CallNumbers:
        """The numbers on the host; waits for them."""
        assert self.host is not None  # it is asked for once the step is over
        return self.host.of(self.place)

    @property
    def columns(self) -> Tensor:
        """Numbers that add up over calls, (heads, COLUMNS), on the host; waits for them."""
        assert self.host is not None  # it is asked for once the step is over
        return self.host.columns[self.place]

    @cached_property
    def statistics(self) -> ScoreStats:
        """Statistics of the scores; what a kernel has pooled is read when one of them is."""
        return self.stats or ScoreStats(self.heads, exact=False, pool=self._pooled)

    def _pooled(self) -> Pooled:
        assert self.probed is not None  # or there are statistics
        table, (queries, keys) = self.numbers.table, self.numbers.lengths[:, 2]
        table[:, BOUND] = torch.maximum(table[:, BOUND], score_bound(self.multiplier or 0.0, queries, keys))
        return self.probed.on_host(table)

    def add_gradients(self, query: Tensor, key: Tensor) -> None:
        """Add what reached queries and keys, or the operands of a product."""
        if self.is_over:
            return  # the next step writes to this row
        if self.planned.written is not None:
            query, key = self.planned.written.layout.operands(query, key)
        own, copies = _key_copies(self.planned, key.shape[1])
        if copies > 1:  # what reaches the copies of a key reaches the key
            key = key.unflatten(1, (-1, copies)).sum(2, dtype=wide_dtype(key))
        elif own is not None and copies == 0:
            index, wide = constant_on(key.device, own), key.to(wide_dtype(key))
            key = torch.zeros_like(wide[:, : int(own.max()) + 1]).index_add_(1, index, wide)[:, index]
        add_lengths_(self.buffer.gradients, query.to(key.dtype), key)
        self.has_gradients = (True, own is not None)

    @cached_property
    def seen(self) -> MeasuredCall:
        """The call as a trace would have seen it."""
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
    """Return which key each of so many copies is of, None if unknown, and how many stand side by side, 0 if apart."""
    owners, group = planned.template.key_owners, planned.template.heads // keys
    if owners is None or shares_as_kernels_do(planned.template.heads, keys, owners):
        return np.arange(keys), 1
    own = owners[::group]
    if len(own) != keys or (owners != own.repeat(group)).any():
        return None, 0
    copies = keys // (int(own.max()) + 1)
    return own, copies if (own == np.arange(keys) // copies).all() else 0


def score_bound(multiplier: Tensor | float, queries: Tensor, keys: Tensor) -> Tensor:
    """Return an upper bound of the scores of each head, by the squared lengths of its longest query and key."""
    bound = ((queries * keys).sqrt() * multiplier).abs()
    return bound + BOUND_SLACK * bound.clamp(min=1.0)


def finish(calls: Sequence[ProbedCall], buffers: Sequence[NumbersBuffer]) -> None:
    """Pool what is not pooled yet, and have the buffers copied to the host."""
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
    """Return numbers and sums of all heads of all, (heads, POOLED) in float64."""
    numbers = [torch.cat([getattr(each, name) for each in pooled]).double() for name in NUMBERS]
    return torch.cat([torch.stack(numbers, dim=-1), torch.cat([each.sums for each in pooled])], dim=-1)
