"""Sums of each row of scores, one block of rows at a time, with any mask, bias and soft-cap; written for CPUs.

The attention output can be computed from the same scores, because scores and their exponentials are most of the work.
Scores are in bits internally, s·log₂e: 2ˣ is three times as fast as eˣ, and thirty times as fast if it underflows.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.row_sums import ROW_FIELDS, RowSums
from attnscale.measure.threads import share
from attnscale.numerics import is_surely_finite, wide_dtype
from attnscale.visibility import COUNTING_ROWS, Visibility

HIDDEN = 1e30  # subtracted from a hidden score; finite, because −∞ times zero is NaN
BITS = math.log2(math.e)  # bits per nat
SUMS = 7  # sums per row: max, Σw, Σ(s−m), ‖w‖, ‖s−m‖, Σw(s−m), s₁−m, with w = 2^{s−m}
CORE_SCORES = 2**17  # scores of several heads per block on one core: two buffers of 512 KB fit its cache
JOINED_SCORES = 2**18  # per thread, if torch's own threads share a block: larger, because each op must start them
ROW_SCORES = 2**19  # limit for one head with many keys
DEVICE_SCORES = 2**26  # scores per block on a GPU: two buffers of 256 MB
LEAST_ROWS, MOST_ROWS = 32, 128  # per product on a CPU: fewer are slow, more waste work on hidden keys if causal
WORTH_A_THREAD = 2**20  # scores; with fewer, torch's own waiting threads occupy the cores that ours need


class Strip(NamedTuple):
    """Part of the rows and heads of one batch entry: the task of one thread, which processes it block by block."""

    entry: int
    heads: slice
    rows: slice  # of the query, or of `positions` if rows are sampled


class Cut(NamedTuple):
    """Division of all rows into strips for threads, and of each strip into blocks of rows."""

    strips: tuple[Strip, ...]
    block: int  # rows processed at once
    threads: int  # number of threads that pay off on a CPU


def measure_rows(
    call: Call, positions: Tensor | None = None, output: Tensor | None = None, entries: Tensor | None = None
) -> RowSums:
    """Return the sums of every row, or of the rows at these positions; fill `output` with softmax(scores) V.

    `positions` are (rows,), or (batch, rows) if they differ by batch entry. With `entries`, (rows,), row i is
    positions[i] of batch entry entries[i], and the result has a batch of one.
    """
    if positions is not None and entries is not None:
        return _measure_entries(call, positions, entries)
    visible = visible_rows(call, positions)
    cut = in_strips(call, [(0, visible.shape[-1])] * visible.shape[0])
    return finished(_measure_strips(call, positions, visible, cut, output), visible)


def _measure_entries(call: Call, positions: Tensor, entries: Tensor) -> RowSums:
    entries, order = entries.sort(stable=True)
    visible = visible_rows(call)[entries, :, positions[order]].mT.unsqueeze(0)
    ends = torch.bincount(entries, minlength=call.query.shape[0]).cumsum(0).tolist()
    sums = _measure_strips(call, positions[order], visible, in_strips(call, list(pairwise([0, *ends]))), None)
    rows, back = finished(sums, visible), order.argsort()
    return RowSums(**{name: getattr(rows, name)[..., back] for name in ROW_FIELDS})


def rows_of(scores: Tensor, visible: Tensor | None) -> RowSums:
    """Return the sums of each row of scores, (batch, heads, rows, keys), at least float32; `visible=None` sees all."""
    *shape, keys = scores.shape
    if visible is None:
        count = torch.full((1,), keys, device=scores.device).expand(shape)
    else:
        count, scores = visible.sum(-1), scores.clamp(min=-HIDDEN)  # because −∞ times zero is NaN
    sums = _sums_of(scores, visible)
    return finished(_sums_of(scores.double(), visible) if past_float32(sums) else sums, count)


def _sums_of(scores: Tensor, visible: Tensor | None) -> Tensor:
    sums = scores.new_zeros(SUMS, *scores.shape[:-1])
    if scores.shape[-1]:
        both = scores.new_empty(2, *scores.shape)
        torch.mul(scores, BITS, out=both[1])
        reduce_rows(both, None if visible is None else visible.to(scores.dtype), sums)
    return sums


def _measure_strips(call: Call, positions: Tensor | None, visible: Tensor, cut: Cut, output: Tensor | None) -> Tensor:
    sums = _sums(call, positions, visible, cut, output, wide_dtype(call.query))
    if output is not None:
        output.div_(sums[1].clamp(min=1.0).unsqueeze(-1))  # below 1 only for a row without keys, with output zero
    return _sums(call, positions, visible, cut, None, torch.float64) if past_float32(sums) else sums


def _sums(
    call: Call, positions: Tensor | None, visible: Tensor, cut: Cut, output: Tensor | None, dtype: torch.dtype
) -> Tensor:
    make = torch.empty if call.key.shape[-2] else torch.zeros
    sums = make(SUMS, *visible.shape, dtype=dtype, device=call.query.device)
    share(Pass(call, positions, cut.block, sums, output).measure, cut.strips, cut.threads)
    return sums


def visible_rows(call: Call, positions: Tensor | None = None) -> Tensor:
    """Return the number of visible keys of each row, or of the rows at these positions: (batch, heads, rows)."""
    (batch, heads, q_len, _), seen = call.query.shape, call.visibility
    if positions is not None and positions.dim() == 1 and seen.documents is not None:  # counting all rows is quadratic
        every_key = slice(0, call.key.shape[-2])
        shown = [seen.shown(some, every_key, call.query.device) for some in positions.split(COUNTING_ROWS)]
        return torch.cat([each.sum(-1) for each in shown if each is not None], dim=-1).expand(batch, heads, -1)
    counts = seen.counts(q_len, call.key.shape[-2], call.query.device)
    if counts is None:
        rows = q_len if positions is None else positions.shape[-1]
        return torch.full((1,), call.key.shape[-2], device=call.query.device).expand(batch, heads, rows)
    counts = counts.expand(*counts.shape[:-1], q_len)
    if positions is not None and positions.dim() == 2:
        counts = counts.expand(batch, *counts.shape[-2:-1] or (1,), q_len)
        return counts.gather(-1, positions.long().unsqueeze(1).expand(-1, counts.shape[1], -1)).expand(-1, heads, -1)
    return (counts if positions is None else counts[..., positions]).expand(batch, heads, -1)


@dataclass(frozen=True)
class Pass:
    """One pass over the strips of an attention."""

    call: Call
    positions: Tensor | None
    block: int  # rows processed at once
    sums: Tensor  # (SUMS, batch, heads, rows)
    output: Tensor | None  # (batch, heads, rows, value_dim), times Σw; None if not requested

    def measure(self, strips: Iterator[Strip]) -> None:
        """Fill in the sums of these strips, and their output if requested."""
        chosen = dict[tuple[int, int], Tensor]()
        room = self.sums.new_empty(0)  # reused for all strips: a page fault costs more than filling the page
        with torch.no_grad():
            for strip in strips:
                query = self._query(strip, chosen)
                size = 2 * len(query) * min(self.block, query.shape[-2]) * self.call.key.shape[-2]
                room = room if len(room) >= size else self.sums.new_empty(size)
                self._measure(strip, query, room)

    def _measure(self, strip: Strip, query: Tensor, room: Tensor) -> None:
        key = self._of(self.call.key, strip).mT
        key = key.contiguous() if self._is_worth_a_copy(query) else key
        value = None if self.output is None else self._of(self.call.value, strip)
        place = strip.entry if self.sums.shape[1] > 1 else 0
        sums = self.sums[:, place, strip.heads, strip.rows].split(self.block, -1)
        outputs = None if self.output is None else self.output[strip].split(self.block, -2)
        seen = self.call.visibility.at(strip.entry, strip.heads)
        for index, part in enumerate(query.split(self.block, -2)):
            start = strip.rows.start + index * self.block
            rows = slice(start, start + part.shape[-2])
            at = self._positions(strip.entry, rows)
            ends = self._ends(at)
            keys = seen.span(*ends, key.shape[-1])
            if keys.start == keys.stop:  # rows without visible keys: sums and output are zero
                for empty in (sums[index], *(() if outputs is None else [outputs[index]])):
                    empty.zero_()
                continue
            shape = *part.shape[:2], keys.stop - keys.start
            both = room[: 2 * math.prod(shape)].view(2, *shape)
            torch.bmm(part, key[..., keys], out=both[1])
            shown = self._mask(seen, at, ends[0], keys, both[1])
            reduce_rows(both, shown, sums[index])
            if value is not None and outputs is not None:
                torch.bmm(both[0], value[:, keys], out=outputs[index])

    def _query(self, strip: Strip, chosen: dict[tuple[int, int], Tensor]) -> Tensor:
        """Return the scaled queries of a strip, (heads, rows, head_dim); `chosen` caches sampled rows of all heads."""
        query = self.call.query[strip.entry]
        at = self._positions(strip.entry, strip.rows)
        if isinstance(at, slice):
            return self._scaled(query[strip.heads, at])
        known = strip.entry, strip.rows.start
        if known not in chosen:
            # In most models the heads of a row are adjacent in memory: index_select copies a whole row at once.
            chosen[known] = self._scaled(query.transpose(0, 1).index_select(0, at)).transpose(0, 1)
        return chosen[known][strip.heads]

    def _scaled(self, query: Tensor) -> Tensor:
        return query.to(self.sums.dtype) * (self.call.scale * BITS)

    def _of(self, tensor: Tensor, strip: Strip) -> Tensor:
        """Return the keys or values that the query heads of a strip use."""
        if self.call.group == 1:
            return tensor[strip.entry, strip.heads].to(self.sums.dtype)
        shared = torch.arange(strip.heads.start, strip.heads.stop, device=tensor.device) // self.call.group
        return tensor[strip.entry, shared].to(self.sums.dtype)

    def _is_worth_a_copy(self, query: Tensor) -> bool:
        """Return True if enough blocks use the transposed keys to pay for a contiguous copy."""
        return query.device.type == "cpu" and query.shape[-2] >= 4 * self.block

    def _mask(self, seen: Visibility, at: slice | Tensor, lowest: int, keys: slice, scores: Tensor) -> Tensor | None:
        """Apply soft-cap and bias; return 1 for visible and 0 for hidden keys of the last columns; None if all visible.

        All keys before the last columns are visible.
        """
        cap = self.call.softcap
        if cap is not None:
            scores.div_(cap * BITS).tanh_().mul_(cap * BITS)
        if seen.is_full:
            return None
        bias = None if seen.bias is None else seen.added(at, keys, scores)
        if bias is not None:
            scores.add_(bias.clamp(min=-HIDDEN), alpha=BITS)
            return (bias != -math.inf).to(scores.dtype)
        shown = seen.shown(at, slice(keys.start + seen.sure(lowest, keys), keys.stop), scores.device)
        assert shown is not None
        return shown.to(scores.dtype)

    def _positions(self, entry: int, rows: slice) -> slice | Tensor:
        if self.positions is None:
            return rows
        return (self.positions if self.positions.dim() == 1 else self.positions[entry])[rows]

    def _ends(self, at: slice | Tensor) -> tuple[int, int]:
        """Return the first and last position of these rows; of all rows on a GPU, to avoid a synchronisation."""
        if isinstance(at, slice):
            return at.start, at.stop - 1
        if self.call.visibility.is_full or at.device.type != "cpu":
            return 0, self.call.query.shape[-2] - 1
        lowest, highest = at.aminmax()
        return int(lowest), int(highest)


def reduce_rows(both: Tensor, shown: Tensor | None, sums: Tensor) -> None:
    """Write the sums of each row of the scores in both[1]; write 2^{s−m} to both[0], 0 for hidden keys."""
    weights, below = both
    # Additions and products hide keys faster than masked ops. Only the last columns may have hidden keys.
    last = slice(below.shape[-1] - (0 if shown is None else shown.shape[-1]), None)
    if shown is not None:
        below[..., last].add_(shown - 1.0, alpha=HIDDEN)
    torch.amax(below, -1, out=sums[0])
    below.sub_(sums[0].unsqueeze(-1))
    if shown is not None:
        below[..., last].mul_(shown)
    torch.exp2(below, out=weights)
    if shown is not None:
        weights[..., last].mul_(shown)
    sums[6] = below[..., 0] if shown is None or last.start else _first_visible(below, shown)
    torch.sum(both, -1, out=sums[1:3])
    torch.linalg.vector_norm(both, dim=-1, out=sums[3:5])
    torch.sum(below.mul_(weights), -1, out=sums[5])


def _first_visible(scores: Tensor, shown: Tensor) -> Tensor:
    first = shown.argmax(-1, keepdim=True)
    return scores.gather(-1, first.expand(*scores.shape[:-1], 1)).squeeze(-1)


def past_float32(sums: Tensor) -> bool:
    """Return True if squares of the scores overflow float32; checked on a CPU only, since a GPU would synchronise."""
    return sums.device.type == "cpu" and not is_surely_finite(sums[4]) and bool(sums[4].isinf().any())


def finished(sums: Tensor, visible: Tensor) -> RowSums:
    """Convert the sums of reduce_rows() to RowSums, with scores in nats.

    Does not change `sums` in place, since it may be an inference tensor.
    """
    total, powers = sums[1], sums[3]
    highest, below, deviation, gap, first = (sums[each] / BITS for each in (0, 2, 4, 5, 6))
    some, count = total.clamp(min=1.0), visible.clamp(min=1).to(total.dtype)  # a row without keys keeps its zeros
    # Moments are relative to the maximum, so that a large mean does not cancel the digits of the variance.
    highest, mean = highest.masked_fill_(visible == 0, -math.inf), below.div_(count)
    squares = deviation.double().square() - count * mean.double().square()  # overflows float32 for scores above 1e19
    return RowSums(
        visible=visible,
        max=highest,
        total=total,
        gap=gap.neg_().div_(some),
        participation=(powers / some).square_(),
        mean=mean + highest,
        deviation=squares.clamp_(min=0.0),
        first=first,
    )


def in_strips(call: Call, entries: Sequence[tuple[int, int]]) -> Cut:
    """Divide the rows start:stop of each batch entry into strips."""
    heads, keys, is_here = call.query.shape[1], call.key.shape[-2], call.query.device.type == "cpu"
    threads = torch.get_num_threads() if is_here else 0
    return _cut_for(heads, keys, tuple(entries), threads, call.visibility.is_causal)


@lru_cache(maxsize=64)
def _cut_for(heads: int, keys: int, entries: tuple[tuple[int, int], ...], threads: int, is_causal: bool) -> Cut:
    """Return blocks that fit a core's cache or fill a GPU, and strips large enough to pay for a thread.

    `threads` is torch's number of threads on a CPU, and 0 on a GPU.
    """
    rows = max((stop - start for start, stop in entries), default=0)
    if not min(heads, rows, keys):
        return Cut((), 1, 0)
    worth = heads * keys * sum(stop - start for start, stop in entries) // WORTH_A_THREAD if threads else 0
    if threads:
        scores = CORE_SCORES if worth else JOINED_SCORES * threads
        block = max(LEAST_ROWS, min(MOST_ROWS, ROW_SCORES // keys))
        block = min(block, -(-rows // 2)) if is_causal else block  # the first half sees far fewer keys
    else:
        scores, block = DEVICE_SCORES, max(MOST_ROWS, DEVICE_SCORES // (heads * keys))
    block = min(block, rows)
    together = -(-heads // -(-heads * block * keys // scores))  # heads per block, in groups of equal size
    strip = block * max(1, WORTH_A_THREAD // (together * block * keys))
    strips = (
        Strip(entry, slice(head, min(head + together, heads)), slice(row, min(row + strip, stop)))
        for entry, (start, stop) in enumerate(entries)
        for head in range(0, heads, together)
        # The last rows of a causal head see most keys. Starting with them lets all threads end at about the same time.
        for row in reversed(range(start, stop, strip))
    )
    return Cut(tuple(strips), block, worth)
