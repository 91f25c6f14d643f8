"""Gram matrices by segments -> the moments of all scores, in float64."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

import triton
import triton.language as tl

FIELDS: tl.constexpr = tl.constexpr(16)  # what a program leaves: 5 numbers and 11 sums, in the order of the table
TABLE: tl.constexpr = tl.constexpr(26)  # columns: those, 8 statistics as they are read, and 2 whole numbers
SEGMENTS_AT_ONCE: tl.constexpr = tl.constexpr(8)
AT_ONCE: tl.constexpr = tl.constexpr(64)  # slots, tiles or batch entries


@triton.jit
def combine(
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

    With x, y measured from their means, u = x·k + q̄·y; over n rows of Gram matrix X and sum x, and m keys of Y and y,
    Σ u = x·y + m x·k̄ + n q̄·y and Σ u² = ⟨X, Σ k kᵀ⟩ + n q̄ᵀYq̄ + 2 xᵀYq̄ + 2 x·k̄ q̄·y, Σ k kᵀ = Y + m k̄k̄ᵀ + y k̄ᵀ + k̄ yᵀ:
    sums of squares and what is small beside them.
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
    crossed = tl.sum(tl.zeros([PART], tl.float64), 0)
    rows_in_all, keys_in_all = tl.cast(q_len, tl.float64), tl.cast(kv_len, tl.float64)
    products = tl.zeros([PART, WIDTH], tl.float64)
    past = tl.zeros([PART, WIDTH], tl.float64)  # Y of the keys before
    past_sum = tl.zeros([WIDTH], tl.float64)
    own_past_sum = tl.zeros([PART], tl.float64)
    all_rows = tl.zeros([PART, WIDTH], tl.float64)  # X of every row, where all see all keys
    begin = tl.sum(tl.zeros([PART], tl.int32), 0)
    for segment in range(segments):
        query_sum_at, key_sum_at = query_at + WIDTH + segment * WIDTH, key_at + WIDTH + segment * WIDTH
        of_query = tl.load(query_at + matrices + segment * (WIDTH * WIDTH) + offset)
        of_key = tl.load(key_at + matrices + segment * (WIDTH * WIDTH) + offset)
        row_sum, own_row_sum = tl.load(query_sum_at + dims).to(tl.float64), tl.load(query_sum_at + own).to(tl.float64)
        key_sum, own_key_sum = tl.load(key_sum_at + dims).to(tl.float64), tl.load(key_sum_at + own).to(tl.float64)
        rows = tl.maximum(tl.minimum(q_len - begin, SEGMENT), 0).to(tl.float64)
        seen = tl.maximum(tl.minimum(kv_len - begin, SEGMENT), 0).to(tl.float64)
        own_row_sum -= rows * own_query_mean
        own_key_sum -= seen * own_key_mean
        gram = of_query.to(tl.float64) - own_row_sum[:, None] * query_mean[None, :]
        gram -= own_query_mean[:, None] * row_sum[None, :]
        row_sum -= rows * query_mean
        if CAUSAL:
            keys = tl.minimum(begin, kv_len).to(tl.float64)
            whole = past + (keys * own_key_centre + own_past_sum)[:, None] * key_centre[None, :]
            whole += own_key_centre[:, None] * past_sum[None, :]  # Σ k kᵀ
            products += gram * whole
            products += past * ((rows * own_query_centre + 2 * own_row_sum)[:, None] * query_centre[None, :])
            first += tl.sum(own_row_sum * own_past_sum, 0)
            if part == 0:
                rows_along, keys_along = tl.sum(row_sum * key_centre, 0), tl.sum(past_sum * query_centre, 0)
                crossed += 2 * rows_along * keys_along
                first += keys * rows_along + rows * keys_along
        else:
            all_rows += gram
        past += of_key.to(tl.float64) - own_key_sum[:, None] * key_mean[None, :]
        past -= own_key_mean[:, None] * key_sum[None, :]
        past_sum += key_sum - seen * key_mean
        own_past_sum += own_key_sum
        begin += SEGMENT
    if not CAUSAL:
        products += all_rows * (past + (keys_in_all * own_key_centre)[:, None] * key_centre[None, :])
        products += past * ((rows_in_all * own_query_centre)[:, None] * query_centre[None, :])
    second = crossed + tl.sum(tl.sum(products, 1), 0)
    centre = tl.sum(query_centre * key_centre, 0)
    if CAUSAL:  # noqa: SIM102  # known when it is compiled; the other when it runs
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
    tl.store(left_at, first)
    tl.store(left_at + 1, second)
    tl.store(left_at + 2, centre)


@triton.jit
def _mean(at: tl.tensor, dims: tl.tensor, segments: tl.tensor, length: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Of x = q − p over all rows."""
    total = tl.zeros_like(dims).to(tl.float64)
    for start in range(0, segments, SEGMENTS_AT_ONCE):
        segment = start + tl.arange(0, SEGMENTS_AT_ONCE)[:, None]
        some = tl.load(at + WIDTH + segment * WIDTH + dims[None, :], mask=segment < segments, other=0.0)
        total += tl.sum(some.to(tl.float64), 0)
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
def moments(
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
        first += tl.load(at + part * FIELDS, mask=there, other=0.0, cache_modifier=".cg")
        second += tl.load(at + part * FIELDS + 1, mask=there, other=0.0, cache_modifier=".cg")
    centre = tl.load(at + 2, mask=there, other=0.0, cache_modifier=".cg")
    squares = tl.maximum(second - first * first / number, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(there, scale * (centre + first / number), 0.0), squares
