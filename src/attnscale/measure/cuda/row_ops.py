"""The sums of rows, and the tables of their heads, as torch operators; launched directly where nobody looks on."""

from typing import Any

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.bound import BOUND_SLACK
from attnscale.measure.cuda.spans import key_span
from attnscale.measure.cuda.watched import looked_on
from attnscale.measure.cuda.ways import layout_of
from attnscale.measure.pool import pool_rows
from attnscale.measure.pooled import TABLE
from attnscale.measure.row_blocks import measure_rows
from attnscale.measure.row_sums import RowSums
from attnscale.measure.sampling import Sample
from attnscale.measure.stats import table_of
from attnscale.numerics import wide_dtype
from attnscale.visibility import Visibility

SCORED = ("max", "total", "gap", "participation", "mean", "deviation")  # of a row, as RowSums names them


def score_stats(query: Tensor, key: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    """SCORED of every row and the table of their heads."""
    look, pool = (score_rows, pooled_rows) if looked_on(query) else (_score_rows, _pooled_rows)
    sums = look(query, key, None, None, scale, is_causal)
    return sums, pool(sums, key.shape[2], is_causal)


def sample_stats(
    query: Tensor, key: Tensor, lse: Tensor | None, rows: Tensor, weights: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """SCORED of the rows at these positions, (batch, rows), over every span of keys, and the table of their heads.

    The lse of all rows, (batch, heads, q_len), bounds the maximum; without it, the norms of queries and keys do.
    """
    q_len, kv_len, span = query.shape[2], key.shape[2], key_span(query, key)
    look, pool = (sample_rows, pooled_sample) if looked_on(query) else (_sample_rows, _pooled_sample)
    sums, norms = look(query, key, rows, scale, is_causal, lse is None)
    bounds = norms if lse is None else lse
    return sums, pool(sums, bounds, rows, weights, q_len, kv_len, span, scale, is_causal)


@torch.library.custom_op("attnscale::score_rows", mutates_args=(), device_types="cuda")
def score_rows(
    query: Tensor, key: Tensor, lse: Tensor | None, rows: Tensor | None, scale: float, is_causal: bool
) -> Tensor:
    """SCORED of the query rows at these positions (None: all), (6, batch, heads, rows).

    `lse`, (batch, heads, q_len), is what the forward of the same attention found; it only makes this faster.
    """
    return _score_rows(query, key, lse, rows, scale, is_causal)


def _score_rows(
    query: Tensor, key: Tensor, lse: Tensor | None, rows: Tensor | None, scale: float, is_causal: bool
) -> Tensor:
    from attnscale.measure.cuda import triton

    kind = *layout_of(query), *layout_of(key), lse is None, rows is None, is_causal, scale > 0.0, scale == 0.0
    plain = lse is None and rows is None
    return triton.score_rows(query, key, lse, rows, scale, is_causal, kind=("score", kind) if plain else None)


@score_rows.register_kernel("cpu")
def _score_rows_cpu(
    query: Tensor, key: Tensor, lse: Tensor | None, rows: Tensor | None, scale: float, is_causal: bool
) -> Tensor:
    return _stacked(measured_rows(query, key, rows, scale, is_causal))


@score_rows.register_fake
def _score_rows_fake(
    query: Tensor, key: Tensor, lse: Tensor | None, rows: Tensor | None, scale: float, is_causal: bool
) -> Tensor:
    return empty_wide(query, len(SCORED), *query.shape[:2], query.shape[2] if rows is None else rows.shape[0])


@torch.library.custom_op("attnscale::sample_rows", mutates_args=(), device_types="cuda")
def sample_rows(
    query: Tensor, key: Tensor, rows: Tensor, scale: float, is_causal: bool, bounds: bool
) -> tuple[Tensor, Tensor]:
    """SCORED of the rows at these positions, (batch, rows), over every span of keys: (6, spans, batch, heads, rows).

    With `bounds`, also the largest ‖q‖² and ‖k‖² of as many parts of the queries and keys: (2, spans, batch, heads).
    """
    return _sample_rows(query, key, rows, scale, is_causal, bounds)


def _sample_rows(
    query: Tensor, key: Tensor, rows: Tensor, scale: float, is_causal: bool, bounds: bool
) -> tuple[Tensor, Tensor]:
    from attnscale.measure.cuda import triton

    kind = *layout_of(query), *layout_of(key), *layout_of(rows), bounds, is_causal, scale > 0.0, scale == 0.0
    return triton.sample_rows(query, key, rows, scale, is_causal, bounds, key_span(query, key), kind=("sample", kind))


@sample_rows.register_kernel("cpu")
def _sample_rows_cpu(
    query: Tensor, key: Tensor, rows: Tensor, scale: float, is_causal: bool, bounds: bool
) -> tuple[Tensor, Tensor]:
    sums = _stacked(measured_rows(query, key, rows, scale, is_causal))
    if not bounds:
        return sums.unsqueeze(1), empty_wide(query, 0, 1, *query.shape[:2])
    wide = wide_dtype(query)
    longest = [tensor.to(wide).square().sum(-1).amax(-1) for tensor in (query, key)]
    longest[1] = longest[1].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return sums.unsqueeze(1), torch.stack(longest).unsqueeze(1)


@sample_rows.register_fake
def _sample_rows_fake(
    query: Tensor, key: Tensor, rows: Tensor, scale: float, is_causal: bool, bounds: bool
) -> tuple[Tensor, Tensor]:
    spans = -(-key.shape[2] // key_span(query, key))
    parts = spans, *query.shape[:2]
    return empty_wide(query, len(SCORED), *parts, rows.shape[1]), empty_wide(query, 2 if bounds else 0, *parts)


@torch.library.custom_op("attnscale::pooled_rows", mutates_args=(), device_types="cuda")
def pooled_rows(sums: Tensor, kv_len: int, is_causal: bool) -> Tensor:
    """The table of the heads whose rows have these sums, (6, batch, heads, q_len)."""
    return _pooled_rows(sums, kv_len, is_causal)


def _pooled_rows(sums: Tensor, kv_len: int, is_causal: bool) -> Tensor:
    from attnscale.measure.cuda import triton

    return triton.finish_scored(sums, kv_len, is_causal, ("scored", sums.shape, sums.device.index, kv_len, is_causal))


@pooled_rows.register_kernel("cpu")
def _pooled_rows_cpu(sums: Tensor, kv_len: int, is_causal: bool) -> Tensor:
    visible = Visibility.of(None, is_causal).counts_at(torch.arange(sums.shape[-1]), kv_len)
    return table_of_rows(RowSums(visible.expand_as(sums[0]), *sums, first=torch.full_like(sums[0], -torch.inf)))


@pooled_rows.register_fake
def _pooled_rows_fake(sums: Tensor, kv_len: int, is_causal: bool) -> Tensor:
    return sums.new_empty((sums.shape[2], TABLE), dtype=torch.float64)


@torch.library.custom_op("attnscale::pooled_sample", mutates_args=(), device_types="cuda")
def pooled_sample(
    sums: Tensor,
    bounds: Tensor,
    rows: Tensor,
    weights: Tensor,
    q_len: int,
    kv_len: int,
    span: int,
    scale: float,
    is_causal: bool,
) -> Tensor:
    """The table of heads of which rows were sampled, (6, spans, batch, heads, rows), with their weights.

    `bounds`: the lse of all rows, (batch, heads, q_len), or the largest squared norms, (2, spans, batch, heads).
    """
    return _pooled_sample(sums, bounds, rows, weights, q_len, kv_len, span, scale, is_causal)


def _pooled_sample(
    sums: Tensor,
    bounds: Tensor,
    rows: Tensor,
    weights: Tensor,
    q_len: int,
    kv_len: int,
    span: int,
    scale: float,
    is_causal: bool,
) -> Tensor:
    from attnscale.measure.cuda import triton

    kind = "sampled", sums.shape, *layout_of(bounds), *layout_of(rows), q_len, kv_len, span, is_causal
    return triton.finish_sampled(sums, bounds, rows, weights, q_len, kv_len, span, scale, is_causal, BOUND_SLACK, kind)


@pooled_sample.register_kernel("cpu")
def _pooled_sample_cpu(
    sums: Tensor,
    bounds: Tensor,
    rows: Tensor,
    weights: Tensor,
    q_len: int,
    kv_len: int,
    span: int,
    scale: float,
    is_causal: bool,
) -> Tensor:
    visible = Visibility.of(None, is_causal).counts_at(rows.long(), kv_len).unsqueeze(1)
    begins = torch.arange(sums.shape[1]).mul_(span).view(-1, 1, 1, 1)
    shown = (visible - begins).clamp(min=0, max=span)
    found = RowSums(shown.expand_as(sums[0]), *sums.double(), first=torch.full_like(sums[0], -torch.inf)).over_shards()
    if bounds.dim() == 3:
        highest = bounds.amax((0, 2)).double()
        highest = highest + BOUND_SLACK * highest.abs().clamp(min=1.0)
    else:
        queries, keys = bounds.double().amax(1).sqrt()
        highest = (abs(scale) * (1 + BOUND_SLACK) * queries * keys).amax(0)
    each = torch.arange(rows.shape[1])
    return table_of_rows(found, highest, Sample(rows, each, weights))  # every row a stratum of its own


@pooled_sample.register_fake
def _pooled_sample_fake(
    sums: Tensor,
    bounds: Tensor,
    rows: Tensor,
    weights: Tensor,
    q_len: int,
    kv_len: int,
    span: int,
    scale: float,
    is_causal: bool,
) -> Tensor:
    return sums.new_empty((sums.shape[3], TABLE), dtype=torch.float64)


def _no_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*([output] if isinstance(output, Tensor) else output))


score_rows.register_autograd(lambda ctx, *gradients: (None,) * 6, setup_context=_no_gradient)
sample_rows.register_autograd(lambda ctx, *gradients: (None,) * 6, setup_context=_no_gradient)
pooled_rows.register_autograd(lambda ctx, *gradients: (None,) * 3, setup_context=_no_gradient)
pooled_sample.register_autograd(lambda ctx, *gradients: (None,) * 9, setup_context=_no_gradient)


def measured_rows(query: Tensor, key: Tensor, rows: Tensor | None, scale: float, is_causal: bool) -> RowSums:
    """The sums of every row, or of those at these positions, in plain torch."""
    return measure_rows(Call(query, key, key, Visibility.of(None, is_causal), 0.0, scale, None), rows)


def _stacked(rows: RowSums) -> Tensor:
    return torch.stack([getattr(rows, name).to(rows.max.dtype) for name in SCORED])


def table_of_rows(rows: RowSums, bound: Tensor | None = None, sample: Sample | None = None) -> Tensor:
    """The table of the heads that have these rows."""
    return table_of(pool_rows(rows, bound, sample, errors=False))


def empty_wide(query: Tensor, *shape: int) -> Tensor:
    """A tensor to be filled, of float32 at least."""
    return query.new_empty(shape, dtype=wide_dtype(query))
