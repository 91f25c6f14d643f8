"""The rows of each head -> its statistics, in one launch: sums in float64, added up in a fixed order.

Programs pool some rows each; whichever of a head comes last adds up what all of them left. The table has a row a
head: NUMBERS, SUMS and FINISHED of `attnscale.measure.pooled`, and two of the numbers as whole ones.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

import triton
import triton.language as tl

from attnscale.theory.limits import SATURATED_TOP1

LEFT: tl.constexpr = tl.constexpr(20)  # what a program leaves: 6 numbers and 14 sums, in the order of the table
FIELDS: tl.constexpr = tl.constexpr(32)  # and room up to a power of two
TABLE: tl.constexpr = tl.constexpr(33)  # columns: those, 11 statistics as they are read, and 2 whole numbers
AT_ONCE: tl.constexpr = tl.constexpr(64)  # programs whose sums are added up
SATURATED: tl.constexpr = tl.constexpr(SATURATED_TOP1)


@triton.jit(do_not_specialize=["q_len", "kv_len", "rows_each", "batch", "heads"])
def finish_kernel(
    sums_at: tl.tensor,
    left_at: tl.tensor,
    arrived_at: tl.tensor,
    table_at: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    q_len: tl.tensor,
    kv_len: tl.tensor,
    rows_each: tl.tensor,
    CAUSAL: tl.constexpr,
    GIVEN_VISIBLE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Some rows of a head a program; the last one writes its row of the table."""
    slot, head = tl.program_id(0), tl.program_id(1)
    slots = tl.num_programs(0)
    left_at += (head * slots).to(tl.int64) * FIELDS
    begin = slot * rows_each
    to = left_at + slot * FIELDS
    _pool(sums_at, to, head, begin, rows_each, batch, heads, q_len, kv_len, CAUSAL, GIVEN_VISIBLE, BLOCK)
    tl.debug_barrier()
    if tl.atomic_add(arrived_at + head, 1, sem="acq_rel") == slots - 1:
        fields = tl.arange(0, FIELDS)
        total = tl.zeros([FIELDS], tl.float64)
        for start in range(0, slots, AT_ONCE):
            place = start + tl.arange(0, AT_ONCE)[:, None]
            at = left_at + place * FIELDS + fields[None, :]
            left = (place < slots) & (fields[None, :] < LEFT)
            total += tl.sum(tl.load(at, mask=left, other=0.0, cache_modifier=".cg"), 0)
        rows, scores = _field(total, 0), _field(total, 1)
        mean = _field(total, 2) / tl.maximum(scores, 1.0)
        squares = _field(total, 8) - scores * mean * mean
        largest = _highest(left_at + 3, slots)
        total = tl.where(fields == 2, mean, total)
        total = tl.where((fields == 3) | (fields == 4), largest, total)
        total = tl.where(fields == 5, _highest(left_at + 5, slots), total)
        total = tl.where(fields == 6, scores, total)
        total = tl.where(fields == 8, tl.maximum(squares, 0.0, propagate_nan=tl.PropagateNan.ALL), total)
        total = tl.where(fields == 10, rows, total)
        table_at += head * TABLE
        tl.store(table_at + fields, total, mask=fields < LEFT)
        squares, within = _field(total, 8), _field(total, 9)
        show(table_at, 20, squares / scores)
        show(table_at, 21, tl.sqrt(squares / scores))
        show(table_at, 22, within / scores)
        show(table_at, 23, tl.sqrt(within / scores))
        show(table_at, 24, _field(total, 11) / rows)
        several = _field(total, 12)
        show(table_at, 25, tl.where(several > 0, _field(total, 13) / tl.maximum(several, 1.0), float("nan")))
        for field in tl.static_range(14, 19):
            show(table_at, 12 + field, _field(total, field) / rows)
        show_number(table_at, 31, rows)
        show_number(table_at, 32, scores)
        tl.store(arrived_at + head, 0)  # for the next launch


@triton.jit
def show(table_at: tl.tensor, column: tl.constexpr, value: tl.tensor) -> None:
    """A statistic as it is read."""
    tl.store(table_at + column, value)


@triton.jit
def show_number(table_at: tl.tensor, column: tl.constexpr, value: tl.tensor) -> None:
    """A whole number, in the bits of an int64."""
    tl.store((table_at + column).to(tl.pointer_type(tl.int64)), value.to(tl.int64))


@triton.jit
def _field(total: tl.tensor, field: tl.constexpr) -> tl.tensor:
    return tl.sum(tl.where(tl.arange(0, FIELDS) == field, total, 0.0), 0)


@triton.jit
def _highest(column_at: tl.tensor, slots: tl.tensor) -> tl.tensor:
    """The maximum of what the programs left in a column."""
    highest = tl.full([AT_ONCE], float("-inf"), tl.float64)
    for start in range(0, slots, AT_ONCE):
        slot = start + tl.arange(0, AT_ONCE)
        here = tl.load(column_at + slot * FIELDS, mask=slot < slots, other=float("-inf"), cache_modifier=".cg")
        highest = tl.maximum(highest, here, propagate_nan=tl.PropagateNan.ALL)
    return largest_of(highest)


