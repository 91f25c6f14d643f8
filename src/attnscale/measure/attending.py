"""Attention with exact statistics from one pass over the scores: by a fused kernel, or in blocks of rows on a CPU.

Autograd, compilers, dispatch modes and CUDA graphs see one operator. An operator costs the host as much as the kernels
that it launches, so kernels are launched directly if no compiler and no mode is active.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.attending.running import run
from attnscale.measure.cuda.launch import (
    Layout,
    is_intercepted,
    kernels_take,
    layout_key,
    on_hopper,
    positive_scale,
    unit_stride,
)
from attnscale.measure.cuda.sampled import heads_as_rows, measure_rows
from attnscale.measure.cuda.sdpa import (
    Pass,
    attend_with_lse,
    attention_gradients,
    attention_rows_backward,
    has_one_dtype,
    packed_gradients,
)
from attnscale.measure.lengths import max_bound
from attnscale.measure.measuring import call_of, measure, options_of
from attnscale.measure.pooled import TABLE, Pooled, Table, pack, pool_rows
from attnscale.measure.row_blocks import measure_rows as measure_in_blocks
from attnscale.measure.sampling import design
from attnscale.measure.stats import ScoreStats
from attnscale.numerics import without_autocast
from attnscale.torch_internals import in_transform, unseen
from attnscale.visibility import Visibility

ENOUGH_PROGRAMS = 100  # in a decoding step, which has one program per key head; fewer leave most of a GPU idle

Kernel = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], tuple[Tensor, Tensor, Tensor]]
"""Function of query, key, value, scale and starts of sequences that returns output, lse and sums of every row."""
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Callable[[], Pooled]]]
"""Function of query, key, value and starts of sequences that returns output, lse and statistics."""


def attends(call: Call) -> bool:
    """Return True if one pass gives both the output and the statistics of every row."""
    if call.dropout_p > 0.0 or not has_one_dtype(call):
        return False
    return _attends_on_gpu(call) if call.query.is_cuda else _attends_on_cpu(call)


def _attends_on_gpu(call: Call) -> bool:
    """Return True if a fused kernel supports the call; one query of few heads would leave most of a GPU idle."""
    if call.sinks is not None or call.value.shape[-1] != call.query.shape[-1] or not takes_plain(call):
        return False
    programs = call.key.shape[0] * call.key.shape[1]
    return call.query.shape[2] > 1 or call.visibility.is_causal or programs >= ENOUGH_PROGRAMS


def _attends_on_cpu(call: Call) -> bool:
    query, key, value = call.query, call.key, call.value
    if query.device.type != "cpu" or unseen(query) or in_transform() or torch.is_autocast_enabled("cpu"):
        return False
    if call.visibility.hides_by_numbers:  # a row whose keys are all hidden by numbers still has weights
        return False
    return not _learns(query, key, value, call.sinks, call.visibility.mask) or (
        call.visibility.is_plain
        and call.softcap is None
        and call.sinks is None
        and min(query.numel(), value.numel()) > 0
        and query.shape[-1] == value.shape[-1]
        and torch.backends.cuda.flash_sdp_enabled()  # users select SDPA's math backend for second derivatives
    )


def takes_plain(call: Call) -> bool:
    """Return True if the GPU kernels without masks support the call."""
    return call.visibility.is_plain and call.softcap is None and kernels_take(call)


def _learns(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def attend_or_measure(call: Call, rows: int | None) -> tuple[Tensor, ScoreStats]:
    """Return the output, and statistics of every row or of about `rows` rows: from one pass if possible."""
    if rows is None and attends(call):
        return attend(call)
    output = run(call)
    with torch.no_grad(), without_autocast(call.query):
        return output, measure(call, rows)


def attend(call: Call) -> tuple[Tensor, ScoreStats]:
    """Return the output with its gradient, and the exact statistics of every row."""
    given, seen = (call.query, call.key, call.value), call.visibility
    if is_intercepted(*given):
        output, _, table = attention_rows(*given, call.scale, seen.is_causal, *options_of(call))
        return output, ScoreStats(call.query.shape[1], exact=True, pool=Table(table))
    return attend_directly(attend_for(call), call.scale, seen.is_causal, *given)


def attend_directly(
    attend: Attend,
    scale: float,
    is_causal: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None = None,
    longest: int = 0,
) -> tuple[Tensor, ScoreStats]:
    """Compute attend() without the operator.

    `starts` holds the start of each packed sequence and the end of the last one; a backward needs the `longest` length.
    """
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        output, pool = _Attention.apply(query, key, value, attend, scale, is_causal, starts, longest)  # type: ignore[no-untyped-call]
    else:
        output, _, pool = attend(query, key, value, starts)
    return output, ScoreStats(query.shape[1], exact=True, pool=pool)


def attend_for(call: Call, in_sequences: bool = False) -> Attend:
    """Return the function that attends to tensors with the layouts of this call."""
    if not call.query.is_cuda:
        return partial(_attend_in_blocks, call)
    from attnscale.measure.cuda.finish import finish  # imported when needed: a CPU may have no triton

    given, is_causal = (call.query, call.key, call.value), call.visibility.last == 0
    return partial(_attend_by_kernel, kernel_for(*given, call.scale, is_causal, in_sequences), finish, call.scale)


def _attend_in_blocks(call: Call, *_: Tensor | None) -> tuple[Tensor, Tensor, Callable[[], Pooled]]:
    shape = *call.query.shape[:-1], call.value.shape[-1]
    output = torch.empty(shape, dtype=torch.promote_types(call.query.dtype, torch.float32))
    rows = measure_in_blocks(call, output=output)
    lse = rows.lse
    if call.sinks is not None:
        rows = rows.with_sinks(call.sinks)
        assert rows.learned_sink is not None
        output.mul_(torch.where(rows.visible > 0, 1.0 - rows.learned_sink, 0.0).unsqueeze(-1))
    return output.to(call.query.dtype), lse, partial(pool_rows, rows)


def _attend_by_kernel(
    kernel: Kernel,
    finish: Callable[[Tensor], Tensor],
    scale: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Table]:
    output, lse, sums = kernel(query, key, value, scale, starts)
    return output, lse, Table(finish(sums.unsqueeze(1)))


def attend_sampling(
    rows: int, dropout_p: float, scale: float, is_causal: bool, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ScoreStats]:
    """Return the output of attention(), bit-identical, and statistics of about this many rows for each head."""
    call = Call(query, key, value, Visibility.of(None, is_causal), dropout_p, scale, None)
    planned = design(rows, query.shape[2], query.shape[0], is_causal)
    if planned is None:
        return attend_or_measure(call, None)
    output, lse = attend_with_lse(call)
    with torch.no_grad():  # the lse bounds the scores of rows that are not sampled, at no cost
        bounds = max_bound(call) if lse is None else lse.detach().amax((0, 2))
        return output, measure_rows(call, planned, bounds).stats


def kernel_for(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool, in_sequences: bool = False
) -> Kernel:
    """Return the kernel for tensors with these layouts."""
    if scale <= 0.0 or not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        return partial(_attend_prepared, is_causal)
    return _kernel_for(layout_key(query), layout_key(key), layout_key(value), is_causal, in_sequences)


def _attend_prepared(
    is_causal: bool, query: Tensor, key: Tensor, value: Tensor, scale: float, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend with one query: heads that share keys form the rows of one tile."""
    from attnscale.measure.cuda import rows

    if is_causal:  # the query sees only the first key
        key, value = key[:, :, :1], value[:, :, :1]
    output, lse, sums = rows.attend_rows(heads_as_rows(query, key), key, value, scale)
    return output.view(query.shape), lse.view(query.shape[:3]), sums.view(-1, *query.shape[:3])


