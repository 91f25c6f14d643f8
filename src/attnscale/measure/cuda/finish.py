"""Combine the sums of rows into statistics of heads, in float64, in a fixed order and in one launch.

Each program pools some rows of a head, and the last program to finish adds up the results of all. If few rows were
sampled, over spans of keys, one program per head merges the spans of each row and weights the rows by the number of
positions that they represent. The last program writes a row of the table for each head: NUMBERS, SUMS and FINISHED of
`attnscale.measure.pooled`, and two of the numbers as integers.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscale.measure.cuda.launch import Launch, Tiles, counters
from attnscale.measure.cuda.sequence_tiles import SIZES
from attnscale.measure.lengths import BOUND_SLACK
from attnscale.measure.pooled import FINISHED, NUMBERS, SUMS, TABLE
from attnscale.theory.limits import SATURATED_TOP1

# Results of a program for a head: SUMS, with Σ n·mean and Σ s² in place of deviations and squares, the numbers of rows
# and scores, and two maxima.
FIELDS: tl.constexpr = tl.constexpr(16)
FIRST: tl.constexpr = tl.constexpr(SUMS.index("deviations"))
SECOND: tl.constexpr = tl.constexpr(SUMS.index("squares"))
WITHIN: tl.constexpr = tl.constexpr(SUMS.index("within"))
ROWS: tl.constexpr = tl.constexpr(SUMS.index("rows"))
ENTROPY: tl.constexpr = tl.constexpr(SUMS.index("entropy"))
SEVERAL: tl.constexpr = tl.constexpr(SUMS.index("rows_of_several"))
RATIO: tl.constexpr = tl.constexpr(SUMS.index("entropy_ratio"))
SINK: tl.constexpr = tl.constexpr(SUMS.index("sink"))
LEARNED: tl.constexpr = tl.constexpr(SUMS.index("learned_sink"))
MEASURED: tl.constexpr = tl.constexpr(len(SUMS))
HIGHEST: tl.constexpr = tl.constexpr(16)
ABOVE: tl.constexpr = tl.constexpr(17)
PARTIAL_FIELDS: tl.constexpr = tl.constexpr(18)
# Columns of the table:
COLUMNS: tl.constexpr = tl.constexpr(TABLE)
SUMS_BEGIN: tl.constexpr = tl.constexpr(len(NUMBERS))
FINISHED_BEGIN: tl.constexpr = tl.constexpr(len(NUMBERS) + len(SUMS))
ENTROPY_COLUMN: tl.constexpr = tl.constexpr(len(NUMBERS) + len(SUMS) + FINISHED.index("entropy"))
RATIO_COLUMN: tl.constexpr = tl.constexpr(len(NUMBERS) + len(SUMS) + FINISHED.index("entropy_ratio"))

VISIBLE: tl.constexpr = tl.constexpr(7)  # plane with the number of visible keys
VANISHED: tl.constexpr = tl.constexpr(-1e4)  # e to this is zero; a logit of −∞ times zero is NaN
AT_ONCE: tl.constexpr = tl.constexpr(64)  # programs whose sums are added at once
SATURATED: tl.constexpr = tl.constexpr(SATURATED_TOP1)
SLACK: tl.constexpr = tl.constexpr(BOUND_SLACK)
PROGRAMS = 1056  # programs that pool rows: eight for each multiprocessor of an H200
POOLED_ROWS = 128  # pooled at once, four for each thread of one warp, so that sums need no barriers
SAMPLED_ROWS = 64  # pooled at once


# Arguments that may be parts of larger tensors are not specialised by alignment.
@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["bounds_at", "sinks_at", "table_at"])
def finish_kernel(
    sums_at,
    weights_at,
    bounds_at,
    sinks_at,
    partials_at,
    arrived_at,
    table_at,
    batch,
    heads,
    count,
    spans,
    rows_each,
    SAMPLED: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pool some rows of a head over all batch entries; the last program writes the statistics."""
    slot, slots, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    none = tl.zeros([BLOCK], tl.float64)
    scores, first, second, within, measured_scores = none, none, none, none, none
    rows, entropy, several, ratio, measured_rows = none, none, none, none, none
    top1, saturated, trace, keys, sink, learned = none, none, none, none, none, none
    highest = tl.full([BLOCK], float("-inf"), tl.float64)
    above = tl.full([BLOCK], float("-inf"), tl.float64)
    step = tl.cast(batch, tl.int64) * heads * count  # from span to span
    plane = step * spans
    end = tl.minimum(slot * rows_each + rows_each, batch * count)
    for start in range(slot * rows_each, end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        kept = row < end
        entry, place = row // count, row % count
        at = sums_at + (entry * heads + head).to(tl.int64) * count + place
        visible = tl.zeros_like(row)
        for number in range(spans):
            visible += tl.load(at + number * step + VISIBLE * plane, mask=kept, other=0.0).to(tl.int32)
        kept = kept & (visible > 0)
        if SAMPLED:
            weight = tl.where(kept, tl.load(weights_at + place), 0.0)
            largest, total, gap, participation, mean, deviation, row_first = _merge_spans(
                at, visible, kept, step, plane, spans, BLOCK
            )
        else:
            weight = tl.where(kept, 1.0, 0.0).to(tl.float64)
            largest = tl.load(at, mask=kept, other=float("-inf"))
            total = tl.load(at + plane, mask=kept, other=1.0)
            gap = tl.load(at + 2 * plane, mask=kept, other=0.0)
            participation = tl.load(at + 3 * plane, mask=kept, other=1.0)
            mean = tl.load(at + 4 * plane, mask=kept, other=0.0).to(tl.float64)
            deviation = tl.load(at + 5 * plane, mask=kept, other=0.0).to(tl.float64)
            row_first = tl.load(at + 6 * plane, mask=kept, other=0.0)
        outcomes = visible
        if HAS_SINKS:  # a virtual key, as in RowSums.with_sinks()
            logit = tl.load(sinks_at + head)
            beyond = logit - tl.where(kept, largest, 0.0).to(tl.float64)  # rows without keys would give −∞ − −∞
            raised, below = tl.maximum(beyond, 0.0), tl.minimum(tl.maximum(beyond, VANISHED), 0.0)
            of_keys, own = total * tl.exp(-raised), tl.exp(below)
            total = of_keys + own
            gap = (of_keys * (gap + raised) - own * below) / total
            participation = (participation * of_keys * of_keys + own * own) / (total * total)
            row_first = row_first - raised
            learned += weight * (own / total)
            outcomes = visible + 1
        row_entropy = tl.log(total) + gap
        row_top1 = 1.0 / total
        some = kept & (outcomes > 1)
        row_ratio = row_entropy / tl.log(tl.maximum(outcomes, 2).to(total.dtype))
        seen = visible.to(tl.float64)
        highest = tl.maximum(highest, largest.to(tl.float64), propagate_nan=tl.PropagateNan.ALL)
        beyond = tl.where(kept, largest.to(tl.float64) - mean, float("-inf"))
        above = tl.maximum(above, beyond, propagate_nan=tl.PropagateNan.ALL)
        rows += weight
        measured_rows += kept.to(tl.float64)
        scores += weight * seen
        measured_scores += tl.where(kept, seen, 0.0)
        first += weight * (seen * mean)
        second += weight * (deviation + seen * mean * mean)
        within += weight * deviation
        entropy += weight * row_entropy.to(tl.float64)
        several += tl.where(some, weight, 0.0)
        ratio += tl.where(some, weight * row_ratio.to(tl.float64), 0.0)
        top1 += weight * row_top1.to(tl.float64)
        saturated += tl.where(row_top1 > SATURATED, weight, 0.0)
        trace += weight * (1.0 - tl.minimum(participation, 1.0, propagate_nan=tl.PropagateNan.ALL)).to(tl.float64)
        keys += weight * (1.0 / participation).to(tl.float64)
        sink += weight * (tl.exp(row_first) * row_top1).to(tl.float64)

    sums = _field(0, scores) + _field(FIRST, first) + _field(SECOND, second) + _field(WITHIN, within)
    sums += _field(ROWS, rows) + _field(ENTROPY, entropy) + _field(SEVERAL, several) + _field(RATIO, ratio)
    sums += _field(RATIO + 1, top1) + _field(RATIO + 2, saturated) + _field(RATIO + 3, trace)
    sums += _field(RATIO + 4, keys) + _field(SINK, sink) + _field(LEARNED, learned)
    sums += _field(MEASURED, measured_rows) + _field(MEASURED + 1, measured_scores)
    field = tl.arange(0, FIELDS)
    partials_at += (head * slots).to(tl.int64) * PARTIAL_FIELDS
    tl.store(partials_at + slot * PARTIAL_FIELDS + field, sums)
    tl.store(partials_at + slot * PARTIAL_FIELDS + HIGHEST, _largest(highest))
    tl.store(partials_at + slot * PARTIAL_FIELDS + ABOVE, _largest(above))
    tl.debug_barrier()
    if tl.atomic_add(arrived_at + head, 1, sem="acq_rel") == slots - 1:
        sums = tl.zeros([FIELDS], tl.float64)
        for begin in range(0, slots, AT_ONCE):
            other = begin + tl.arange(0, AT_ONCE)[:, None]
            at = partials_at + other * PARTIAL_FIELDS + field[None, :]
            sums += tl.sum(tl.load(at, mask=other < slots, other=0.0, cache_modifier=".cg"), 0)
        largest = _highest(partials_at + HIGHEST, slots)
        bound = largest
        if BOUNDED:
            own = tl.load(bounds_at + head).to(tl.float64)
            own += SLACK * tl.maximum(tl.abs(own), 1.0)  # covers rounding
            bound = tl.maximum(own, largest, propagate_nan=tl.PropagateNan.ALL)
        _write_row(table_at + head * COLUMNS, sums, largest, bound, _highest(partials_at + ABOVE, slots))
        tl.store(arrived_at + head, 0)  # for the next launch


@triton.jit
def _merge_spans(at, visible, kept, step, plane, spans, BLOCK: tl.constexpr):
    """Merge the sums over spans of keys into sums over all keys of each row, as RowSums.over_shards()."""
    largest = tl.full([BLOCK], float("-inf"), tl.float64)
    for number in range(spans):  # −∞ for a span in which the row sees no key
        score = tl.load(at + number * step, mask=kept, other=float("-inf")).to(tl.float64)
        largest = tl.maximum(largest, score, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(kept, largest, 0.0)
    total = tl.zeros([BLOCK], tl.float64)
    gap = tl.zeros([BLOCK], tl.float64)
    square = tl.zeros([BLOCK], tl.float64)
    first = tl.zeros([BLOCK], tl.float64)
    second = tl.zeros([BLOCK], tl.float64)
    first_key = tl.zeros([BLOCK], tl.float64)
    seen = tl.zeros([BLOCK], tl.float64)
    for number in range(spans):
        here = at + number * step
        there = tl.load(here + VISIBLE * plane, mask=kept, other=0.0).to(tl.float64)
        shown = there > 0
        below = tl.where(shown, base - tl.load(here, mask=shown, other=0.0).to(tl.float64), 0.0)
        share = tl.load(here + plane, mask=shown, other=0.0).to(tl.float64) * tl.exp(-below)
        total += share
        gap += share * (tl.load(here + 2 * plane, mask=shown, other=0.0).to(tl.float64) + below)
        square += share * share * tl.load(here + 3 * plane, mask=shown, other=0.0).to(tl.float64)
        mean = tl.load(here + 4 * plane, mask=shown, other=0.0).to(tl.float64)
        own_first = tl.load(here + 6 * plane, mask=shown, other=0.0).to(tl.float64) - below
        first_key = tl.where(shown & (seen == 0), own_first, first_key)
        seen += there
        first += there * mean
        second += tl.load(here + 5 * plane, mask=shown, other=0.0).to(tl.float64) + there * mean * mean
    total = tl.where(kept, total, 1.0)
    participation = tl.where(kept, square / (total * total), 1.0)
    mean = first / tl.maximum(visible.to(tl.float64), 1.0)
    deviation = tl.maximum(second - first * mean, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return largest, total, gap / total, participation, mean, deviation, first_key


@triton.jit
def _write_row(to, sums, largest, bound, above):
    """Write the table row of a head: counts, sums and finished statistics."""
    field = tl.arange(0, FIELDS)
    measured_rows, measured_scores = _value(sums, MEASURED), _value(sums, MEASURED + 1)
    scores, rows, several = _value(sums, 0), _value(sums, ROWS), _value(sums, SEVERAL)
    mean = _value(sums, FIRST) / tl.maximum(scores, 1.0)
    squares = tl.maximum(_value(sums, SECOND) - scores * mean * mean, 0.0, propagate_nan=tl.PropagateNan.ALL)
    sums = tl.where(field == FIRST, 0.0, tl.where(field == SECOND, squares, sums))
    tl.store(to, measured_rows)
    tl.store(to + 1, measured_scores)
    tl.store(to + 2, mean)
    tl.store(to + 3, largest)
    tl.store(to + 4, bound)
    tl.store(to + 5, above)
    tl.store(to + SUMS_BEGIN + field, sums, mask=field < MEASURED)
    variance, within = squares / scores, _value(sums, WITHIN) / scores
    finished_at = to + FINISHED_BEGIN
    tl.store(finished_at, variance)
    tl.store(finished_at + 1, tl.sqrt(variance))
    tl.store(finished_at + 2, within)
    tl.store(finished_at + 3, tl.sqrt(within))
    tl.store(to + ENTROPY_COLUMN, _value(sums, ENTROPY) / rows)
    some = tl.where(several > 0.0, several, float("nan"))  # undefined if every row sees one key
    with_sink = tl.where(_value(sums, LEARNED) > 0.0, rows, float("nan"))  # NaN without a learned sink
    below = tl.where(field == RATIO, some, tl.where(field == LEARNED, with_sink, rows))
    means = sums / below  # from the entropy ratio to the learned sink, in the order of FINISHED
    tl.store(to + RATIO_COLUMN - RATIO + field, means, mask=(field >= RATIO) & (field <= LEARNED))
    whole = (to + COLUMNS - 2).to(tl.pointer_type(tl.int64))
    tl.store(whole, measured_rows.to(tl.int64))
    tl.store(whole + 1, measured_scores.to(tl.int64))


@triton.jit
def _field(number: tl.constexpr, values):
    """Return a vector with the sum of the values in one field and zeros elsewhere."""
    return tl.where(tl.arange(0, FIELDS) == number, tl.sum(values, 0), 0.0)


@triton.jit
def _value(sums, field: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, FIELDS) == field, sums, 0.0), 0)


@triton.jit
def _highest(column_at, slots):
    """Return the maximum over programs of one column."""
    highest = tl.full([AT_ONCE], float("-inf"), tl.float64)
    for start in range(0, slots, AT_ONCE):
        slot = start + tl.arange(0, AT_ONCE)
        here = tl.load(column_at + slot * PARTIAL_FIELDS, mask=slot < slots, other=float("-inf"), cache_modifier=".cg")
        highest = tl.maximum(highest, here, propagate_nan=tl.PropagateNan.ALL)
    return _largest(highest)


@triton.jit
def _largest(values):
    """Return the maximum, or NaN if any value is NaN."""
    bad = tl.sum(tl.where(values != values, 1, 0), 0) > 0
    return tl.where(bad, float("nan"), tl.max(values, 0))


def finish(
    sums: Tensor,
    weights: Tensor | None = None,
    bounds: Tensor | None = None,
    sinks: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """Return the table of the heads whose rows have these sums, (SUMS, spans, batch, heads, rows).

    `weights` is needed for sampled rows and for several spans: the number of positions that each row represents.
    `bounds`, float32 (heads,), are upper bounds of each head's scores; None if only the largest score is known.
    `sinks`, float64 (heads,), are learned logits that join the denominators.
    """
    _, spans, batch, heads, count = sums.shape
    each = batch * count
    if weights is None:
        parts = max(1, min(PROGRAMS // heads, -(-each // POOLED_ROWS)))
        each = -(-each // (parts * POOLED_ROWS)) * POOLED_ROWS
    slots = -(-batch * count // each)
    table = torch.empty((heads, TABLE), dtype=torch.float64, device=sums.device) if table is None else table
    partials = torch.empty(heads * slots * PARTIAL_FIELDS.value, dtype=torch.float64, device=sums.device)
    launch = _launch(sums.device.index, weights is not None, bounds is not None, sinks is not None)
    launch(
        (slots, heads),
        *(sums, partials if weights is None else weights, sums if bounds is None else bounds.float()),
        *(partials if sinks is None else sinks, partials, counters(sums.device, heads), table),
        *(batch, heads, count, spans, each),
    )
    return table


@lru_cache(maxsize=64)
def _launch(device: int | None, is_sampled: bool, is_bounded: bool, has_sinks: bool) -> Launch:
    constants = {
        "SAMPLED": is_sampled,
        "BOUNDED": is_bounded,
        "HAS_SINKS": has_sinks,
        "BLOCK": SAMPLED_ROWS if is_sampled else POOLED_ROWS,
    }
    return Launch(finish_kernel, device, constants, Tiles(0, 0, 4 if is_sampled else 1, 1))