@triton.jit
def largest_of(values: tl.tensor) -> tl.tensor:
    """The maximum; NaN where there is one."""
    bad = tl.sum(tl.where(values != values, 1, 0), 0) > 0
    return tl.where(bad, float("nan"), tl.max(values, 0))


@triton.jit
def _pool(
    sums_at: tl.tensor,
    left_at: tl.tensor,
    head: tl.tensor,
    begin: tl.tensor,
    count: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    q_len: tl.tensor,
    kv_len: tl.tensor,
    CAUSAL: tl.constexpr,
    GIVEN_VISIBLE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Some of the rows of a head, the batch entries one behind the other."""
    rows = tl.zeros([BLOCK], tl.float64)
    scores = tl.zeros([BLOCK], tl.float64)
    entropy = tl.zeros([BLOCK], tl.float64)
    several = tl.zeros([BLOCK], tl.float64)
    ratio = tl.zeros([BLOCK], tl.float64)
    top1 = tl.zeros([BLOCK], tl.float64)
    saturated = tl.zeros([BLOCK], tl.float64)
    gain = tl.zeros([BLOCK], tl.float64)
    keys = tl.zeros([BLOCK], tl.float64)
    first = tl.zeros([BLOCK], tl.float64)
    second = tl.zeros([BLOCK], tl.float64)
    within = tl.zeros([BLOCK], tl.float64)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    above = tl.full([BLOCK], float("-inf"), tl.float64)
    plane = tl.cast(batch, tl.int64) * heads * q_len
    end = tl.minimum(begin + count, batch * q_len)
    for start in range(begin, end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        kept = row < end
        entry, position = row // q_len, row % q_len
        at = sums_at + (entry * heads + head).to(tl.int64) * q_len + position
        visible = tl.zeros_like(position) + kv_len
        if CAUSAL:
            visible = tl.minimum(position + 1, kv_len)
        if GIVEN_VISIBLE:
            visible = tl.load(at + 6 * plane, mask=kept, other=0.0).to(tl.int32)
            kept = kept & (visible > 0)
        maximum = tl.load(at, mask=kept, other=float("-inf"))
        total = tl.load(at + plane, mask=kept, other=1.0)
        gap = tl.load(at + 2 * plane, mask=kept, other=0.0)
        participation = tl.load(at + 3 * plane, mask=kept, other=1.0)
        some = kept & (visible > 1)
        row_entropy = tl.where(kept, tl.log(total) + gap, 0.0)
        weight = 1.0 / total
        highest = tl.maximum(highest, maximum, propagate_nan=tl.PropagateNan.ALL)
        rows += kept.to(tl.float64)
        scores += tl.where(kept, visible, 0).to(tl.float64)
        entropy += row_entropy.to(tl.float64)
        several += some.to(tl.float64)
        ratio += tl.where(some, row_entropy / tl.log(tl.maximum(visible, 2).to(tl.float32)), 0.0).to(tl.float64)
        top1 += tl.where(kept, weight, 0.0).to(tl.float64)
        saturated += tl.where(kept & (weight > SATURATED), 1.0, 0.0).to(tl.float64)
        gain += tl.where(kept, 1.0 - participation, 0.0).to(tl.float64)
        keys += tl.where(kept, 1.0 / participation, 0.0).to(tl.float64)
        mean = tl.load(at + 4 * plane, mask=kept, other=0.0).to(tl.float64)
        deviation = tl.load(at + 5 * plane, mask=kept, other=0.0).to(tl.float64)
        beyond = tl.where(kept, maximum.to(tl.float64) - mean, float("-inf"))
        above = tl.maximum(above, beyond, propagate_nan=tl.PropagateNan.ALL)
        number = visible.to(tl.float64)
        first += tl.where(kept, number * mean, 0.0)
        second += tl.where(kept, deviation + number * mean * mean, 0.0)
        within += tl.where(kept, deviation, 0.0)
    tl.store(left_at, tl.sum(rows, 0))
    tl.store(left_at + 1, tl.sum(scores, 0))
    tl.store(left_at + 2, tl.sum(first, 0))
    tl.store(left_at + 3, largest_of(highest.to(tl.float64)))
    tl.store(left_at + 4, 0.0)
    tl.store(left_at + 5, largest_of(above))
    tl.store(left_at + 6, 0.0)
    tl.store(left_at + 7, 0.0)
    tl.store(left_at + 8, tl.sum(second, 0))
    tl.store(left_at + 9, tl.sum(within, 0))
    tl.store(left_at + 10, 0.0)
    tl.store(left_at + 11, tl.sum(entropy, 0))
    tl.store(left_at + 12, tl.sum(several, 0))
    tl.store(left_at + 13, tl.sum(ratio, 0))
    tl.store(left_at + 14, tl.sum(top1, 0))
    tl.store(left_at + 15, tl.sum(saturated, 0))
    tl.store(left_at + 16, tl.sum(gain, 0))
    tl.store(left_at + 17, tl.sum(keys, 0))
    tl.store(left_at + 18, float("nan"))  # Σ of the weights on the first visible keys
    tl.store(left_at + 19, 0.0)  # a learned sink joins rows that are pooled elsewhere
