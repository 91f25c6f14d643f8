"""The pass over the scores in plain torch, a block of rows at a time: any device, mask, bias and soft-cap.

Where the attention's output is wanted too, it comes from the same scores: they and their exponentials are most of the
work of both. Inside, scores are in bits, s·log₂e: 2ˣ is three times as fast as eˣ, thirty times where it underflows.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cpu.room import room_for
from attnscale.measure.cpu.threads import share
from attnscale.measure.cut import Cut, Strip, cut_of
from attnscale.measure.row_sums import ROW_FIELDS, RowSums
from attnscale.numerics import is_surely_finite, wide_dtype
from attnscale.visibility import Visibility

HIDDEN = 1e30  # subtracted from a hidden score: finite, since −∞ times zero is NaN
BITS = math.log2(math.e)  # in a score of one
SUMS = 7  # of a row: max, Σw, Σ(s−m), ‖w‖, ‖s−m‖, Σw(s−m), s₁−m, with w = 2^{s−m}


def measure_rows(
    call: Call, positions: Tensor | None = None, output: Tensor | None = None, entries: Tensor | None = None
) -> RowSums:
    """The sums of every row, or of the rows at these positions; `output` is filled with softmax(scores) V.

    `positions` are (rows,), or of each batch entry others, (batch, rows). `entries`: the batch entry of each position.
    The rows of all of them are then found as those of one.
    """
    return look_at_rows(call, positions, output, entries)()


def look_at_rows(
    call: Call, positions: Tensor | None = None, output: Tensor | None = None, entries: Tensor | None = None
) -> Callable[[], RowSums]:
    """The same, but for what is left to do when all scores were seen: it is done when it is first asked for."""
    if positions is not None and entries is not None:
        return _look_at_entries(call, positions, entries)
    visible = visible_rows(call, positions)
    cut = cut_of(call, [(0, visible.shape[-1])] * visible.shape[0])
    return cache(partial(finished, _passed_over(call, positions, visible, cut, output), visible))


def _look_at_entries(call: Call, positions: Tensor, entries: Tensor) -> Callable[[], RowSums]:
    entries, order = entries.sort(stable=True)
    visible = visible_rows(call)[entries, :, positions[order]].mT.unsqueeze(0)
    ends = torch.bincount(entries, minlength=call.query.shape[0]).cumsum(0).tolist()
    cut = cut_of(call, list(pairwise([0, *ends])))
    sums = _passed_over(call, positions[order], visible, cut, None)

    @cache
    def found() -> RowSums:
        rows, back = finished(sums, visible), order.argsort()
        return RowSums(**{name: getattr(rows, name)[..., back] for name in ROW_FIELDS})

    return found


def _passed_over(call: Call, positions: Tensor | None, visible: Tensor, cut: Cut, output: Tensor | None) -> Tensor:
    sums = _sums(call, positions, visible, cut, output, wide_dtype(call.query))
    if output is not None:
        output.div_(sums[1].clamp(min=1.0).unsqueeze(-1))  # only a row that sees nothing has less; its output is zero
    return _sums(call, positions, visible, cut, None, torch.float64) if past_float32(sums) else sums


def _sums(
    call: Call, positions: Tensor | None, visible: Tensor, cut: Cut, output: Tensor | None, dtype: torch.dtype
) -> Tensor:
    make = torch.empty if call.key.shape[-2] else torch.zeros
    sums = make(SUMS, *visible.shape, dtype=dtype, device=call.query.device)
    share(Pass(call, positions, cut.block, sums, output).measure, cut.strips, cut.threads)
    return sums


def visible_rows(call: Call, positions: Tensor | None = None) -> Tensor:
    """Visible keys of each row, or of the rows at these positions: (batch, heads, rows), expanded, not copied."""
    batch, heads, q_len, _ = call.query.shape
    counts = call.visibility.counts(q_len, call.key.shape[-2], call.query.device)
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
    """What the strips of one pass share."""

    call: Call
    positions: Tensor | None
    block: int  # rows
    sums: Tensor  # (SUMS, batch, heads, rows)
    output: Tensor | None  # (batch, heads, rows, value_dim), times Σw; None: not wanted

    def measure(self, strips: Iterator[Strip]) -> None:
        """Fill in the sums of these strips, and their output."""
        chosen = dict[tuple[int, int], Tensor]()
        with torch.no_grad():
            for strip in strips:
                self._measure(strip, self._query(strip, chosen))

    def _measure(self, strip: Strip, query: Tensor) -> None:
        """One strip, with two buffers for the scores of a block."""
        key = self._of(self.call.key, strip).mT
        key = key.contiguous() if self._is_worth_a_copy(query) else key
        value = None if self.output is None else self._of(self.call.value, strip)
        place = strip.entry if self.sums.shape[1] > 1 else 0
        sums = self.sums[:, place, strip.heads, strip.rows].split(self.block, -1)
        outputs = None if self.output is None else self.output[strip].split(self.block, -2)
        seen = self.call.visibility.at(strip.entry, strip.heads)
        room = room_for(2 * len(query) * min(self.block, query.shape[-2]) * key.shape[-1], self.sums)
        for index, part in enumerate(query.split(self.block, -2)):
            start = strip.rows.start + index * self.block
            rows = slice(start, start + part.shape[-2])
            at = self._positions(strip.entry, rows)
            ends = self._ends(at)
            keys = seen.span(*ends, key.shape[-1])
            if keys.start == keys.stop:  # rows that see nothing: their sums and their output are zero
                for empty in (sums[index], *(() if outputs is None else [outputs[index]])):
                    empty.zero_()
                continue
            shape = *part.shape[:2], keys.stop - keys.start
            both = room[: 2 * math.prod(shape)].view(2, *shape)
            torch.bmm(part, key[..., keys], out=both[1])
            shown = self._shown(seen, at, ends[0], keys, both[1])
            reduce_rows(both, shown, sums[index])
            if value is not None and outputs is not None:
                torch.bmm(both[0], value[:, keys], out=outputs[index])

    def _query(self, strip: Strip, chosen: dict[tuple[int, int], Tensor]) -> Tensor:
        """(heads, rows, head_dim), with products that are scores; rows that were `chosen` before, of all heads."""
        query = self.call.query[strip.entry]
        at = self._positions(strip.entry, strip.rows)
        if isinstance(at, slice):
            return self._scaled(query[strip.heads, at])
        known = strip.entry, strip.rows.start
        if known not in chosen:
            # heads of a row lie side by side in most models: chosen by row, they are copied in one piece
            chosen[known] = self._scaled(query.transpose(0, 1).index_select(0, at)).transpose(0, 1)
        return chosen[known][strip.heads]

    def _scaled(self, query: Tensor) -> Tensor:
        return query.to(self.sums.dtype) * (self.call.scale * BITS)

    def _of(self, tensor: Tensor, strip: Strip) -> Tensor:
        """The key or value of these query heads."""
        if self.call.group == 1:
            return tensor[strip.entry, strip.heads].to(self.sums.dtype)
        shared = torch.arange(strip.heads.start, strip.heads.stop, device=tensor.device) // self.call.group
        return tensor[strip.entry, shared].to(self.sums.dtype)

    def _is_worth_a_copy(self, query: Tensor) -> bool:
        """Whether keys, turned so that a product reads them in a row, are used by several blocks."""
        return query.device.type == "cpu" and query.shape[-2] >= 4 * self.block

    def _shown(self, seen: Visibility, at: slice | Tensor, lowest: int, keys: slice, scores: Tensor) -> Tensor | None:
        """Cap and bias the scores; 1 or 0 for each of the last columns that is shown or hidden, None: all shown."""
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
        """Where these rows are in the query."""
        if self.positions is None:
            return rows
        return (self.positions if self.positions.dim() == 1 else self.positions[entry])[rows]

    def _ends(self, at: slice | Tensor) -> tuple[int, int]:
        """The first and the last of these rows; of rows chosen on a GPU none is known: to look would be to wait."""
        if isinstance(at, slice):
            return at.start, at.stop - 1
        if self.call.visibility.is_full or at.device.type != "cpu":
            return 0, self.call.query.shape[-2] - 1
        lowest, highest = at.aminmax()
        return int(lowest), int(highest)


def reduce_rows(both: Tensor, shown: Tensor | None, sums: Tensor) -> None:
    """From the scores, the second of `both`, the sums of each row; the first is left with 2^{s−m}, 0 where hidden."""
    weights, below = both
    # Hidden keys by adds and products, which run at full speed, over the columns where there may be some.
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
    sums[6] = below[..., 0] if shown is None or last.start else _first_shown(below, shown)
    torch.sum(both, -1, out=sums[1:3])
    torch.linalg.vector_norm(both, dim=-1, out=sums[3:5])
    torch.sum(below.mul_(weights), -1, out=sums[5])


def _first_shown(scores: Tensor, shown: Tensor) -> Tensor:
    first = shown.argmax(-1, keepdim=True)
    return scores.gather(-1, first.expand(*scores.shape[:-1], 1)).squeeze(-1)


def past_float32(sums: Tensor) -> bool:
    """Whether squares of these scores are past what float32 holds; of a GPU it is not known without waiting for it."""
    return sums.device.type == "cpu" and not is_surely_finite(sums[4]) and bool(sums[4].isinf().any())


def finished(sums: Tensor, visible: Tensor) -> RowSums:
    """The sums that reduce_rows() left, as they are kept: scores in nats again.

    They are left as they are: in inference mode they may be made, and be asked for outside it.
    """
    total, powers = sums[1], sums[3]
    highest, below, deviation, gap, first = (sums[each] / BITS for each in (0, 2, 4, 5, 6))
    some, count = total.clamp(min=1.0), visible.clamp(min=1).to(total.dtype)  # a row that sees nothing keeps its zeros
    # moments about the maximum, which is never far: a large mean does not swallow the variance
    highest, mean = highest.masked_fill_(visible == 0, -math.inf), below.div_(count)
    squares = deviation.double().square() - count * mean.double().square()  # of scores past 1e19, past float32
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
