"""Lengths of queries and keys, a head at a time, and the bounds of scores that follow from them, in one launch.

A probe asks for them at every call: as operations of torch they take the host longer than all else that it launches.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscale.measure.cuda.finish import PROGRAMS, largest_of
from attnscale.measure.cuda.launch import (
    LEAST_WIDTH,
    Launch,
    Layout,
    Tiles,
    counters,
    layout_key,
    padded_width,
    unit_stride,
)

SIDE: tl.constexpr = tl.constexpr(4)  # numbers that a program leaves: Σ‖x‖² of what counts, of all, count, largest ‖x‖²
SLOTS: tl.constexpr = tl.constexpr(64)  # programs of a head, at most
TILE = 8192  # elements at a time


@triton.jit(
    do_not_specialize=[
        "query_left_batch", "query_left_row", "key_left_batch", "key_left_row",
        "batch", "heads", "group", "q_len", "kv_len",
    ],
    do_not_specialize_on_alignment=["query_left_at", "key_left_at", "lengths_at"],  # parts of larger tensors
)  # fmt: skip
def lengths_kernel(
    query_at: tl.tensor,
    key_at: tl.tensor,
    query_left_at: tl.tensor,
    key_left_at: tl.tensor,
    parts_at: tl.tensor,
    arrived_at: tl.tensor,
    lengths_at: tl.tensor,
    bounds_at: tl.tensor,
    query_batch: tl.tensor,
    query_head: tl.tensor,
    query_row: tl.tensor,
    key_batch: tl.tensor,
    key_head: tl.tensor,
    key_row: tl.tensor,
    query_left_batch: tl.tensor,
    query_left_row: tl.tensor,
    key_left_batch: tl.tensor,
    key_left_row: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    group: tl.tensor,
    q_len: tl.tensor,
    kv_len: tl.tensor,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES_LEFT_OUT: tl.constexpr,
    KEYS_LEFT_OUT: tl.constexpr,
) -> None:
    """Sum the squares of some queries of a head and of some of its keys; the last program writes what they come to."""
    slot, slots, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    parts_at += (head * slots).to(tl.int64) * 2 * SIDE
    own_at = parts_at + slot * 2 * SIDE
    query_at += head.to(tl.int64) * query_head
    key_at += (head // group).to(tl.int64) * key_head
    _sum_squares(
        query_at, query_left_at, own_at, query_batch, query_row, query_left_batch, query_left_row, batch, q_len,
        slot, slots, HEAD_DIM, WIDTH, BLOCK, QUERIES_LEFT_OUT,
    )  # fmt: skip
    _sum_squares(
        key_at, key_left_at, own_at + SIDE, key_batch, key_row, key_left_batch, key_left_row, batch, kv_len,
        slot, slots, HEAD_DIM, WIDTH, BLOCK, KEYS_LEFT_OUT,
    )  # fmt: skip
    tl.debug_barrier()
    if tl.atomic_add(arrived_at + head, 1, sem="acq_rel") == slots - 1:
        longest_query = _write_length(parts_at, slots, lengths_at + head, batch * q_len)
        longest_key = _write_length(parts_at + SIDE, slots, lengths_at + heads + head, batch * kv_len)
        tl.store(bounds_at + head, (longest_query * longest_key * scale).to(tl.float32))
        tl.store(arrived_at + head, 0)  # for the next launch


@triton.jit
def _sum_squares(
    vectors_at: tl.tensor,
    left_at: tl.tensor,
    to: tl.tensor,
    batch_stride: tl.tensor,
    row_stride: tl.tensor,
    left_batch: tl.tensor,
    left_row: tl.tensor,
    batch: tl.tensor,
    length: tl.tensor,
    slot: tl.tensor,
    slots: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LEFT_OUT: tl.constexpr,
) -> None:
    every = tl.zeros([BLOCK], tl.float64)
    some = tl.zeros([BLOCK], tl.float64)
    count = tl.zeros([BLOCK], tl.float64)
    longest = tl.zeros([BLOCK], tl.float32)
    dims = tl.arange(0, WIDTH)[None, :]
    for start in range(slot * BLOCK, batch * length, slots * BLOCK):
        row = start + tl.arange(0, BLOCK)
        kept = row < batch * length
        entry, place = row // length, row % length
        at = vectors_at + entry.to(tl.int64) * batch_stride + place.to(tl.int64) * row_stride
        values = tl.load(at[:, None] + dims, mask=kept[:, None] & (dims < HEAD_DIM), other=0.0).to(tl.float32)
        square = tl.sum(values * values, 1)
        every += square.to(tl.float64)
        longest = tl.maximum(longest, square, propagate_nan=tl.PropagateNan.ALL)
        if LEFT_OUT:
            kept = kept & (tl.load(left_at + entry * left_batch + place * left_row, mask=kept, other=1) == 0)
        some += tl.where(kept, square, 0.0).to(tl.float64)
        count += kept.to(tl.float64)
    tl.store(to, tl.sum(some, 0))
    tl.store(to + 1, tl.sum(every, 0))
    tl.store(to + 2, tl.sum(count, 0))
    tl.store(to + 3, largest_of(longest.to(tl.float64)))


@triton.jit
def _write_length(parts_at: tl.tensor, slots: tl.tensor, to: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Write the root mean square length of what counts, or of all where nothing does; return the longest."""
    slot = tl.arange(0, SLOTS)
    at, here = parts_at + slot * 2 * SIDE, slot < slots
    some = tl.sum(tl.load(at, mask=here, other=0.0, cache_modifier=".cg"), 0)
    every = tl.sum(tl.load(at + 1, mask=here, other=0.0, cache_modifier=".cg"), 0)
    count = tl.sum(tl.load(at + 2, mask=here, other=0.0, cache_modifier=".cg"), 0)
    longest = largest_of(tl.load(at + 3, mask=here, other=0.0, cache_modifier=".cg"))
    mean = tl.where(count > 0.0, some / tl.maximum(count, 1.0), every / total.to(tl.float64))
    tl.store(to, tl.sqrt(mean))
    return tl.sqrt(longest)


