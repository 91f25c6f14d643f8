"""The host's side of the Triton kernels."""
# mypy: disable-error-code="import-untyped"

import math

import torch
import triton
from torch import Tensor

from attnscale.measure.cuda.triton.launching import on_device, precision
from attnscale.measure.cuda.triton.rows import rows_kernel
from attnscale.measure.cuda.triton.sample import sample_kernel
from attnscale.measure.cuda.triton.tiles import Tiles, padded_width, sample_tiles, tiles

LOG2_E = math.log2(math.e)  # exponentials are base 2 inside, natural outside
LEAST_WIDTH = 16  # the narrowest product of tiles
ATTENDED, SCORED = 4, 6  # statistics a row: max, total, gap, participation, and mean and deviation


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool, cut: Tiles | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(scale · QKᵀ) V, the lse, and max, total, gap and participation of each row, from one pass."""
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    sums = torch.empty((ATTENDED, *query.shape[:3]), dtype=torch.float32, device=query.device)
    fill(output, sums, query, key, value, lse, None, scale, is_causal, cut)
    return output, lse, sums


def score_rows(
    query: Tensor,
    key: Tensor,
    lse: Tensor | None,
    rows: Tensor | None,
    scale: float,
    is_causal: bool,
    cut: Tiles | None = None,
) -> Tensor:
    """The sums of the query rows at these positions (None: all), in the order of RowSums; faster given their lse."""
    count = query.shape[2] if rows is None else rows.shape[0]
    sums = torch.empty((SCORED, *query.shape[:2], count), dtype=torch.float32, device=query.device)
    fill(None, sums, query, key, None, lse, rows, scale, is_causal, cut)
    return sums


def fill(
    output: Tensor | None,
    sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    lse: Tensor | None,
    rows: Tensor | None,
    scale: float,
    is_causal: bool,
    cut: Tiles | None = None,
) -> None:
    """Write the output, if one is wanted, and the sums: (4 with an output, 6 without; batch, heads, rows).

    With an output, the lse is written too; without, it is what a forward has found.
    """
    query, scale = _rising(query, scale)
    query, key = _unit_stride(query), _unit_stride(key)
    value = key if value is None else _unit_stride(value)
    batch, heads, _, head_dim = query.shape
    count = sums.shape[-1]
    if cut is None:
        cut = tiles(head_dim, query.dtype, torch.cuda.get_device_capability(query.device))
    with on_device(query):
        rows_kernel[(triton.cdiv(count, cut.rows) * batch * heads,)](
            query,
            key,
            value,
            query if output is None else output,
            sums,
            query if lse is None else lse,
            query if rows is None else rows.contiguous(),
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *((0, 0, 0) if lse is None else lse.stride()),
            heads,
            heads // key.shape[1],
            count,
            key.shape[2],
            scale,
            scale * LOG2_E,
            HEAD_DIM=head_dim,
            WIDTH=padded_width(head_dim, LEAST_WIDTH),
            TILE_ROWS=cut.rows,
            TILE_KEYS=cut.keys,
            CAUSAL=is_causal,
            ATTENDS=output is not None,
            GIVEN_LSE=lse is not None and output is None,
            GIVEN_ROWS=rows is not None,
            PRECISION=precision(query),
            num_warps=cut.warps,
            num_stages=cut.stages,
        )


def sample_rows(
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    scale: float,
    is_causal: bool,
    bounds: bool,
    span: int,
    cut: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """The sums of the rows at these positions over each span of keys: (6, spans, batch, heads, rows).

    With `bounds`, also the largest ‖q‖² and ‖k‖² in each part of the queries and each span of the keys: (2, spans,
    batch, heads); without, a tensor of none.
    """
    query, scale = _rising(query, scale)
    query, key = _unit_stride(query), _unit_stride(key)
    batch, heads, q_len, head_dim = query.shape
    kv_len, count = key.shape[2], rows.shape[0]
    spans = triton.cdiv(kv_len, span)
    sums = torch.empty((SCORED, spans, batch, heads, count), dtype=torch.float32, device=query.device)
    norms = torch.empty((2 if bounds else 0, spans, batch, heads), dtype=torch.float32, device=query.device)
    if cut is None:
        cut = sample_tiles(count, head_dim, query.dtype, torch.cuda.get_device_capability(query.device))
    with on_device(query):
        sample_kernel[(spans, batch * heads, triton.cdiv(count, cut.rows) + (1 if bounds else 0))](
            query,
            key,
            rows,
            sums,
            norms,
            *query.stride()[:3],
            *key.stride()[:3],
            heads,
            heads // key.shape[1],
            count,
            q_len,
            kv_len,
            triton.cdiv(q_len, spans),
            span,
            scale,
            scale * LOG2_E,
            HEAD_DIM=head_dim,
            WIDTH=padded_width(head_dim, LEAST_WIDTH),
            TILE_ROWS=cut.rows,
            TILE_KEYS=cut.keys,
            CAUSAL=is_causal,
            BOUNDS=bounds,
            PRECISION=precision(query),
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
    return sums, norms


def _rising(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """A query and a positive scale with the same scores: inside, the largest product is the largest score."""
    if scale > 0.0:
        return query, scale
    return (-query, -scale) if scale else (torch.zeros_like(query), 1.0)


def _unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

