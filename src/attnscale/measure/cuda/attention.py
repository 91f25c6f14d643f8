"""Plain attention with its statistics on a CUDA device: exact ones from the kernel that attends, or of a few rows.

To autograd, compilers and CUDA graphs, attention with exact statistics is one operator. An operator costs the host as
much as the kernels behind it, so they are launched directly where no compiler and no mode is active.
"""

from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.attending.running import run
from attnscale.measure.cuda.layout import (
    Layout,
    capturing,
    is_intercepted,
    kernels_take,
    key_span,
    layout_key,
    on_hopper,
)
from attnscale.measure.cuda.sampled import SampledRows, measure_rows, own_logits
from attnscale.measure.cuda.sdpa import (
    Packing,
    Pass,
    attend_with_lse,
    attention_gradients,
    attention_rows_backward,
    is_cast,
    packed_gradients,
)
from attnscale.measure.lengths import max_bound
from attnscale.measure.pooled import TABLE, Table
from attnscale.measure.sampling import Sample, design
from attnscale.measure.stats import ScoreStats
from attnscale.visibility import Visibility

ENOUGH_PROGRAMS = 100  # of a decoding step, a program a key head; fewer leave most of a GPU idle


class KernelChoice(Enum):
    """Kernels that compute an attention with exact statistics."""

    HOPPER = "hopper"
    TRITON = "triton"
    DECODING = "decoding"  # one query: the heads that share keys are the rows of one tile


class Attended(NamedTuple):
    """Result of an attention with exact statistics."""

    output: Tensor
    lse: Tensor
    table: Tensor  # the statistics of the heads


def measures(call: Call) -> bool:
    """Return True if the kernels without masks can be launched on this call."""
    return _is_plain(call) and not is_intercepted(call.query, call.key)


def _is_plain(call: Call) -> bool:
    return call.visibility.is_plain and call.softcap is None and kernels_take(call)


def attends(call: Call) -> bool:
    """Return True if one kernel gives the output too; one query of few heads would leave most of a GPU idle."""
    is_whole = call.dropout_p == 0.0 and call.value.shape[-1] == call.query.shape[-1] and call.sinks is None
    if not is_whole or not _is_plain(call) or not takes_as_given(call):
        return False
    programs = call.key.shape[0] * call.key.shape[1]
    return call.query.shape[2] > 1 or call.visibility.is_causal or programs >= ENOUGH_PROGRAMS


def takes_as_given(call: Call) -> bool:
    """Return True if the kernels would get the tensors as they are: one dtype, and autocast has nothing to cast."""
    return call.query.dtype == call.key.dtype == call.value.dtype and not is_cast(call)


def attend(call: Call) -> tuple[Tensor, ScoreStats]:
    """Return the output with its gradient, and the exact statistics of every row."""
    given = call.query, call.key, call.value, call.scale, call.visibility.is_causal
    if is_intercepted(call.query, call.key, call.value):
        output, _, table = attention_rows(*given)
        return output, ScoreStats(call.query.shape[1], exact=True, pool=Table(table))
    return attend_planned(call.scale, call.visibility.is_causal, None, *given[:3])


def attend_planned(
    scale: float,
    is_causal: bool,
    choice: KernelChoice | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing | None = None,
) -> tuple[Tensor, ScoreStats]:
    """Return the same without the operator, where the kernel was chosen for tensors of these layouts."""
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        output, table = _Attention.apply(query, key, value, scale, is_causal, packing)  # type: ignore[no-untyped-call]
    else:
        output, _, table = _attended(query, key, value, scale, is_causal, choice, packing)
    return output, ScoreStats(query.shape[1], exact=True, pool=Table(table))


def attend_sampling(call: Call, rows: int) -> tuple[Tensor, ScoreStats]:
    """Return the output of attention(), bit for bit, and statistics of about this many rows a head."""
    batch, _, q_len, _ = call.query.shape
    planned = design(rows, q_len, batch, call.visibility.is_causal)
    if planned is None:
        return attend(call) if attends(call) else (run(call), measure(call, None))
    output, lse = attend_with_lse(call)
    with torch.no_grad():  # the lse bounds the rows that are not looked at, and costs nothing
        bounds = max_bound(call) if lse is None else lse.detach()
        return output, measure_rows(call, planned, bounds).stats(capturing())


def sample_planned(
    rows: int, dropout_p: float, scale: float, is_causal: bool, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ScoreStats]:
    """Return the same for tensors laid out like some that attend_sampling() has taken."""
    return attend_sampling(Call(query, key, value, Visibility.of(None, is_causal), dropout_p, scale, None), rows)