def measure_lengths(
    query: Tensor, key: Tensor, padding: Tensor | None, hidden_keys: Tensor | None, scale: float, lengths: Tensor
) -> Tensor:
    """Write root mean square lengths of queries, and of the key of each head, (2, heads) in float64; return bounds.

    Rows of `padding`, (batch, q_len), and `hidden_keys`, (batch or 1, kv_len), do not count; where nothing would count,
    everything does. No score of a head is above its bound: its longest query times its longest key times the scale.
    """
    query, key = unit_stride(query), unit_stride(key)
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = query.shape, key.shape
    launch = _launch(layout_key(query), layout_key(key), padding is not None, hidden_keys is not None)
    slots = min(SLOTS.value, max(1, PROGRAMS // heads), -(-batch * max(q_len, kv_len) // launch.tiles.rows))
    parts = torch.empty(heads * slots * 2 * SIDE.value, dtype=torch.float64, device=query.device)
    bounds = torch.empty(heads, dtype=torch.float32, device=query.device)
    left = [query if out is None else out.expand(batch, -1).view(torch.uint8) for out in (padding, hidden_keys)]
    launch(
        (slots, heads),
        *(query, key, *left, parts, counters(query.device, heads), lengths, bounds),
        *(*query.stride()[:3], *key.stride()[:3], *left[0].stride()[:2], *left[1].stride()[:2]),
        *(batch, heads, heads // kv_heads, q_len, kv_len, abs(scale)),
    )
    return bounds


@lru_cache(maxsize=1024)
def _launch(query: Layout, key: Layout, has_padding: bool, has_hidden_keys: bool) -> Launch:
    (*_, head_dim), *_, device, _ = query
    width = padded_width(head_dim, LEAST_WIDTH)
    constants = {
        "HEAD_DIM": head_dim,
        "WIDTH": width,
        "BLOCK": TILE // width,
        "QUERIES_LEFT_OUT": has_padding,
        "KEYS_LEFT_OUT": has_hidden_keys,
    }
    return Launch(lengths_kernel, device, constants, Tiles(TILE // width, 0, 4, 1))
