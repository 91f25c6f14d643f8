"""The pass over the scores in plain torch, a block of rows at a time: any device, mask, bias and soft-cap.

Where the attention's output is wanted too, it comes from the same scores: they and their exponentials are most of the
work of both.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cpu.threads import share
from attnscale.measure.row_sums import RowSums
from attnscale.numerics import wide_dtype

CORE_SCORES = 2**19  # scores at a time on a core: two buffers of 2 MB in float32
DEVICE_SCORES = 2**26  # scores at a time on a GPU: two of 256 MB
LEAST_ROWS, MOST_ROWS = 64, 256  # of one product on a CPU: fewer make it slow, more hide much of a causal block
WORTH_A_THREAD = 2**20  # scores; for fewer, the cores that torch's own threads hold while they wait for work are missed
HIDDEN = 1e30  # subtracted from a hidden score: finite, since −∞ times zero is NaN
LOG2_E = math.log2(math.e)


class Block(NamedTuple):
    """Some rows of some heads of one batch entry."""

    entry: int
    heads: slice
    rows: slice  # of the query, or of the positions given


def measure_rows(
    call: Call, positions: Tensor | None = None, output: Tensor | None = None, entries: Tensor | None = None
) -> RowSums:
    """The sums of every row, or of the rows at these positions; `output` is filled with softmax(scores) V.

    `entries`: the batch entry of each position. The rows of all of them are then found as those of one.
    """
    if positions is not None and entries is not None:
        return _measure_entries(call, positions, entries)
    visible = visible_rows(call, positions)
    blocks = _cut(call, [slice(0, visible.shape[-1])] * visible.shape[0])
    return _measure(call, positions, visible, blocks, output)


def _measure_entries(call: Call, positions: Tensor, entries: Tensor) -> RowSums:
    entries, order = entries.sort(stable=True)
    visible = visible_rows(call)[entries, :, positions[order]].mT.unsqueeze(0)
    ends = torch.bincount(entries, minlength=call.query.shape[0]).cumsum(0).tolist()
    blocks = _cut(call, [slice(start, stop) for start, stop in pairwise([0, *ends])])
    found = _measure(call, positions[order], visible, blocks, None)
    back = order.argsort()
    return RowSums(**{each.name: getattr(found, each.name)[..., back] for each in fields(found)})


def _measure(
    call: Call, positions: Tensor | None, visible: Tensor, blocks: list[Block], output: Tensor | None
) -> RowSums:
    make = torch.empty if call.key.shape[-2] else torch.zeros
    found = Pass(call, positions, make(6, *visible.shape, dtype=wide_dtype(call.query), device=visible.device))
    threads = visible.numel() * call.key.shape[-2] // WORTH_A_THREAD
    if threads and call.query.device.type == "cpu":
        share(lambda taken: found.measure(taken, output), blocks, threads)
    else:
        found.measure(iter(blocks), output)
    return finished(found.sums, visible)


def visible_rows(call: Call, positions: Tensor | None = None) -> Tensor:
    """Visible keys of each row, or of the rows at these positions: (batch, heads, rows), expanded, not copied."""
    batch, heads, q_len, _ = call.query.shape
    counts = call.visibility.counts(q_len, call.key.shape[-2], call.query.device)
    if counts is None:
        counts = torch.full((1,), call.key.shape[-2], device=call.query.device)
    counts = counts.expand(*counts.shape[:-1], q_len)
    return (counts if positions is None else counts[..., positions]).expand(batch, heads, -1)


def _cut(call: Call, entries: list[slice]) -> list[Block]:
    """The rows of each batch entry in blocks that stay in a core's cache, or that fill a GPU."""
    heads, keys = call.query.shape[1], call.key.shape[-2]
    rows = max((part.stop - part.start for part in entries), default=0)
    if not min(heads, rows, keys):
        return []
    if call.query.device.type == "cpu":
        scores, block = CORE_SCORES, max(LEAST_ROWS, min(MOST_ROWS, CORE_SCORES // keys))
        block = min(block, -(-rows // 2)) if call.visibility.is_causal else block  # the first half sees much less
    else:
        scores, block = DEVICE_SCORES, max(LEAST_ROWS, DEVICE_SCORES // (heads * keys))
    block = min(block, rows)
    together = max(1, min(heads, scores // (block * keys)))
    return [
        Block(entry, slice(head, min(head + together, heads)), slice(row, min(row + block, part.stop)))
        for entry, part in enumerate(entries)
        for head in range(0, heads, together)
        for row in reversed(
            range(part.start, part.stop, block)
        )  # the longest of a causal head first: the threads end together
    ]


@dataclass(frozen=True)
class Pass:
    """What the blocks of one pass share."""

    call: Call
    positions: Tensor | None
    sums: Tensor  # (6, batch, heads, rows): max, Σw, Σ(s−m), ‖w‖, ‖s−m‖, Σw(s−m), with w = e^{s−m}

    def measure(self, blocks: Iterator[Block], output: Tensor | None) -> None:
        """Fill in the sums, and the output, of these blocks."""
        room = self.sums.new_empty(0)
        with torch.no_grad():
            for block in blocks:
                query, key = self._operands(block)
                size = query.shape[0] * query.shape[1] * key.shape[1]
                if room.shape[-1] < size:
                    room = self.sums.new_empty(2, size)  # once, for the first is the largest: new memory is slow
                both = room[:, :size].view(2, *query.shape[:2], key.shape[1])
                torch.baddbmm(both[1], query, key.mT, beta=0.0, alpha=self.call.scale, out=both[1])
                place = block.entry if self.sums.shape[1] > 1 else 0
                reduce_rows(both, self._shown(block, both[1]), self.sums[:, place, block.heads, block.rows])
                if output is not None:
                    value = self._of(self.call.value, block)[:, self._keys(block)]
                    _attend(both[0], value, self.sums[1][block], output[block])

    def _operands(self, block: Block) -> tuple[Tensor, Tensor]:
        """Queries (heads, rows, head_dim) and the keys that any of them sees, in float32 at least."""
        query, key = self.call.query[block.entry, block.heads], self._of(self.call.key, block)
        query = query[:, block.rows] if self.positions is None else query.index_select(1, self.positions[block.rows])
        return query.to(self.sums.dtype), key[:, self._keys(block)]

    def _of(self, tensor: Tensor, block: Block) -> Tensor:
        """The key or value of these query heads."""
        if self.call.group == 1:
            return tensor[block.entry, block.heads].to(self.sums.dtype)
        shared = torch.arange(block.heads.start, block.heads.stop, device=tensor.device) // self.call.group
        return tensor[block.entry, shared].to(self.sums.dtype)

    def _shown(self, block: Block, scores: Tensor) -> Tensor | None:
        """Cap and bias the scores; 1 or 0 for each of the last columns that is shown or hidden, None: all shown."""
        call = self.call
        if call.softcap is not None:
            scores.div_(call.softcap).tanh_().mul_(call.softcap)
        if call.visibility.is_full:
            return None
        rows, keys, seen = self._rows(block), self._keys(block), call.visibility.at(block.entry, block.heads)
        bias = None if seen.bias is None else seen.added(rows, keys, scores)
        if bias is not None:
            scores.add_(bias.clamp(min=-HIDDEN))
            return (bias != -math.inf).to(scores.dtype)
        unsure = slice(keys.start + seen.sure(self._ends(block)[0], keys), keys.stop)
        shown = seen.shown(rows, unsure, scores.device)
        assert shown is not None
        return shown.to(scores.dtype)

    def _rows(self, block: Block) -> slice | Tensor:
        return block.rows if self.positions is None else self.positions[block.rows]

    def _keys(self, block: Block) -> slice:
        """The keys that any row of the block may see."""
        return self.call.visibility.span(*self._ends(block), self.call.key.shape[-2])

    def _ends(self, block: Block) -> tuple[int, int]:
        """The first and the last of its rows; of rows chosen on a GPU none is known: to look would be to wait."""
        if self.positions is None:
            return block.rows.start, block.rows.stop - 1
        if self.positions.device.type != "cpu":
            return 0, self.call.query.shape[-2] - 1
        return int(self.positions[block.rows].min()), int(self.positions[block.rows].max())


def reduce_rows(both: Tensor, shown: Tensor | None, sums: Tensor) -> None:
    """From the scores, the second of `both`, the sums of each row; the first is left with e^{s−m}, 0 where hidden."""
    weights, below = both
    # Hidden keys by adds and products, which run at full speed, over the columns where there may be some.
    last = slice(below.shape[-1] - (0 if shown is None else shown.shape[-1]), None)
    if shown is not None:
        below[..., last].add_(shown - 1.0, alpha=HIDDEN)
    highest = torch.amax(below, -1, keepdim=True)
    sums[0] = highest.squeeze(-1)
    below.sub_(highest)
    if shown is not None:
        below[..., last].mul_(shown)
    torch.mul(below, LOG2_E, out=weights).exp2_()  # three times as fast as exp, thirty times where it underflows
    if shown is not None:
        weights[..., last].mul_(shown)
    torch.sum(both, -1, out=sums[1:3])
    torch.linalg.vector_norm(both, dim=-1, out=sums[3:5])
    if below.device.type == "cpu" and sums[4].isinf().any():
        sums[4] = torch.linalg.vector_norm(below, dim=-1, dtype=torch.float64)  # squares past float32's range
    torch.sum(below.mul_(weights), -1, out=sums[5])


def _attend(weights: Tensor, value: Tensor, total: Tensor, output: Tensor) -> None:
    torch.bmm(weights, value, out=output)
    output.div_(total.clamp(min=1.0).unsqueeze(-1))  # only a row that sees nothing has less; its output is zero


def finished(sums: Tensor, visible: Tensor) -> RowSums:
    """The sums that reduce_rows() left, as they are kept."""
    highest, total, mean, participation, deviation, gap = sums
    some, count = total.clamp(min=1.0), visible.clamp(min=1).to(total.dtype)  # a row that sees nothing keeps its zeros
    # moments about the maximum, which is never far: a large mean does not swallow the variance
    mean.div_(count)
    squares = deviation.double().square() - count * mean.double().square()  # past 1e38, where scores are past 1e19
    return RowSums(
        visible=visible,
        max=highest.masked_fill_(visible == 0, -math.inf),
        total=total,
        gap=gap.neg_().div_(some),
        participation=participation.div_(some).square_(),
        mean=mean + highest,
        deviation=squares.clamp_(min=0.0),
    )