def measure(call: Call, rows: int | None) -> ScoreStats:
    """Measure every row, or about this many a head."""
    from attnscale.measure.cuda import finish  # not before: a CPU may have no triton
    from attnscale.measure.cuda import rows as every_row

    (batch, heads, q_len, _), kv_len, is_causal = call.query.shape, call.key.shape[2], call.visibility.is_causal
    planned = None if rows is None else design(rows, q_len, batch, is_causal)
    with torch.no_grad():
        if planned is not None:
            return measure_rows(call, planned, max_bound(call)).stats(capturing())
        sinks = own_logits(call.sinks)
        if q_len == 1:
            return _measure_one_query(call.query, call.key[:, :, :1] if is_causal else call.key, call.scale, sinks)
        sums = every_row.score_rows(call.query, call.key, call.scale, is_causal)
        table = finish.finish_rows(sums, kv_len, is_causal, sinks)
    return ScoreStats(heads, exact=True, pool=Table(table), refreshed=capturing())


def _measure_one_query(query: Tensor, key: Tensor, scale: float, sinks: Tensor | None) -> ScoreStats:
    """Measure a query over spans of keys that fill a GPU."""
    from attnscale.measure.cuda import finish, sampled_rows

    queries, kv_len = _heads_as_rows(query, key), key.shape[2]
    batch, _, group, _ = queries.shape
    every = torch.arange(group, dtype=torch.int32, device=query.device).repeat(batch, 1)
    weight, span = torch.ones(1, dtype=torch.float64, device=query.device), key_span(queries, key)
    sums = sampled_rows.sample_rows(queries, key, every, scale, False, span)
    sums = sums.view(*sums.shape[:3], query.shape[1], 1)
    table = finish.finish_sampled(sums, None, every, weight, kv_len, span, False, sinks)
    sample = Sample(every[:, :1], every[0, :1], every[0, :1] + 1)
    return SampledRows(sample, sums, table, span, kv_len, False, sinks).stats(capturing(), exact=True)


def choice_of(query: Tensor, key: Tensor, value: Tensor, is_packed: bool = False) -> KernelChoice:
    """Return the kernels that attend with these tensors."""
    return _choice(layout_key(query), layout_key(key), layout_key(value), is_packed)


@lru_cache(maxsize=4096)
def _choice(query: Layout, key: Layout, value: Layout, is_packed: bool) -> KernelChoice:
    (_, _, q_len, _), *_, device, _ = query
    if q_len == 1 and not is_packed:
        return KernelChoice.DECODING
    if on_hopper(device):
        from attnscale.measure.cuda import hopper  # not before it is needed: a CPU may have no triton

        if hopper.takes(query, key, value):
            return KernelChoice.HOPPER
    return KernelChoice.TRITON


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    is_causal: bool,
    choice: KernelChoice | None = None,
    packing: Packing | None = None,
) -> Attended:
    """Return softmax(scale · QKᵀ) V, the lse, and the table of the heads."""
    from attnscale.measure.cuda import finish, rows  # not before it is needed: a CPU may have no triton

    choice = choice or choice_of(query, key, value, packing is not None)
    starts = None if packing is None else packing.starts
    if choice is KernelChoice.HOPPER:
        from attnscale.measure.cuda import hopper

        output, lse, sums = hopper.attend_rows(query, key, value, scale, is_causal, starts)
    elif choice is KernelChoice.TRITON:
        output, lse, sums = rows.attend_rows(query, key, value, scale, is_causal, starts)
    else:
        if is_causal:  # the query sees the first key alone
            key, value = key[:, :, :1], value[:, :, :1]
        output, lse, sums = rows.attend_rows(_heads_as_rows(query, key), key, value, scale, False)
        output, lse = output.view(query.shape), lse.view(query.shape[:3])
        sums = sums.view(-1, *query.shape[:3])
    return Attended(output, lse, finish.finish_rows(sums, key.shape[2], is_causal and packing is None))


def _heads_as_rows(query: Tensor, key: Tensor) -> Tensor:
    """Return one query of each head as rows: the heads that share a key head see the same keys."""
    batch, heads, _, head_dim = query.shape
    return query.reshape(batch, key.shape[1], heads // key.shape[1], head_dim)


class _Attention(torch.autograd.Function):
    """The operator without its dispatch."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool, packing: Packing | None
    ) -> Any:
        output, lse, table = _attended(query, key, value, scale, is_causal, packing=packing)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.mark_non_differentiable(table)
        ctx.scale, ctx.is_causal, ctx.packing = scale, is_causal, packing
        return output, table

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        back = Pass(grad, query, key, value, output, lse, ctx.scale, ctx.is_causal)
        gradients = attention_gradients(back) if ctx.packing is None else packed_gradients(back, ctx.packing)
        return *gradients, None, None, None


@torch.library.custom_op("attnscale::attention_rows", mutates_args=(), device_types="cuda")
def attention_rows(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return softmax(scale · QKᵀ) V; without gradient the lse of each row, and the table of the heads."""
    return tuple(_attended(query, key, value, scale, is_causal))  # type: ignore[return-value]


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
