"""Attention with its statistics on a CUDA device: exact statistics from the attention kernel, or sampled rows.

To autograd, compilers and CUDA graphs, attention with exact statistics is one operator. An operator costs the host as
much as the kernels behind it, so they are launched directly where no compiler and no mode is active.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.attending.ragged import Ragged, as_one_row
from attnscale.attending.running import run
from attnscale.measure.cuda.launch import (
    Layout,
    capturing,
    is_intercepted,
    kernels_take,
    layout_key,
    on_hopper,
    positive_scale,
    unit_stride,
)
from attnscale.measure.cuda.sampled import heads_as_rows, measure, measure_rows, own_sinks
from attnscale.measure.cuda.sdpa import (
    Pass,
    attend_with_lse,
    attention_gradients,
    attention_rows_backward,
    has_one_dtype,
    packed_gradients,
)
from attnscale.measure.lengths import max_bound
from attnscale.measure.pooled import TABLE, Table
from attnscale.measure.sampling import design
from attnscale.measure.stats import ScoreStats
from attnscale.numerics import HALF_DTYPES
from attnscale.torch_internals import sequences_backward
from attnscale.visibility import Visibility

BACKWARD_WIDTH = 8  # torch's backward of packed sequences needs head dimensions that are multiples of this
ENOUGH_PROGRAMS = 100  # in a decoding step, with one program for each key head; fewer leave most of a GPU idle


Rows = tuple[Tensor, Tensor, Tensor]
"""Output, lse and sums of every row."""
Kernel = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Rows]


def measures(call: Call) -> bool:
    """Return True if the kernels without masks can be launched on this call."""
    return _is_plain(call) and not is_intercepted(call.query, call.key)


def _is_plain(call: Call) -> bool:
    return call.visibility.is_plain and call.softcap is None and kernels_take(call)


def attends(call: Call) -> bool:
    """Return True if one kernel computes the output too; one query of few heads would leave most of a GPU idle."""
    is_whole = call.dropout_p == 0.0 and call.sinks is None and call.value.shape[-1] == call.query.shape[-1]
    if not is_whole or not _is_plain(call) or not has_one_dtype(call):
        return False
    programs = call.key.shape[0] * call.key.shape[1]
    return call.query.shape[2] > 1 or call.visibility.is_causal or programs >= ENOUGH_PROGRAMS


def attend(call: Call) -> tuple[Tensor, ScoreStats]:
    """Return the output with its gradient, and the exact statistics of every row."""
    given, is_causal = (call.query, call.key, call.value), call.visibility.is_causal
    if is_intercepted(*given):
        output, _, table = attention_rows(*given, call.scale, is_causal)
        return output, ScoreStats(call.query.shape[1], exact=True, pool=Table(table))
    return attend_directly(kernel_for(*given, call.scale, is_causal), call.scale, is_causal, *given)


def attend_directly(
    kernel: Kernel,
    scale: float,
    is_causal: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None = None,
    longest: int = 0,
) -> tuple[Tensor, ScoreStats]:
    """Compute attend() without the operator, by a kernel for these layouts.

    `starts`: where packed sequences begin and the last one ends; `longest` of them is what a backward asks for.
    """
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        output, table = _Attention.apply(query, key, value, kernel, scale, is_causal, starts, longest)  # type: ignore[no-untyped-call]
    else:
        output, _, table = _attended(query, key, value, kernel, scale, starts)
    return output, ScoreStats(query.shape[1], exact=True, pool=Table(table))


def attend_sampling(call: Call, rows: int) -> tuple[Tensor, ScoreStats]:
    """Return the output of attention(), bit-identical, and statistics of about this many rows for each head."""
    batch, _, q_len, _ = call.query.shape
    planned = design(rows, q_len, batch, call.visibility.is_causal)
    if planned is None:
        return attend(call) if attends(call) else (run(call), measure(call, None))
    output, lse = attend_with_lse(call)
    with torch.no_grad():  # the lse bounds the scores of rows that are not sampled, at no cost
        bounds = max_bound(call) if lse is None else lse.detach().amax((0, 2))
        return output, measure_rows(call, planned, bounds).stats


def sample_directly(
    rows: int, dropout_p: float, scale: float, is_causal: bool, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ScoreStats]:
    """Compute attend_sampling() for tensors with a layout that it has accepted before."""
    return attend_sampling(Call(query, key, value, Visibility.of(None, is_causal), dropout_p, scale, None), rows)


def kernel_for(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool, in_sequences: bool = False
) -> Kernel:
    """Return the kernel for tensors with these layouts."""
    if scale <= 0.0 or not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        return partial(_attend_prepared, is_causal)
    return _kernel_for(layout_key(query), layout_key(key), layout_key(value), is_causal, in_sequences)


def _attend_prepared(
    is_causal: bool, query: Tensor, key: Tensor, value: Tensor, scale: float, starts: Tensor | None
) -> Rows:
    """Attend with a positive scale and contiguous heads, which the kernels require."""
    query, scale = positive_scale(query, scale)
    query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
    return kernel_for(query, key, value, scale, is_causal, starts is not None)(query, key, value, scale, starts)


@lru_cache(maxsize=4096)
def _kernel_for(query: Layout, key: Layout, value: Layout, is_causal: bool, in_sequences: bool) -> Kernel:
    """Return the kernel for these layouts. This is the only cache between a call and a launch."""
    from attnscale.measure.cuda import rows  # imported when needed: a CPU may have no triton

    (_, _, q_len, _), *_, device, _ = query
    if q_len == 1 and not in_sequences:
        return partial(_attend_one_query, is_causal)
    if on_hopper(device):
        from attnscale.measure.cuda import hopper

        if hopper.takes(query, key, value):
            return hopper.Attention(query, key, value, is_causal, in_sequences)
    return partial(rows.attend_rows, is_causal=is_causal)


def _attend_one_query(
    is_causal: bool, query: Tensor, key: Tensor, value: Tensor, scale: float, _: Tensor | None
) -> Rows:
    """Attend with one query: heads that share keys form the rows of one tile."""
    from attnscale.measure.cuda import rows

    if is_causal:  # the query sees only the first key
        key, value = key[:, :, :1], value[:, :, :1]
    output, lse, sums = rows.attend_rows(heads_as_rows(query, key), key, value, scale)
    return output.view(query.shape), lse.view(query.shape[:3]), sums.view(-1, *query.shape[:3])


def _attended(
    query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, scale: float, starts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return softmax(scale · QKᵀ) V, the lse, and the table of the heads."""
    from attnscale.measure.cuda.finish import finish  # imported when needed: a CPU may have no triton

    output, lse, sums = kernel(query, key, value, scale, starts)
    return output, lse, finish(sums.unsqueeze(1))