class _Attention(torch.autograd.Function):
    """Attention whose backward is torch's fused kernel, started from the lse of our pass."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attend: Attend,
        scale: float,
        is_causal: bool,
        starts: Tensor | None,
        longest: int,
    ) -> Any:
        output, lse, pool = attend(query, key, value, starts)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.scale, ctx.is_causal, ctx.starts, ctx.longest = scale, is_causal, starts, longest
        return output, pool

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        back = Pass(grad, query, key, value, output, lse, ctx.scale, ctx.is_causal)
        packed = ctx.starts is not None
        gradients = packed_gradients(back, ctx.starts, ctx.longest) if packed else attention_gradients(back)
        return *gradients, *(None,) * 5


@torch.library.custom_op("attnscale::attention_rows", mutates_args=())
def attention_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    is_causal: bool,
    mask: Tensor | None = None,
    documents_q: Tensor | None = None,
    documents_k: Tensor | None = None,
    last: int | None = None,
    first: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return softmax(scale · QKᵀ) V and, without gradients, the lse of each row and the table of the heads.

    The arguments after `is_causal` are for a CPU.
    """
    last = 0 if is_causal else last
    call = call_of(query, key, value, scale, mask, documents_q, documents_k, last, first, softcap, sinks)
    output, lse, pool = attend_for(call)(query, key, value, None)
    return output, lse, pool.columns if isinstance(pool, Table) else pack(pool(), errors=False)


@attention_rows.register_fake
def _attention_rows_fake(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    table = query.new_empty((query.shape[1], TABLE), dtype=torch.float64)
    output = query.new_empty((*query.shape[:3], value.shape[3]))
    return output, query.new_empty(query.shape[:3], dtype=torch.float32), table


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, ctx.scale, ctx.is_causal, *_ = inputs
    result, lse, table = output
    ctx.mark_non_differentiable(lse, table)
    ctx.save_for_backward(query, key, value, result, lse)


def _backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    return *attention_rows_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.is_causal), *(None,) * 9


attention_rows.register_autograd(_backward, setup_context=_save)
