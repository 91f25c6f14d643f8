"""The sums of rows -> the statistics of their heads, in float64 and in a fixed order, in one launch.

Where every row was looked at, each program pools some rows of a head, and whichever comes last adds up what all of
them left. Where few rows were, over spans of keys, one program a head merges the spans of each row and weighs the rows
by the positions that they stand for. Either writes a row of the table for each head: NUMBERS, SUMS and FINISHED of
`attnscale.measure.pooled`, and two of the numbers as whole ones.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscale.measure.bound import BOUND_SLACK
from attnscale.measure.cuda.layout import SUMS_AND_VISIBLE, Layout, layout_key
from attnscale.measure.cuda.triton.launch import Launch, counters
from attnscale.measure.cuda.triton.tiles import Tiles
from attnscale.measure.pooled import TABLE
from attnscale.theory.limits import SATURATED_TOP1

FIELDS: tl.constexpr = tl.constexpr(16)  # numbers that a program leaves: 14 sums and 2 maxima
HIGHEST: tl.constexpr = tl.constexpr(14)
ABOVE: tl.constexpr = tl.constexpr(15)
VANISHED: tl.constexpr = tl.constexpr(-1e4)  # e to this is zero; a logit of −∞ times zero is NaN
COLUMNS: tl.constexpr = tl.constexpr(TABLE)
AT_ONCE: tl.constexpr = tl.constexpr(64)  # programs whose sums are added up
SATURATED: tl.constexpr = tl.constexpr(SATURATED_TOP1)
PROGRAMS = 1056  # that pool rows, eight a multiprocessor of an H200
POOLED_ROWS = 128  # at a time, four a thread of one warp: sums over them need no barriers
SAMPLED_ROWS, BOUNDS = 64, 4096  # at a time, of a sampled head's rows and of what bounds its maximum


@triton.jit(
    do_not_specialize=["batch", "heads", "count", "q_len", "kv_len", "spans", "span", "rows_each", "bound_places"],
    do_not_specialize_on_alignment=["rows_at", "bounds_at", "sinks_at", "table_at"],  # parts of larger tensors
)
def finish_kernel(
    sums_at: tl.tensor,
    rows_at: tl.tensor,
    weights_at: tl.tensor,
    bounds_at: tl.tensor,
    sinks_at: tl.tensor,
    left_at: tl.tensor,
    arrived_at: tl.tensor,
    table_at: tl.tensor,
    bound_batch: tl.tensor,
    bound_head: tl.tensor,
    bound_place: tl.tensor,
    bound_places: tl.tensor,
    bound_keys: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    count: tl.tensor,
    q_len: tl.tensor,
    kv_len: tl.tensor,
    spans: tl.tensor,
    span: tl.tensor,
    rows_each: tl.tensor,
    bound_scale: tl.tensor,
    CAUSAL: tl.constexpr,
    GIVEN_VISIBLE: tl.constexpr,
    SAMPLED: tl.constexpr,
    GIVEN_LSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SLACK: tl.constexpr,
    BLOCK: tl.constexpr,
    BOUND_BLOCK: tl.constexpr,
) -> None:
    """Pool some rows of a head, the batch entries one behind the other; the last program writes the statistics."""
    slot, slots, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    rows = tl.zeros([BLOCK], tl.float64)
    looked_rows = tl.zeros([BLOCK], tl.float64)
    scores = tl.zeros([BLOCK], tl.float64)
    looked_scores = tl.zeros([BLOCK], tl.float64)
    first = tl.zeros([BLOCK], tl.float64)
    second = tl.zeros([BLOCK], tl.float64)
    within = tl.zeros([BLOCK], tl.float64)
    entropy = tl.zeros([BLOCK], tl.float64)
    several = tl.zeros([BLOCK], tl.float64)
    ratio = tl.zeros([BLOCK], tl.float64)
    top1 = tl.zeros([BLOCK], tl.float64)
    saturated = tl.zeros([BLOCK], tl.float64)
    trace = tl.zeros([BLOCK], tl.float64)
    keys = tl.zeros([BLOCK], tl.float64)
    sink = tl.zeros([BLOCK], tl.float64)
    learned = tl.zeros([BLOCK], tl.float64)
    highest = tl.full([BLOCK], float("-inf"), tl.float64)
    above = tl.full([BLOCK], float("-inf"), tl.float64)
    step = tl.cast(batch, tl.int64) * heads * count  # from span to span
    plane = step * spans
    end = tl.minimum(slot * rows_each + rows_each, batch * count)
    for start in range(slot * rows_each, end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        kept = row < end
        entry, place = row // count, row % count
        position = place
        if SAMPLED:
            position = tl.load(rows_at + tl.where(kept, row, 0)).to(tl.int32)
        at = sums_at + (entry * heads + head).to(tl.int64) * count + place
        visible = tl.zeros_like(position) + kv_len
        if CAUSAL:
            visible = tl.minimum(position + 1, kv_len)
        if GIVEN_VISIBLE:
            visible = tl.zeros_like(position)
            for number in range(spans):
                visible += tl.load(at + number * step + 7 * plane, mask=kept, other=0.0).to(tl.int32)
            kept = kept & (visible > 0)
        if SAMPLED:
            weight = tl.where(kept, tl.load(weights_at + place), 0.0)
            largest, total, gap, participation, mean, deviation, row_first = _merge_spans(
                at, visible, kept, step, plane, spans, span, GIVEN_VISIBLE, BLOCK
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
        if HAS_SINKS:  # one more key, as RowSums.with_sinks() adds it
            logit = tl.load(sinks_at + head)
            beyond = logit - tl.where(kept, largest, 0.0).to(tl.float64)  # rows left out have none: −∞ − −∞
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
        looked_rows += kept.to(tl.float64)
        scores += weight * seen
        looked_scores += tl.where(kept, seen, 0.0)
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

    table_at += head * COLUMNS
    if SAMPLED:
        largest = _largest(highest)
        bound = _bound(
            bounds_at + head * bound_head, bound_batch, bound_place, bound_places, bound_keys, batch, q_len,
            bound_scale, GIVEN_LSE, SLACK, BOUND_BLOCK,
        )  # fmt: skip
        _write_row(
            table_at, tl.sum(looked_rows, 0), tl.sum(looked_scores, 0), largest,
            tl.maximum(bound, largest, propagate_nan=tl.PropagateNan.ALL), _largest(above), tl.sum(rows, 0),
            tl.sum(scores, 0), tl.sum(first, 0), tl.sum(second, 0), tl.sum(within, 0), tl.sum(entropy, 0),
            tl.sum(several, 0), tl.sum(ratio, 0), tl.sum(top1, 0), tl.sum(saturated, 0), tl.sum(trace, 0),
            tl.sum(keys, 0), tl.sum(sink, 0), tl.sum(learned, 0),
        )  # fmt: skip
    else:
        left_at += (head * slots).to(tl.int64) * FIELDS
        to = left_at + slot * FIELDS
        tl.store(to, tl.sum(rows, 0))
        tl.store(to + 1, tl.sum(scores, 0))
        tl.store(to + 2, tl.sum(first, 0))
        tl.store(to + 3, tl.sum(second, 0))
        tl.store(to + 4, tl.sum(within, 0))
        tl.store(to + 5, tl.sum(entropy, 0))
        tl.store(to + 6, tl.sum(several, 0))
        tl.store(to + 7, tl.sum(ratio, 0))
        tl.store(to + 8, tl.sum(top1, 0))
        tl.store(to + 9, tl.sum(saturated, 0))
        tl.store(to + 10, tl.sum(trace, 0))
        tl.store(to + 11, tl.sum(keys, 0))
        tl.store(to + 12, tl.sum(sink, 0))
        tl.store(to + 13, tl.sum(learned, 0))
        tl.store(to + HIGHEST, _largest(highest))
        tl.store(to + ABOVE, _largest(above))
        tl.debug_barrier()
        if tl.atomic_add(arrived_at + head, 1, sem="acq_rel") == slots - 1:
            sums = tl.zeros([FIELDS], tl.float64)
            for begin in range(0, slots, AT_ONCE):
                other = begin + tl.arange(0, AT_ONCE)[:, None]
                at = left_at + other * FIELDS + tl.arange(0, FIELDS)[None, :]
                left = (other < slots) & (tl.arange(0, FIELDS)[None, :] < HIGHEST)
                sums += tl.sum(tl.load(at, mask=left, other=0.0, cache_modifier=".cg"), 0)
            all_rows, all_scores, largest = _field(sums, 0), _field(sums, 1), _highest(left_at + HIGHEST, slots)
            _write_row(
                table_at, all_rows, all_scores, largest, largest, _highest(left_at + ABOVE, slots), all_rows,
                all_scores, _field(sums, 2), _field(sums, 3), _field(sums, 4), _field(sums, 5), _field(sums, 6),
                _field(sums, 7), _field(sums, 8), _field(sums, 9), _field(sums, 10), _field(sums, 11),
                _field(sums, 12), _field(sums, 13),
            )  # fmt: skip
            tl.store(arrived_at + head, 0)  # for the next launch


@triton.jit
def _merge_spans(
    at: tl.tensor,
    visible: tl.tensor,
    kept: tl.tensor,
    step: tl.tensor,
    plane: tl.tensor,
    spans: tl.tensor,
    span: tl.tensor,
    GIVEN_VISIBLE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The sums of rows over all their keys, from those over each span of them, as RowSums.over_shards()."""
    largest = tl.full([BLOCK], float("-inf"), tl.float64)
    for number in range(spans):
        here = at + number * step
        shown = kept & (_visible_in(here + 7 * plane, visible - number * span, span, kept, GIVEN_VISIBLE) > 0)
        score = tl.load(here, mask=shown, other=float("-inf")).to(tl.float64)
        largest = tl.maximum(largest, score, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(kept, largest, 0.0)
    total = tl.zeros([BLOCK], tl.float64)
    gap = tl.zeros([BLOCK], tl.float64)
    square = tl.zeros([BLOCK], tl.float64)
    first = tl.zeros([BLOCK], tl.float64)
    second = tl.zeros([BLOCK], tl.float64)
    first_key = tl.zeros([BLOCK], tl.float64)
    seen = tl.zeros([BLOCK], tl.int32)
    for number in range(spans):
        here = at + number * step
        there = _visible_in(here + 7 * plane, visible - number * span, span, kept, GIVEN_VISIBLE)
        shown = kept & (there > 0)
        is_earliest, seen = shown & (seen == 0), seen + tl.where(shown, there, 0)
        there = tl.where(shown, there, 0).to(tl.float64)
        below = tl.where(shown, base - tl.load(here, mask=shown, other=0.0).to(tl.float64), 0.0)
        share = tl.load(here + plane, mask=shown, other=0.0).to(tl.float64) * tl.exp(-below)
        total += share
        gap += share * (tl.load(here + 2 * plane, mask=shown, other=0.0).to(tl.float64) + below)
        square += share * share * tl.load(here + 3 * plane, mask=shown, other=0.0).to(tl.float64)
        mean = tl.load(here + 4 * plane, mask=shown, other=0.0).to(tl.float64)
        own_first = tl.load(here + 6 * plane, mask=shown, other=0.0).to(tl.float64) - below
        first_key = tl.where(is_earliest, own_first, first_key)
        first += there * mean
        second += tl.load(here + 5 * plane, mask=shown, other=0.0).to(tl.float64) + there * mean * mean
    total = tl.where(kept, total, 1.0)
    participation = tl.where(kept, square / (total * total), 1.0)
    mean = first / tl.maximum(visible.to(tl.float64), 1.0)
    deviation = tl.maximum(second - first * mean, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return largest, total, gap / total, participation, mean, deviation, first_key


@triton.jit
def _visible_in(
    at: tl.tensor, left: tl.tensor, span: tl.tensor, kept: tl.tensor, GIVEN_VISIBLE: tl.constexpr
) -> tl.tensor:
    """How many keys of a span each row sees: as the pass has counted them, or of those left from its begin on."""
    if GIVEN_VISIBLE:
        return tl.load(at, mask=kept, other=0.0).to(tl.int32)
    return tl.minimum(left, span)


@triton.jit
def _bound(
    at: tl.tensor,
    batch_stride: tl.tensor,
    place_stride: tl.tensor,
    places: tl.tensor,
    keys: tl.tensor,
    batch: tl.tensor,
    q_len: tl.tensor,
    scale: tl.tensor,
    GIVEN_LSE: tl.constexpr,
    SLACK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """An upper bound of the scores of a head: the largest ln Σ eˢ of a row, or |a| · max‖q‖ · max‖k‖."""
    bound = tl.full([BLOCK], float("-inf"), tl.float32)
    for entry in range(batch):
        if GIVEN_LSE:
            for start in range(0, q_len, BLOCK):
                row = start + tl.arange(0, BLOCK)
                lse = tl.load(at + entry * batch_stride + row, mask=row < q_len, other=float("-inf"))
                bound = tl.maximum(bound, lse, propagate_nan=tl.PropagateNan.ALL)
        else:
            place = tl.arange(0, BLOCK)
            here = at + place * place_stride + entry * batch_stride
            query = tl.max(tl.load(here, mask=place < places, other=0.0).to(tl.float32), 0)
            key = tl.max(tl.load(here + keys, mask=place < places, other=0.0).to(tl.float32), 0)
            bound = tl.maximum(bound, tl.sqrt(query) * tl.sqrt(key) * scale, propagate_nan=tl.PropagateNan.ALL)
    found = _largest(bound.to(tl.float64))
    if GIVEN_LSE:
        found += SLACK * tl.maximum(tl.abs(found), 1.0)
    return found


@triton.jit
def _write_row(
    to: tl.tensor,
    looked_rows: tl.tensor,
    looked_scores: tl.tensor,
    largest: tl.tensor,
    bound: tl.tensor,
    above: tl.tensor,
    rows: tl.tensor,
    scores: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    within: tl.tensor,
    entropy: tl.tensor,
    several: tl.tensor,
    ratio: tl.tensor,
    top1: tl.tensor,
    saturated: tl.tensor,
    trace: tl.tensor,
    keys: tl.tensor,
    sink: tl.tensor,
    learned: tl.tensor,
) -> None:
    """The row of a head: its sums, and the statistics as they are read."""
    mean = first / tl.maximum(scores, 1.0)
    squares = tl.maximum(second - scores * mean * mean, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(to, looked_rows)
    tl.store(to + 1, looked_scores)
    tl.store(to + 2, mean)
    tl.store(to + 3, largest)
    tl.store(to + 4, bound)
    tl.store(to + 5, above)
    tl.store(to + 6, scores)
    tl.store(to + 7, 0.0)  # deviations from the mean
    tl.store(to + 8, squares)
    tl.store(to + 9, within)
    tl.store(to + 10, rows)
    tl.store(to + 11, entropy)
    tl.store(to + 12, several)
    tl.store(to + 13, ratio)
    tl.store(to + 14, top1)
    tl.store(to + 15, saturated)
    tl.store(to + 16, trace)
    tl.store(to + 17, keys)
    tl.store(to + 18, sink)
    tl.store(to + 19, learned)
    tl.store(to + 20, squares / scores)
    tl.store(to + 21, tl.sqrt(squares / scores))
    tl.store(to + 22, within / scores)
    tl.store(to + 23, tl.sqrt(within / scores))
    tl.store(to + 24, entropy / rows)
    tl.store(to + 25, tl.where(several > 0, ratio / several, float("nan")))
    tl.store(to + 26, top1 / rows)
    tl.store(to + 27, saturated / rows)
    tl.store(to + 28, trace / rows)
    tl.store(to + 29, keys / rows)
    tl.store(to + 30, sink / rows)
    whole = (to + 31).to(tl.pointer_type(tl.int64))
    tl.store(whole, looked_rows.to(tl.int64))
    tl.store(whole + 1, looked_scores.to(tl.int64))


@triton.jit
def _field(sums: tl.tensor, field: tl.constexpr) -> tl.tensor:
    return tl.sum(tl.where(tl.arange(0, FIELDS) == field, sums, 0.0), 0)


@triton.jit
def _highest(column_at: tl.tensor, slots: tl.tensor) -> tl.tensor:
    """The maximum of what the programs left in a column."""
    highest = tl.full([AT_ONCE], float("-inf"), tl.float64)
    for start in range(0, slots, AT_ONCE):
        slot = start + tl.arange(0, AT_ONCE)
        here = tl.load(column_at + slot * FIELDS, mask=slot < slots, other=float("-inf"), cache_modifier=".cg")
        highest = tl.maximum(highest, here, propagate_nan=tl.PropagateNan.ALL)
    return _largest(highest)


@triton.jit
def _largest(values: tl.tensor) -> tl.tensor:
    """The maximum; NaN where there is one."""
    bad = tl.sum(tl.where(values != values, 1, 0), 0) > 0
    return tl.where(bad, float("nan"), tl.max(values, 0))


def finish_rows(sums: Tensor, kv_len: int, is_causal: bool, sinks: Tensor | None = None) -> Tensor:
    """Return the table of the heads whose rows have these sums, (SUMS or SUMS_AND_VISIBLE, batch, heads, q_len).

    `sinks`, float64 (heads,), are learned logits that join the denominators.
    """
    planes, batch, heads, q_len = sums.shape
    parts, rows_each = _parts_of(batch * q_len, heads)
    left = torch.empty(heads * parts * FIELDS.value, dtype=torch.float64, device=sums.device)
    table = torch.empty((heads, TABLE), dtype=torch.float64, device=sums.device)
    _launch(sums.device.index, is_causal, planes == SUMS_AND_VISIBLE, sinks is not None)(
        (parts, heads),
        *(sums, sums, sums, sums, left if sinks is None else sinks, left, counters(sums.device, heads), table),
        *(0, 0, 0, 0, 0),
        *(batch, heads, q_len, q_len, kv_len, 1, kv_len, rows_each, 0.0),
    )
    return table


@lru_cache(maxsize=64)
def _launch(device: int | None, is_causal: bool, given_visible: bool, has_sinks: bool) -> Launch:
    constants = _constants(is_causal, given_visible, False, False, has_sinks)
    return Launch(finish_kernel, device, constants, Tiles(POOLED_ROWS, 0, 1, 1))


def _constants(
    is_causal: bool, given_visible: bool, is_sampled: bool, given_lse: bool, has_sinks: bool
) -> dict[str, object]:
    return {
        "CAUSAL": is_causal,
        "GIVEN_VISIBLE": given_visible,
        "SAMPLED": is_sampled,
        "GIVEN_LSE": given_lse,
        "HAS_SINKS": has_sinks,
        "SLACK": BOUND_SLACK,
        "BLOCK": SAMPLED_ROWS if is_sampled else POOLED_ROWS,
        "BOUND_BLOCK": BOUNDS,
    }


def finish_sampled(
    sums: Tensor,
    bounds: Tensor,
    rows: Tensor,
    weights: Tensor,
    q_len: int,
    kv_len: int,
    span: int,
    scale: float,
    is_causal: bool,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the table of heads of which rows were sampled, (planes, spans, batch, heads, rows), with their weights.

    `bounds`: the lse of all rows, (batch, heads, q_len), or the largest squared norms, (2, spans, batch, heads).
    """
    _, spans, batch, heads, count = sums.shape
    given_lse = bounds.dim() == 3
    table = torch.empty((heads, TABLE), dtype=torch.float64, device=sums.device)
    finish_sample_launch(layout_key(bounds), sums.shape, is_causal, sinks is not None)(
        (1, heads),
        *(sums, rows, weights, bounds, table if sinks is None else sinks, sums, sums, table),
        *(*(bounds.stride()[:2] if given_lse else (heads, 1)), batch * heads, spans, spans * batch * heads),
        *(batch, heads, count, q_len, kv_len, spans, span, batch * count, abs(scale) * (1 + BOUND_SLACK)),
    )
    return table


@lru_cache(maxsize=256)
def finish_sample_launch(bounds: Layout, sums: tuple[int, ...], is_causal: bool, has_sinks: bool = False) -> Launch:
    """Return the launch for sums of this shape; `bounds` has three axes where it is the lse of all rows."""
    constants = _constants(is_causal, sums[0] == SUMS_AND_VISIBLE, True, len(bounds[0]) == 3, has_sinks)
    return Launch(finish_kernel, bounds[3], constants, Tiles(SAMPLED_ROWS, 0, 4, 1))


def _parts_of(rows: int, heads: int) -> tuple[int, int]:
    """Return how many programs pool a head's rows, and how many rows each."""
    parts = max(1, min(PROGRAMS // heads, _ceil(rows, POOLED_ROWS)))
    each = _ceil(_ceil(rows, parts), POOLED_ROWS) * POOLED_ROWS
    return _ceil(rows, each), each


def _ceil(number: int, part: int) -> int:
    return -(-number // part)
