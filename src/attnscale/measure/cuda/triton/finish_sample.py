"""The sampled rows of each head, seen in spans of keys -> its statistics, one program a head, in float64."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

import triton
import triton.language as tl

from attnscale.measure.cuda.triton.finish import SATURATED, TABLE, largest_of, show, show_number


@triton.jit(do_not_specialize=["batch", "heads", "count", "q_len", "kv_len", "spans", "span", "bound_places"])
def finish_sample_kernel(
    sums_at: tl.tensor,
    rows_at: tl.tensor,
    weights_at: tl.tensor,
    bounds_at: tl.tensor,
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
    bound_scale: tl.tensor,
    bound_slack: tl.tensor,
    CAUSAL: tl.constexpr,
    GIVEN_VISIBLE: tl.constexpr,
    GIVEN_LSE: tl.constexpr,
    BLOCK: tl.constexpr,
    BOUND_BLOCK: tl.constexpr,
) -> None:
    """Each row over its spans, then all rows with the weight of the positions that they stand for."""
    head = tl.program_id(0)
    rows = tl.zeros([BLOCK], tl.float64)
    seen = tl.zeros([BLOCK], tl.float64)
    scores = tl.zeros([BLOCK], tl.float64)
    looked = tl.zeros([BLOCK], tl.float64)
    first = tl.zeros([BLOCK], tl.float64)
    second = tl.zeros([BLOCK], tl.float64)
    within = tl.zeros([BLOCK], tl.float64)
    entropy = tl.zeros([BLOCK], tl.float64)
    several = tl.zeros([BLOCK], tl.float64)
    ratio = tl.zeros([BLOCK], tl.float64)
    top1 = tl.zeros([BLOCK], tl.float64)
    saturated = tl.zeros([BLOCK], tl.float64)
    gain = tl.zeros([BLOCK], tl.float64)
    keys = tl.zeros([BLOCK], tl.float64)
    highest = tl.full([BLOCK], float("-inf"), tl.float64)
    above = tl.full([BLOCK], float("-inf"), tl.float64)
    step = tl.cast(batch, tl.int64) * heads * count  # from span to span
    plane = step * spans
    for start in range(0, batch * count, BLOCK):
        row = start + tl.arange(0, BLOCK)
        kept = row < batch * count
        entry, place = row // count, row % count
        position = tl.load(rows_at + tl.where(kept, row, 0)).to(tl.int32)
        visible = tl.zeros_like(position) + kv_len
        if CAUSAL:
            visible = tl.minimum(position + 1, kv_len)
        at = sums_at + (entry * heads + head).to(tl.int64) * count + place
        if GIVEN_VISIBLE:
            visible = tl.zeros_like(position)
            for number in range(spans):
                visible += tl.load(at + number * step + 6 * plane, mask=kept, other=0.0).to(tl.int32)
            kept = kept & (visible > 0)
        weight = tl.where(kept, tl.load(weights_at + place), 0.0)
        largest = tl.full([BLOCK], float("-inf"), tl.float64)
        for number in range(spans):
            shown = kept & (
                _there(at + number * step + 6 * plane, visible - number * span, span, kept, GIVEN_VISIBLE) > 0
            )
            here = tl.load(at + number * step, mask=shown, other=float("-inf")).to(tl.float64)
            largest = tl.maximum(largest, here, propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(kept, largest, 0.0)
        total = tl.zeros([BLOCK], tl.float64)
        gap = tl.zeros([BLOCK], tl.float64)
        square = tl.zeros([BLOCK], tl.float64)
        row_first = tl.zeros([BLOCK], tl.float64)
        row_second = tl.zeros([BLOCK], tl.float64)
        for number in range(spans):
            there = _there(at + number * step + 6 * plane, visible - number * span, span, kept, GIVEN_VISIBLE)
            shown = kept & (there > 0)
            there = tl.where(shown, there, 0).to(tl.float64)
            here = at + number * step
            below = tl.where(shown, base - tl.load(here, mask=shown, other=0.0).to(tl.float64), 0.0)
            share = tl.load(here + plane, mask=shown, other=0.0).to(tl.float64) * tl.exp(-below)
            total += share
            gap += share * (tl.load(here + 2 * plane, mask=shown, other=0.0).to(tl.float64) + below)
            square += share * share * tl.load(here + 3 * plane, mask=shown, other=0.0).to(tl.float64)
            mean = tl.load(here + 4 * plane, mask=shown, other=0.0).to(tl.float64)
            row_first += there * mean
            row_second += tl.load(here + 5 * plane, mask=shown, other=0.0).to(tl.float64) + there * mean * mean
        total = tl.where(kept, total, 1.0)
        participation = tl.where(kept, square / (total * total), 1.0)
        row_entropy = tl.log(total) + gap / total
        number_seen = visible.to(tl.float64)
        some = visible > 1
        highest = tl.maximum(highest, largest, propagate_nan=tl.PropagateNan.ALL)
        row_mean = row_first / tl.maximum(number_seen, 1.0)
        beyond = tl.where(kept, largest - row_mean, float("-inf"))
        above = tl.maximum(above, beyond, propagate_nan=tl.PropagateNan.ALL)
        row_within = row_second - row_first * row_mean
        within += weight * tl.maximum(row_within, 0.0, propagate_nan=tl.PropagateNan.ALL)
        rows += weight
        seen += kept.to(tl.float64)
        scores += weight * number_seen
        looked += tl.where(kept, number_seen, 0.0)
        first += weight * row_first
        second += weight * row_second
        entropy += weight * row_entropy
        several += tl.where(some, weight, 0.0)
        ratio += tl.where(some, weight * row_entropy / tl.log(tl.maximum(number_seen, 2.0)), 0.0)
        top1 += weight / total
        saturated += tl.where(1.0 / total > SATURATED, weight, 0.0)
        gain += weight * (1.0 - tl.minimum(participation, 1.0, propagate_nan=tl.PropagateNan.ALL))
        keys += weight / participation

    bound = tl.full([BOUND_BLOCK], float("-inf"), tl.float32)
    for entry in range(batch):
        if GIVEN_LSE:  # no score of a row is above its ln Σ eˢ
            at = bounds_at + entry * bound_batch + head * bound_head
            for start in range(0, q_len, BOUND_BLOCK):
                row = start + tl.arange(0, BOUND_BLOCK)
                lse = tl.load(at + row, mask=row < q_len, other=float("-inf"))
                bound = tl.maximum(bound, lse, propagate_nan=tl.PropagateNan.ALL)
        else:  # Cauchy–Schwarz: nor above |a| · max‖q‖ · max‖k‖
            place = tl.arange(0, BOUND_BLOCK)
            at = bounds_at + place * bound_place + entry * bound_batch + head * bound_head
            query = tl.max(tl.load(at, mask=place < bound_places, other=0.0).to(tl.float32), 0)
            key = tl.max(tl.load(at + bound_keys, mask=place < bound_places, other=0.0).to(tl.float32), 0)
            bound = tl.maximum(bound, tl.sqrt(query) * tl.sqrt(key) * bound_scale, propagate_nan=tl.PropagateNan.ALL)
    wide_bound = largest_of(bound.to(tl.float64))
    if GIVEN_LSE:
        wide_bound += bound_slack * tl.maximum(tl.abs(wide_bound), 1.0)
    largest = largest_of(highest)
    all_scores = tl.sum(scores, 0)
    mean = tl.sum(first, 0) / tl.maximum(all_scores, 1.0)
    squares = tl.sum(second, 0) - all_scores * mean * mean
    to = table_at + head * TABLE
    squares = tl.maximum(squares, 0.0, propagate_nan=tl.PropagateNan.ALL)
    all_rows, all_several = tl.sum(rows, 0), tl.sum(several, 0)
    tl.store(to, tl.sum(seen, 0))
    tl.store(to + 1, tl.sum(looked, 0))
    tl.store(to + 2, mean)
    tl.store(to + 3, largest)
    tl.store(to + 4, tl.maximum(wide_bound, largest, propagate_nan=tl.PropagateNan.ALL))
    tl.store(to + 5, largest_of(above))
    tl.store(to + 6, all_scores)
    tl.store(to + 7, all_scores * 0.0)
    _keep(to, 8, 20, squares, all_scores)
    show(to, 21, tl.sqrt(squares / all_scores))
    all_within = tl.sum(within, 0)
    _keep(to, 9, 22, all_within, all_scores)
    show(to, 23, tl.sqrt(all_within / all_scores))
    tl.store(to + 10, all_rows)
    _keep(to, 11, 24, tl.sum(entropy, 0), all_rows)
    tl.store(to + 12, all_several)
    _keep(to, 13, 25, tl.sum(ratio, 0), tl.where(all_several > 0, all_several, float("nan")))
    _keep(to, 14, 26, tl.sum(top1, 0), all_rows)
    _keep(to, 15, 27, tl.sum(saturated, 0), all_rows)
    _keep(to, 16, 28, tl.sum(gain, 0), all_rows)
    _keep(to, 17, 29, tl.sum(keys, 0), all_rows)
    _keep(to, 18, 30, all_rows * float("nan"), all_rows)  # Σ of the weights on the first visible keys
    tl.store(to + 19, all_rows * 0.0)  # a learned sink joins rows that are pooled elsewhere
    show_number(to, 31, tl.sum(seen, 0))
    show_number(to, 32, tl.sum(looked, 0))


@triton.jit
def _there(at: tl.tensor, left: tl.tensor, span: tl.tensor, kept: tl.tensor, GIVEN_VISIBLE: tl.constexpr) -> tl.tensor:
    """How many keys of a span each row sees: as the pass has counted them, or of those left from its begin on."""
    if GIVEN_VISIBLE:
        return tl.load(at, mask=kept, other=0.0).to(tl.int32)
    return tl.minimum(left, span)


@triton.jit
def _keep(to: tl.tensor, column: tl.constexpr, shown: tl.constexpr, total: tl.tensor, number: tl.tensor) -> None:
    """A sum over rows, and the mean that is read."""
    tl.store(to + column, total)
    show(to, shown, total / number)
