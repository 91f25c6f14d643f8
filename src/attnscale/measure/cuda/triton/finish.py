"""The rows of each head -> its statistics, in one launch: sums in float64, added up in a fixed order.

Programs pool some rows each, or put some rows of the Gram matrices together; whichever of a head comes last adds up
what all of them left. The table has a row a head: NUMBERS and SUMS of `attnscale.measure.stats`.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

import triton
import triton.language as tl

from attnscale.theory.limits import SATURATED_TOP1

SATURATED: tl.constexpr = tl.constexpr(SATURATED_TOP1)
FIELDS: tl.constexpr = tl.constexpr(16)  # what a program leaves: see _pool and _combine
TABLE: tl.constexpr = tl.constexpr(16)  # columns: 5 numbers, 11 sums
AT_ONCE: tl.constexpr = tl.constexpr(64)  # slots, tiles or batch entries


@triton.jit(do_not_specialize=["q_len", "kv_len", "rows_each", "pool_parts", "batch", "heads", "kv_heads", "segments", "row_tiles"])  # fmt: skip
def finish_kernel(
    sums_at: tl.tensor,
    work_at: tl.tensor,
    triangles_at: tl.tensor,
    left_at: tl.tensor,
    arrived_at: tl.tensor,
    table_at: tl.tensor,
    scale: tl.tensor,
    scale_rest: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    q_len: tl.tensor,
    kv_len: tl.tensor,
    rows_each: tl.tensor,
    pool_parts: tl.tensor,
    segments: tl.tensor,
    row_tiles: tl.tensor,
    CAUSAL: tl.constexpr,
    GRAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Slot by slot: pooled rows, then batch entries × parts of the Gram matrices; the last one writes the table."""
    slot, head = tl.program_id(0), tl.program_id(1)
    slots = tl.num_programs(0)
    left_at += (head * slots).to(tl.int64) * FIELDS
    if slot < pool_parts:
        _pool(sums_at, left_at + slot * FIELDS, head, slot * rows_each, rows_each, batch, heads, q_len, kv_len, CAUSAL, GRAMS, BLOCK)  # fmt: skip
    else:
        if GRAMS:
            _combine(work_at, triangles_at, left_at + slot * FIELDS, head, slot - pool_parts, batch, heads, kv_heads, q_len, kv_len, segments, row_tiles, CAUSAL, WIDTH, PART, SEGMENT, TILE)  # fmt: skip
    tl.debug_barrier()
    if tl.atomic_add(arrived_at + head, 1, sem="acq_rel") == slots - 1:
        wide_scale = tl.cast(scale, tl.float64) + tl.cast(scale_rest, tl.float64)
        rows = _added(left_at, 0, slots)
        scores = _added(left_at, 1, slots)
        if GRAMS:
            mean, squares = _moments(left_at + pool_parts * FIELDS, batch, scores / tl.cast(batch, tl.float64), wide_scale, WIDTH // PART)  # fmt: skip
        else:
            mean = _added(left_at, 9, slots) / tl.maximum(scores, 1.0)
            squares = _added(left_at, 10, slots) - scores * mean * mean
        largest = _highest(left_at, slots)
        to = table_at + head * TABLE
        tl.store(to, rows)
        tl.store(to + 1, scores)
        tl.store(to + 2, mean)
        tl.store(to + 3, largest)
        tl.store(to + 4, largest)
        tl.store(to + 5, scores)
        tl.store(to + 6, rows * 0.0)
        tl.store(to + 7, tl.maximum(squares, 0.0, propagate_nan=tl.PropagateNan.ALL))
        tl.store(to + 8, rows)
        for field in tl.static_range(2, 9):
            tl.store(to + 7 + field, _added(left_at, field, slots))


@triton.jit
def _added(left_at: tl.tensor, field: tl.constexpr, slots: tl.tensor) -> tl.tensor:
    """One field of every slot, added up."""
    total = tl.zeros([AT_ONCE], tl.float64)
    for start in range(0, slots, AT_ONCE):
        slot = start + tl.arange(0, AT_ONCE)
        total += tl.load(left_at + slot * FIELDS + field, mask=slot < slots, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def _highest(left_at: tl.tensor, slots: tl.tensor) -> tl.tensor:
    highest = tl.full([AT_ONCE], float("-inf"), tl.float64)
    for start in range(0, slots, AT_ONCE):
        slot = start + tl.arange(0, AT_ONCE)
        here = tl.load(left_at + slot * FIELDS + 11, mask=slot < slots, other=float("-inf"), cache_modifier=".cg")
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
    GRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Some of the rows of a head, the batch entries one behind the other."""
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
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    plane = tl.cast(batch, tl.int64) * heads * q_len
    end = tl.minimum(begin + count, batch * q_len)
    for start in range(begin, end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        kept = row < end
        entry, position = row // q_len, row % q_len
        at = sums_at + (entry * heads + head).to(tl.int64) * q_len + position
        maximum = tl.load(at, mask=kept, other=float("-inf"))
        total = tl.load(at + plane, mask=kept, other=1.0)
        gap = tl.load(at + 2 * plane, mask=kept, other=0.0)
        participation = tl.load(at + 3 * plane, mask=kept, other=1.0)
        visible = tl.zeros_like(position) + kv_len
        if CAUSAL:
            visible = tl.minimum(position + 1, kv_len)
        some = kept & (visible > 1)
        row_entropy = tl.where(kept, tl.log(total) + gap, 0.0)
        weight = 1.0 / total
        highest = tl.maximum(highest, maximum, propagate_nan=tl.PropagateNan.ALL)
        scores += tl.where(kept, visible, 0).to(tl.float64)
        entropy += row_entropy.to(tl.float64)
        several += some.to(tl.float64)
        ratio += tl.where(some, row_entropy / tl.log(tl.maximum(visible, 2).to(tl.float32)), 0.0).to(tl.float64)
        top1 += tl.where(kept, weight, 0.0).to(tl.float64)
        saturated += tl.where(kept & (weight > SATURATED), 1.0, 0.0).to(tl.float64)
        gain += tl.where(kept, 1.0 - participation, 0.0).to(tl.float64)
        keys += tl.where(kept, 1.0 / participation, 0.0).to(tl.float64)
        if not GRAMS:
            mean = tl.load(at + 4 * plane, mask=kept, other=0.0).to(tl.float64)
            deviation = tl.load(at + 5 * plane, mask=kept, other=0.0).to(tl.float64)
            number = visible.to(tl.float64)
            first += tl.where(kept, number * mean, 0.0)
            second += tl.where(kept, deviation + number * mean * mean, 0.0)
    tl.store(left_at, tl.maximum(end - begin, 0).to(tl.float64))
    tl.store(left_at + 1, tl.sum(scores, 0))
    tl.store(left_at + 2, tl.sum(entropy, 0))
    tl.store(left_at + 3, tl.sum(several, 0))
    tl.store(left_at + 4, tl.sum(ratio, 0))
    tl.store(left_at + 5, tl.sum(top1, 0))
    tl.store(left_at + 6, tl.sum(saturated, 0))
    tl.store(left_at + 7, tl.sum(gain, 0))
    tl.store(left_at + 8, tl.sum(keys, 0))
    tl.store(left_at + 9, tl.sum(first, 0))
    tl.store(left_at + 10, tl.sum(second, 0))
    tl.store(left_at + 11, largest_of(highest.to(tl.float64)))


@triton.jit
def _combine(
    work_at: tl.tensor,
    triangles_at: tl.tensor,
    left_at: tl.tensor,
    head: tl.tensor,
    which: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    q_len: tl.tensor,
    kv_len: tl.tensor,
    segments: tl.tensor,
    row_tiles: tl.tensor,
    CAUSAL: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Σ u and Σ u² of u = q·k − c, c = q̄·k̄, for one batch entry: PART rows of every matrix.

    With x, y measured from their means, u = x·y + x·k̄ + q̄·y; over rows of Gram matrix X and sum x, and keys of Y, y,
    n and m of them, Σ u = x·y + m x·k̄ + n q̄·y and Σ u² = ⟨X, Y⟩ + m k̄ᵀXk̄ + n q̄ᵀYq̄ + 2 yᵀXk̄ + 2 xᵀYq̄ + 2 x·k̄ q̄·y.
    """
    entry, part = which // (WIDTH // PART), which % (WIDTH // PART)
    size = tl.cast(segments, tl.int64) * (WIDTH + 1) * WIDTH + WIDTH
    query_at = work_at + (entry * heads + head) * size
    key_at = work_at + (batch * heads + entry * kv_heads + head // (heads // kv_heads)) * size
    dims = tl.arange(0, WIDTH)
    own = part * PART + tl.arange(0, PART)
    offset = own[:, None] * WIDTH + dims[None, :]
    matrices = WIDTH + segments * WIDTH
    query_mean = _mean(query_at, dims, segments, q_len, WIDTH)
    key_mean = _mean(key_at, dims, segments, kv_len, WIDTH)
    own_query_mean = _mean(query_at, own, segments, q_len, WIDTH)
    own_key_mean = _mean(key_at, own, segments, kv_len, WIDTH)
    query_centre = query_mean + tl.load(query_at + dims).to(tl.float64)
    key_centre = key_mean + tl.load(key_at + dims).to(tl.float64)
    own_query_centre = own_query_mean + tl.load(query_at + own).to(tl.float64)
    own_key_centre = own_key_mean + tl.load(key_at + own).to(tl.float64)

    first = tl.sum(tl.zeros([PART], tl.float64), 0)
    second = tl.sum(tl.zeros([PART], tl.float64), 0)
    past = tl.zeros([PART, WIDTH], tl.float64)  # Y of the keys before
    past_sum = tl.zeros([WIDTH], tl.float64)
    own_past_sum = tl.zeros([PART], tl.float64)
    all_rows = tl.zeros([PART, WIDTH], tl.float64)  # X of every row, where all see all keys
    begin = tl.sum(tl.zeros([PART], tl.int32), 0)
    for segment in range(segments):
        rows = tl.maximum(tl.minimum(q_len - begin, SEGMENT), 0).to(tl.float64)
        row_sum = tl.load(query_at + WIDTH + segment * WIDTH + dims).to(tl.float64)
        own_row_sum = tl.load(query_at + WIDTH + segment * WIDTH + own).to(tl.float64)
        gram = tl.load(query_at + matrices + segment * (WIDTH * WIDTH) + offset).to(tl.float64)
        gram -= own_row_sum[:, None] * query_mean[None, :] + own_query_mean[:, None] * row_sum[None, :]
        gram += rows * own_query_mean[:, None] * query_mean[None, :]
        if CAUSAL:
            row_sum -= rows * query_mean
            own_row_sum -= rows * own_query_mean
            keys = tl.minimum(begin, kv_len).to(tl.float64)
            of_rows = tl.sum(gram * key_centre[None, :], 1)
            of_keys = tl.sum(past * query_centre[None, :], 1)
            second += tl.sum(tl.sum(gram * past, 1), 0)
            second += tl.sum((keys * own_key_centre + 2 * own_past_sum) * of_rows, 0)
            second += tl.sum((rows * own_query_centre + 2 * own_row_sum) * of_keys, 0)
            first += tl.sum(own_row_sum * own_past_sum, 0)
            if part == 0:
                rows_along, keys_along = tl.sum(row_sum * key_centre, 0), tl.sum(past_sum * query_centre, 0)
                second += 2 * rows_along * keys_along
                first += keys * rows_along + rows * keys_along
        else:
            all_rows += gram
        seen = tl.maximum(tl.minimum(kv_len - begin, SEGMENT), 0).to(tl.float64)
        key_sum = tl.load(key_at + WIDTH + segment * WIDTH + dims).to(tl.float64)
        own_key_sum = tl.load(key_at + WIDTH + segment * WIDTH + own).to(tl.float64)
        gram = tl.load(key_at + matrices + segment * (WIDTH * WIDTH) + offset).to(tl.float64)
        gram -= own_key_sum[:, None] * key_mean[None, :] + own_key_mean[:, None] * key_sum[None, :]
        past += gram + seen * own_key_mean[:, None] * key_mean[None, :]
        past_sum += key_sum - seen * key_mean
        own_past_sum += own_key_sum - seen * own_key_mean
        begin += SEGMENT
    centre = tl.sum(query_centre * key_centre, 0)
    if CAUSAL:
        if part == 0:
            for start in range(0, row_tiles, AT_ONCE):
                tile = start + tl.arange(0, AT_ONCE)
                there = tile < row_tiles
                at = triangles_at + ((entry * heads + head).to(tl.int64) * row_tiles + tile) * 3
                away, square = tl.load(at, mask=there, other=0.0), tl.load(at + 1, mask=there, other=0.0)
                apart = tl.load(at + 2, mask=there, other=0.0) - centre
                number = _scores_near_diagonal(tile * TILE, q_len, kv_len, SEGMENT, TILE)
                first += tl.sum(tl.where(there, away + number * apart, 0.0), 0)
                second += tl.sum(tl.where(there, square + 2 * apart * away + number * apart * apart, 0.0), 0)
    else:
        of_rows = tl.sum(all_rows * key_centre[None, :], 1)
        of_keys = tl.sum(past * query_centre[None, :], 1)
        second += tl.sum(tl.sum(all_rows * past, 1), 0)
        second += tl.sum(tl.cast(kv_len, tl.float64) * own_key_centre * of_rows, 0)
        second += tl.sum(tl.cast(q_len, tl.float64) * own_query_centre * of_keys, 0)
    for field in tl.static_range(11):
        tl.store(left_at + field, 0.0)
    tl.store(left_at + 11, float("-inf"))
    tl.store(left_at + 12, first)
    tl.store(left_at + 13, second)
    tl.store(left_at + 14, centre)


@triton.jit
def _mean(at: tl.tensor, dims: tl.tensor, segments: tl.tensor, length: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Of x = q − p over all rows."""
    total = tl.load(at + WIDTH + dims).to(tl.float64)
    for segment in range(1, segments):
        total += tl.load(at + WIDTH + segment * WIDTH + dims).to(tl.float64)
    return total / tl.cast(length, tl.float64)


@triton.jit
def _scores_near_diagonal(
    start: tl.tensor, q_len: tl.tensor, kv_len: tl.tensor, SEGMENT: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """How many keys of their own segment the rows of a tile see: Σ_i min(i + 1, kv_len) − begin, where that is more."""
    stop = tl.minimum(start + TILE, q_len).to(tl.int64)
    begin = (start // SEGMENT * SEGMENT).to(tl.int64)
    start = start.to(tl.int64)
    until = tl.minimum(tl.maximum(tl.cast(kv_len, tl.int64), start), stop)  # rows from here on see all keys
    growing = ((until * (until + 1) - start * (start + 1)) // 2 - (until - start) * begin).to(tl.float64)
    whole = (stop - until) * tl.maximum(tl.cast(kv_len, tl.int64) - begin, 0)
    return growing + whole.to(tl.float64)


@triton.jit
def _moments(
    at: tl.tensor,
    batch: tl.tensor,
    number: tl.tensor,
    scale: tl.tensor,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """Mean of the scores and Σ (s − mean)² over the batch entries, each with as many scores and a centre of its own."""
    total = tl.zeros([AT_ONCE], tl.float64)
    own = tl.zeros([AT_ONCE], tl.float64)
    for start in range(0, batch, AT_ONCE):
        means, squares = _entries(at, start, batch, number, scale, PARTS)
        total += means
        own += squares
    mean = tl.sum(total, 0) / tl.cast(batch, tl.float64)
    between = tl.zeros([AT_ONCE], tl.float64)
    for start in range(0, batch, AT_ONCE):
        means, _ = _entries(at, start, batch, number, scale, PARTS)
        apart = tl.where(start + tl.arange(0, AT_ONCE) < batch, means - mean, 0.0)
        between += apart * apart
    return mean, scale * scale * tl.sum(own, 0) + number * tl.sum(between, 0)


@triton.jit
def _entries(
    at: tl.tensor, start: tl.tensor, batch: tl.tensor, number: tl.tensor, scale: tl.tensor, PARTS: tl.constexpr
) -> tl.tensor:
    """The mean of some batch entries' scores, and Σ (q·k − its mean)²; zero past the last one."""
    entry = start + tl.arange(0, AT_ONCE)
    there = entry < batch
    at += entry * (PARTS * FIELDS)
    first = tl.zeros([AT_ONCE], tl.float64)
    second = tl.zeros([AT_ONCE], tl.float64)
    for part in tl.static_range(PARTS):
        first += tl.load(at + part * FIELDS + 12, mask=there, other=0.0, cache_modifier=".cg")
        second += tl.load(at + part * FIELDS + 13, mask=there, other=0.0, cache_modifier=".cg")
    centre = tl.load(at + 14, mask=there, other=0.0, cache_modifier=".cg")
    squares = tl.maximum(second - first * first / number, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(there, scale * (centre + first / number), 0.0), squares