def measures_sequences(ragged: Ragged) -> bool:
    """Return True if the kernels support this: queries and keys at the same positions, and at most a causal mask."""
    row, seen = ragged.row, ragged.row.visibility
    plain = seen.mask is None and seen.documents is None and seen.first is None and seen.last in (None, 0)
    if not plain or row.softcap is not None or not kernels_take(row) or is_intercepted(row.query, row.key, row.value):
        return False
    return ragged.rows.count > 0 and ragged.rows.equals(ragged.keys)


def attends_to_sequences(ragged: Ragged) -> bool:
    """Return True if one kernel computes the output too, and torch has a backward for it."""
    row, head_dim = ragged.row, ragged.row.query.shape[-1]
    is_whole = row.dropout_p == 0.0 and row.sinks is None and row.value.shape[-1] == head_dim
    if not is_whole or not has_one_dtype(row) or not measures_sequences(ragged):
        return False
    has_backward = row.query.dtype in HALF_DTYPES and head_dim % BACKWARD_WIDTH == 0
    return not _learns(ragged) or (has_backward and sequences_backward() is not None)


def attends_to_sequences_for_less(ragged: Ragged) -> bool:
    """Return True on Hopper, where exact statistics with the output cost less than torch's kernel plus sampling."""
    row = ragged.row
    if not attends_to_sequences(ragged) or not on_hopper(row.query.device.index):
        return False
    from attnscale.measure.cuda import hopper

    return hopper.takes(layout_key(row.query), layout_key(row.key), layout_key(row.value))


def attend_to_sequences(ragged: Ragged) -> tuple[Tensor, ScoreStats]:
    """Return the output of every sequence, (1, heads, total, head_dim), with its gradient, and their statistics."""
    row, longest = ragged.row, ragged.rows.longest if _learns(ragged) else 0
    given, is_causal = (row.query, row.key, row.value), row.visibility.last == 0
    kernel = kernel_for(*given, row.scale, is_causal, in_sequences=True)
    output, stats = attend_directly(kernel, row.scale, is_causal, *given, ragged.rows.offsets, longest)
    return as_one_row(output), stats


def measure_sequences(ragged: Ragged) -> ScoreStats:
    """Measure every row without the output."""
    from attnscale.measure.cuda import finish, rows  # imported when needed: a CPU may have no triton

    row = ragged.row
    with torch.no_grad():
        sums = rows.score_rows(row.query, row.key, row.scale, row.visibility.last == 0, ragged.rows.offsets)
        table = finish.finish(sums.unsqueeze(1), sinks=own_sinks(row))
    return ScoreStats(row.query.shape[1], exact=True, pool=Table(table), refreshed=capturing())


def _learns(ragged: Ragged) -> bool:
    row = ragged.row
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (row.query, row.key, row.value))


class _Attention(torch.autograd.Function):
    """Implementation of the operator."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kernel: Kernel,
        scale: float,
        is_causal: bool,
        starts: Tensor | None,
        longest: int,
    ) -> Any:
        output, lse, table = _attended(query, key, value, kernel, scale, starts)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.mark_non_differentiable(table)
        ctx.scale, ctx.is_causal, ctx.starts, ctx.longest = scale, is_causal, starts, longest
        return output, table

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        back = Pass(grad, query, key, value, output, lse, ctx.scale, ctx.is_causal)
        if ctx.starts is None:
            return *attention_gradients(back), *(None,) * 5
        return *packed_gradients(back, ctx.starts, ctx.longest), *(None,) * 5


@torch.library.custom_op("attnscale::attention_rows", mutates_args=(), device_types="cuda")
def attention_rows(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return softmax(scale · QKᵀ) V and, without gradients, the lse of each row and the table of the heads."""
    return _attended(query, key, value, kernel_for(query, key, value, scale, is_causal), scale)


@attention_rows.register_fake
def _attention_rows_fake(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    table = query.new_empty((query.shape[1], TABLE), dtype=torch.float64)
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32), table


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float, bool], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, ctx.scale, ctx.is_causal = inputs
    result, lse, table = output
    ctx.mark_non_differentiable(lse, table)
    ctx.save_for_backward(query, key, value, result, lse)


def _backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    return *attention_rows_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.is_causal), None, None


attention_rows.register_autograd(_backward, setup_context=_save)
