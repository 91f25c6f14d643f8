"""Norms of queries and keys, or of their gradients, in one launch, added to the sums of earlier calls."""
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscale.measure.cuda.launch import LEAST_WIDTH, Launch, Layout, Tiles, layout_key, padded_width, unit_stride
from attnscale.measure.cuda.replay import Replay
from attnscale.measure.cuda.sequence_tiles import SIZES

PROGRAMS = 264  # two for each multiprocessor of an H200
TILE_ELEMENTS = 4096


@triton.jit(
    do_not_specialize=SIZES,
    do_not_specialize_on_alignment=["sums_at"],  # a part of a larger tensor
)
def lengths_kernel(
    query_at,
    key_at,
    rows_left_out_at,
    keys_left_out_at,
    sums_at,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    rows_left_out_batch,
    rows_left_out_place,
    keys_left_out_batch,
    keys_left_out_place,
    heads,
    keys,
    group,
    batch,
    q_len,
    kv_len,
    LEAVES_ROWS_OUT: tl.constexpr,
    LEAVES_KEYS_OUT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Add the squares of some vectors of one head of the queries, or of the keys for each query head that uses it."""
    head = tl.program_id(0)
    if head < heads:
        place = (query_batch, query_head, query_row, rows_left_out_batch, rows_left_out_place)
        _add(
            query_at, rows_left_out_at, sums_at, head, 1, heads, batch, q_len, *place,
            LEAVES_ROWS_OUT, HEAD_DIM, WIDTH, TILE, 1,
        )  # fmt: skip
    else:
        place = (key_batch, key_head, key_row, keys_left_out_batch, keys_left_out_place)
        _add(
            key_at, keys_left_out_at, sums_at + 3 * heads, head - heads, group, heads, batch, kv_len, *place,
            LEAVES_KEYS_OUT, HEAD_DIM, WIDTH, TILE, GROUP,
        )  # fmt: skip


@triton.jit
def _add(
    vectors_at,
    left_out_at,
    sums_at,
    head,
    group,
    heads,
    batch,
    length,
    batch_stride,
    head_stride,
    row_stride,
    left_out_batch,
    left_out_place,
    LEAVES_OUT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    column = tl.arange(0, WIDTH)
    squares, counted = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    longest = tl.zeros([TILE], tl.float64)
    tiles = tl.cdiv(length, TILE)
    vectors_at += head.to(tl.int64) * head_stride
    for number in range(tl.program_id(1), batch * tiles, tl.num_programs(1)):
        entry, row = (number // tiles).to(tl.int64), (number % tiles) * TILE + tl.arange(0, TILE)
        counts = row < length
        if LEAVES_OUT:
            at = left_out_at + entry * left_out_batch + row * left_out_place
            counts = counts & (tl.load(at, mask=counts, other=1) == 0)
        at = vectors_at + entry * batch_stride + row[:, None].to(tl.int64) * row_stride + column[None, :]
        values = tl.load(at, mask=counts[:, None] & (column < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
        found = tl.sum(values * values, 1).to(tl.float64)
        squares += found
        counted += counts.to(tl.float64)
        longest = tl.maximum(longest, found)
    owner = tl.arange(0, GROUP)
    at = sums_at + head * group + owner
    nothing = tl.zeros([GROUP], tl.float64)
    tl.atomic_add(at, nothing + tl.sum(squares, 0), mask=owner < group, sem="relaxed")
    tl.atomic_add(at + heads, nothing + tl.sum(counted, 0), mask=owner < group, sem="relaxed")
    tl.atomic_max(at + 2 * heads, nothing + tl.max(longest, 0), mask=owner < group, sem="relaxed")


def add_lengths_(
    sums: Tensor, query: Tensor, key: Tensor, rows_left_out: Tensor | None = None, keys_left_out: Tensor | None = None
) -> None:
    """Add Σ‖x‖², the number of vectors and the largest ‖x‖² of queries and keys to `sums`, float64 (2, 3, heads).

    The sums of a key head are added for each query head that shares it. Masks are boolean, (batch or 1, length).
    """
    launch_lengths((unit_stride(query), unit_stride(key), rows_left_out, keys_left_out), (sums,))


def _launch_lengths(inputs: tuple[Tensor, Tensor, Tensor | None, Tensor | None], buffers: tuple[Tensor]) -> None:
    (query, key, *some), (sums,) = inputs, buffers
    (batch, heads, q_len, _), (_, keys, kv_len, _) = query.shape, key.shape
    left_out = [None if each is None else each.expand(batch, -1).view(torch.uint8) for each in some]
    launch = _launch(*(None if each is None else layout_key(each) for each in (query, key, *left_out)))
    parts = max(1, min(PROGRAMS // (heads + keys), batch * -(-max(q_len, kv_len) // launch.tiles.rows)))
    launch(
        (heads + keys, parts),
        *(query, key, *(query if each is None else each for each in left_out), sums),
        *(*query.stride()[:3], *key.stride()[:3]),
        *(stride for each in left_out for stride in ((0, 0) if each is None else each.stride())),
        *(heads, keys, heads // keys, batch, q_len, kv_len),
    )


launch_lengths = Replay(_launch_lengths)


@lru_cache(maxsize=1024)
def _launch(query: Layout, key: Layout, rows_left_out: Layout | None, keys_left_out: Layout | None) -> Launch:
    (_, heads, _, head_dim), _, _, device, _ = query
    width = padded_width(head_dim, LEAST_WIDTH)
    cut = Tiles(max(1, TILE_ELEMENTS // width), 0, 4, 2)
    constants = {
        "LEAVES_ROWS_OUT": rows_left_out is not None,
        "LEAVES_KEYS_OUT": keys_left_out is not None,
        "HEAD_DIM": head_dim,
        "WIDTH": width,
        "TILE": cut.rows,
        "GROUP": padded_width(heads // key[0][1], 1),
    }
    return Launch(lengths_kernel, device, constants, cut)
