"""The host's side of the Triton kernels."""
# mypy: disable-error-code="import-untyped"

import math
from collections.abc import Hashable

import torch
from torch import Tensor

from attnscale.measure.cuda.triton.launching import capability, launch, on_device, precision
from attnscale.measure.cuda.triton.rows import rows_kernel
from attnscale.measure.cuda.triton.sample import sample_kernel
from attnscale.measure.cuda.triton.sequences import most_tiles, tiles_of
from attnscale.measure.cuda.triton.tiles import Tiles, padded_width, sample_tiles, tiles

LOG2_E = math.log2(math.e)  # exponentials are base 2 inside, natural outside
LEAST_WIDTH = 16  # the narrowest product of tiles
ATTENDED, SCORED = 4, 6  # statistics a row: max, total, gap, participation, and mean and deviation
OF_SEQUENCES = 7  # and the number of visible keys


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    is_causal: bool,
    moments: bool = False,
    cut: Tiles | None = None,
    kind: Hashable = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(scale · QKᵀ) V, the lse, and max, total, gap and participation of each row, from one pass.

    With `moments`, also mean and deviation.
    """
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    planes = SCORED if moments else ATTENDED
    sums = torch.empty((planes, *query.shape[:3]), dtype=torch.float32, device=query.device)
    fill(output, sums, query, key, value, lse, None, scale, is_causal, cut, kind)
    return output, lse, sums


def score_rows(
    query: Tensor,
    key: Tensor,
    lse: Tensor | None,
    rows: Tensor | None,
    scale: float,
    is_causal: bool,
    cut: Tiles | None = None,
    kind: Hashable = None,
) -> Tensor:
    """The sums of the query rows at these positions (None: all), in the order of RowSums; faster given their lse."""
    count = query.shape[2] if rows is None else rows.shape[0]
    sums = torch.empty((SCORED, *query.shape[:2], count), dtype=torch.float32, device=query.device)
    fill(None, sums, query, key, None, lse, rows, scale, is_causal, cut, kind)
    return sums


def sequence_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    starts: Tensor,
    scale: float,
    is_causal: bool,
    cut: Tiles | None = None,
    kind: Hashable = None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Of sequences laid end to end, (1, heads, total, head_dim), each of which sees itself: output, lse, and sums.

    The output is (total, heads, head_dim), the lse (1, heads, total); without a value both are None. The sums, (7, 1,
    heads, total), end with how many keys each row sees.
    """
    _, heads, total, head_dim = query.shape
    made = None if value is None else torch.empty((total, heads, head_dim), dtype=query.dtype, device=query.device)
    lse = None if value is None else torch.empty((1, heads, total), dtype=torch.float32, device=query.device)
    sums = torch.empty((OF_SEQUENCES, 1, heads, total), dtype=torch.float32, device=query.device)
    sums[-1].zero_()  # tokens behind the last sequence see nothing
    fill(made, sums, query, key, value, lse, None, scale, is_causal, cut, kind, starts)
    return made, lse, sums


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
    kind: Hashable = None,
    starts: Tensor | None = None,
) -> None:
    """Write the output, if one is wanted, and the sums: (4 or 6 with an output, 6 without; batch, heads, rows).

    With an output, the lse is written too; without, it is what a forward has found. With the starts of sequences that
    are laid end to end, they are looked at by themselves.
    """
    query, scale = _rising(query, scale)
    query, key = unit_stride(query), unit_stride(key)
    value = key if value is None else unit_stride(value)
    batch, heads, _, head_dim = query.shape
    count = sums.shape[-1]
    if cut is None:
        cut = tiles(head_dim, query.dtype, capability(query.device.index))
    programs, placed = -(-count // cut.rows) * batch * heads, query
    if starts is not None:
        programs = most_tiles(starts, count, cut.rows) * heads
        placed = tiles_of(starts, count, cut.rows, is_causal)
    with on_device(query):
        launch(
            rows_kernel,
            (programs,),
            (
                *(query, key, value, query if output is None else output, sums, query if lse is None else lse),
                *(query if rows is None else rows.contiguous(), placed, *query.stride()[:3], *key.stride()[:3]),
                *(*value.stride()[:3], *((0, 0, 0) if lse is None else lse.stride())),
                *(heads, heads // key.shape[1], count, key.shape[2], scale, scale * LOG2_E),
            ),
            (
                *(head_dim, padded_width(head_dim, LEAST_WIDTH), cut.rows, cut.keys, is_causal, output is not None),
                *(lse is not None and output is None, rows is not None, sums.shape[0] >= SCORED, starts is not None),
                precision(query),
            ),
            (cut.warps, cut.stages),
            kind,
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
    kind: Hashable = None,
) -> tuple[Tensor, Tensor]:
    """The sums of the rows at these positions, (batch, rows), over each span of keys: (6, spans, batch, heads, rows).

    With `bounds`, also the largest ‖q‖² and ‖k‖² in each part of the queries and each span of the keys: (2, spans,
    batch, heads); without, a tensor of none.
    """
    query, scale = _rising(query, scale)
    query, key = unit_stride(query), unit_stride(key)
    batch, heads, q_len, head_dim = query.shape
    kv_len, count = key.shape[2], rows.shape[1]
    spans = -(-kv_len // span)
    sums = torch.empty((SCORED, spans, batch, heads, count), dtype=torch.float32, device=query.device)
    norms = torch.empty((2 if bounds else 0, spans, batch, heads), dtype=torch.float32, device=query.device)
    if cut is None:
        cut = sample_tiles(count, head_dim, query.dtype, capability(query.device.index))
    with on_device(query):
        launch(
            sample_kernel,
            (spans, batch * heads, -(-count // cut.rows) + (1 if bounds else 0)),
            (
                *(query, key, rows.contiguous(), sums, norms, *query.stride()[:3], *key.stride()[:3]),
                *(heads, heads // key.shape[1], count, q_len, kv_len, -(-q_len // spans), span, scale, scale * LOG2_E),
            ),
            (
                *(head_dim, padded_width(head_dim, LEAST_WIDTH), cut.rows, cut.keys, is_causal, bounds),
                precision(query),
            ),
            (cut.warps, cut.stages),
            kind,
        )
    return sums, norms


def _rising(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """A query and a positive scale with the same scores: inside, the largest product is the largest score."""
    if scale > 0.0:
        return query, scale
    return (-query, -scale) if scale else (torch.zeros_like(query), 1.0)


def unit_stride(tensor: Tensor) -> Tensor:
    """The same, with its last axis in a row."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
