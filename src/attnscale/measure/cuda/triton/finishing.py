"""The host's side of the kernels that finish: how the work is laid out in memory, and launches that cost little."""
# mypy: disable-error-code="import-untyped"

from collections.abc import Hashable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.measure.cuda.triton.combine import FIELDS, TABLE
from attnscale.measure.cuda.triton.finish import finish_kernel
from attnscale.measure.cuda.triton.finish_sample import finish_sample_kernel
from attnscale.measure.cuda.triton.grams import grams_kernel
from attnscale.measure.cuda.triton.launching import counters, launch, precision
from attnscale.measure.cuda.triton.tiles import padded_width

LEAST_WIDTH = 16  # the narrowest product of tiles
PROGRAMS = 1056  # that pool rows, eight a multiprocessor of an H200
POOLED_ROWS = 128  # at a time, four a thread of one warp: sums over them need no barriers
POOLED_BESIDE = 512  # where warps that put matrices together pool them too
COMBINED = 32  # rows of the Gram matrices that a program puts together: three arrays of float64 in its registers
SAMPLED_ROWS, BOUNDS = 64, 1024  # at a time, of a sampled head's rows and of what bounds its maximum


class Cut(NamedTuple):
    """How the pass over query and key is cut."""

    segment: int  # rows of one Gram matrix, and of a triangle on the diagonal
    tile: int  # rows at a time
    part: int  # rows of a matrix that one program adds up
    warps: int
    stages: int


def grams_cut(width: int, dtype: torch.dtype, is_causal: bool) -> Cut:
    """What won on an H200: long segments write less, short ones pass over fewer scores on the diagonal."""
    if dtype == torch.float32:
        return Cut(512, 32, min(width, 64), 4, 2)
    return Cut(512 if is_causal else 1024, 64, min(width, 128), 4 if width <= 128 else 8, 3)


def finish_attended(
    query: Tensor,
    key: Tensor,
    sums: Tensor,
    scale: float,
    is_causal: bool,
    kind: Hashable = None,
    cut: Cut | None = None,
) -> Tensor:
    """The table of the heads: their rows pooled, the moments of all scores from query and key."""
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    width = padded_width(head_dim, LEAST_WIDTH)
    cut = cut or grams_cut(width, query.dtype, is_causal)
    segments = _ceil(max(q_len, kv_len), cut.segment)
    row_tiles = _ceil(q_len, cut.tile) if is_causal else 0
    sides = batch * (heads + kv_heads)
    parts, rows_each = _pool_parts(batch * q_len, heads, POOLED_BESIDE)
    combined = min(width, COMBINED)
    slots = parts + batch * (width // combined)
    # all in one allocation: float64 first, then the matrices
    wide = heads * slots * FIELDS.value + 3 * batch * heads * row_tiles
    room = sides * (segments * (width + 1) * width + width)
    work = torch.empty(2 * wide + room, dtype=torch.float32, device=query.device)
    left = work[: 2 * wide].view(torch.float64)
    triangles, matrices = left[heads * slots * FIELDS.value :], work[2 * wide :]
    programs = sides * segments * (width // cut.part) + batch * heads * row_tiles
    launch(
        grams_kernel,
        (programs,),
        (
            *(query, key, matrices, triangles, *query.stride()[:3], *key.stride()[:3], batch, heads, kv_heads),
            *(q_len, kv_len, segments, row_tiles),
        ),
        (head_dim, width, cut.part, cut.segment, cut.tile, precision(query)),
        (cut.warps, cut.stages),
        kind,
    )
    table = torch.empty((heads, TABLE.value), dtype=torch.float64, device=query.device)
    rounded = single(scale)
    launch(
        finish_kernel,
        (slots, heads),
        (
            *(
                sums,
                matrices,
                triangles,
                left,
                counters(query.device, heads),
                table,
                rounded,
                scale - rounded,
                batch,
                heads,
                kv_heads,
            ),
            *(q_len, kv_len, rows_each, parts, segments, row_tiles),
        ),
        (is_causal, True, width, combined, cut.segment, cut.tile, POOLED_BESIDE),
        (8, 1),
        kind,
    )
    return table


def finish_scored(sums: Tensor, kv_len: int, is_causal: bool, kind: Hashable = None) -> Tensor:
    """The same from rows that have their own moments, (6, batch, heads, q_len)."""
    _, batch, heads, q_len = sums.shape
    parts, rows_each = _pool_parts(batch * q_len, heads, POOLED_ROWS)
    left = torch.empty(heads * parts * FIELDS.value, dtype=torch.float64, device=sums.device)
    arrived = counters(sums.device, heads)
    table = torch.empty((heads, TABLE.value), dtype=torch.float64, device=sums.device)
    launch(
        finish_kernel,
        (parts, heads),
        (sums, sums, left, left, arrived, table, 1.0, 0.0, batch, heads, heads, q_len, kv_len, rows_each, parts, 0, 0),
        (is_causal, False, 16, 16, 16, 16, POOLED_ROWS),
        (1, 1),
        kind,
    )
    return table


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
    slack: float,
    kind: Hashable = None,
) -> Tensor:
    """The same of sampled rows, (6, spans, batch, heads, rows), bounded by the lse of all rows or by norms."""
    _, spans, batch, heads, count = sums.shape
    given_lse = bounds.dim() == 3
    table = torch.empty((heads, TABLE.value), dtype=torch.float64, device=sums.device)
    launch(
        finish_sample_kernel,
        (heads,),
        (
            *(sums, rows, weights, bounds, table, *(bounds.stride()[:2] if given_lse else (0, 0)), batch, heads, count),
            *(q_len, kv_len, spans, span, abs(scale) * (1 + slack), slack),
        ),
        (is_causal, given_lse, SAMPLED_ROWS, BOUNDS),
        (4, 1),
        kind,
    )
    return table


def _pool_parts(rows: int, heads: int, block: int) -> tuple[int, int]:
    """How many programs pool a head's rows, and how many rows each."""
    parts = max(1, min(PROGRAMS * POOLED_ROWS // (block * heads), _ceil(rows, block)))
    each = _ceil(_ceil(rows, parts), block) * block
    return _ceil(rows, each), each


def _ceil(number: int, part: int) -> int:
    return -(-number // part)


def single(number: float) -> float:
    """As float32 holds it."""
    return _single(number)


@cache
def _single(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))
