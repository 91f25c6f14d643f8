"""Plain attention with its statistics on a CUDA device: exact ones from the kernel that attends, or of a few rows.

To autograd, compilers and CUDA graphs, attention with exact statistics is one operator. An operator costs the host as
much as the kernels behind it, so they are launched directly where no compiler and no mode is active.
"""

from enum import Enum
from functools import cache, lru_cache, partial
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
from attnscale.measure.cuda.sampled import SampledRows, own_logits, sample_plain
from attnscale.measure.cuda.sdpa import attend_with_lse, attention_gradients, attention_rows_backward, is_cast
from attnscale.measure.pool import Unpooled
from attnscale.measure.pooled import TABLE, Table
from attnscale.measure.row_sums import RowSums
from attnscale.measure.sampling import Sample, design
from attnscale.measure.stats import ScoreStats
from attnscale.visibility import Visibility

ENOUGH_PROGRAMS = 100  # of a decoding step, a program a key head; fewer leave most of a GPU idle


class KernelChoice(Enum):
    """Kernels that compute an attention with exact statistics."""

    HOPPER = "hopper"
    TRITON = "triton"
    DECODING = "decoding"  # one query: the heads that share keys are the rows of one tile
    SPLIT_KEYS = "split keys"  # one query, few heads: torch's own kernel; statistics over spans of keys


class Attended(NamedTuple):
    """What the kernels return."""

    output: Tensor
    lse: Tensor
    table: Tensor  # the statistics of the heads


def measures(call: Call) -> bool:
    """Return True if the kernels without masks can be launched on this call."""
    return _is_plain(call) and not is_intercepted(call.query, call.key)


def _is_plain(call: Call) -> bool:
    return call.visibility.is_plain and call.softcap is None and kernels_take(call)


def attends(call: Call) -> bool:
    """Return True if one kernel gives the output too."""
    is_whole = call.dropout_p == 0.0 and call.value.shape[-1] == call.query.shape[-1]
    return is_whole and _is_plain(call) and takes_as_given(call)


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
    scale: float, is_causal: bool, choice: KernelChoice | None, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ScoreStats]:
    """Return the same without the operator, where the kernel was chosen for tensors of these layouts."""
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        output, table = _Attention.apply(query, key, value, scale, is_causal)  # type: ignore[no-untyped-call]
    else:
        output, _, table = _attended(query, key, value, scale, is_causal, choice)
    return output, ScoreStats(query.shape[1], exact=True, pool=Table(table))


def attend_sampling(call: Call, rows: int) -> tuple[Tensor, ScoreStats]:
    """Return the output of attention(), bit for bit, and statistics of about this many rows a head."""
    batch, _, q_len, _ = call.query.shape
    planned = design(rows, q_len, batch, call.visibility.is_causal)
    if planned is None:
        return attend(call) if attends(call) else (run(call), measure(call, None))
    output, lse = attend_with_lse(call)
    with torch.no_grad():
        return output, sample_plain(call, planned, None if lse is None else lse.detach())


def sample_planned(
    rows: int, dropout_p: float, scale: float, is_causal: bool, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ScoreStats]:
    """Return the same for tensors laid out like some that attend_sampling() has taken."""
    return attend_sampling(Call(query, key, value, Visibility.of(None, is_causal), dropout_p, scale, None), rows)


def measure(call: Call, rows: int | None, sinks: Tensor | None = None) -> ScoreStats:
    """Measure every row, or about this many a head; the sums of rows are kept, for who sees only some of the keys.

    `sinks`, (heads,), are learned logits that join the denominators.
    """
    (batch, heads, q_len, _), is_causal = call.query.shape, call.visibility.is_causal
    planned = None if rows is None else design(rows, q_len, batch, is_causal)
    with torch.no_grad():
        sinks = own_logits(sinks)
        if planned is not None:
            return sample_plain(call, planned, None, sinks)
        choice = _choice(layout_key(call.query), layout_key(call.key), None, is_causal)
        if choice is KernelChoice.SPLIT_KEYS:
            return _over_spans(call.query, call.key, call.scale, sinks).stats(capturing(), exact=True)
        from attnscale.measure.cuda import triton

        query, key, kv_len = call.query, call.key, call.key.shape[2]
        if choice is KernelChoice.DECODING:
            queries, key = _heads_as_rows(query, key), key[:, :, :1] if is_causal else key
            sums = triton.score_rows(queries, key, call.scale, False, cut=_decoding_tiles(queries))
            sums = sums.view(-1, batch, heads, 1)
        else:
            sums = triton.score_rows(query, key, call.scale, is_causal)
        table = triton.finish_rows(sums, kv_len, is_causal, sinks)
    pool = Unpooled(partial(_rows, sums, kv_len, is_causal), known=Table(table), sinks=sinks)
    return ScoreStats(heads, exact=True, pool=pool, refreshed=capturing())


def _rows(sums: Tensor, kv_len: int, is_causal: bool) -> RowSums:
    every = torch.arange(sums.shape[-1], device=sums.device)
    visible = Visibility.of(None, is_causal).counts_at(every, kv_len)
    return RowSums(visible.expand_as(sums[0]), *sums)


def choice_of(call: Call) -> KernelChoice:
    """Return the kernels that serve a call of attend()."""
    return _choice(layout_key(call.query), layout_key(call.key), layout_key(call.value), call.visibility.is_causal)


@lru_cache(maxsize=4096)
def _choice(query: Layout, key: Layout, value: Layout | None, is_causal: bool) -> KernelChoice:
    (batch, _, q_len, _), *_, device, _ = query
    if q_len == 1:
        is_enough = is_causal or batch * key[0][1] >= ENOUGH_PROGRAMS
        return KernelChoice.DECODING if is_enough else KernelChoice.SPLIT_KEYS
    if value is not None and on_hopper(device):
        from attnscale.measure.cuda import hopper  # not before it is needed: a CPU may have no triton

        if hopper.takes(query, key, value):
            return KernelChoice.HOPPER
    return KernelChoice.TRITON


def _attended(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool, choice: KernelChoice | None = None
) -> Attended:
    """Return softmax(scale · QKᵀ) V, the lse, and the table of the heads."""
    choice = choice or _choice(layout_key(query), layout_key(key), layout_key(value), is_causal)
    if choice is KernelChoice.SPLIT_KEYS:
        output, lse = attend_with_lse(Call(query, key, value, Visibility.of(None, False), 0.0, scale, None))
        if lse is not None:
            return Attended(output, lse.contiguous(), _over_spans(query, key, scale).table)
    from attnscale.measure.cuda import triton  # not before it is needed: a CPU may have none

    kv_len = key.shape[2]
    if choice is KernelChoice.HOPPER:
        from attnscale.measure.cuda import hopper

        output, lse, sums = hopper.attend_rows(query, key, value, scale, is_causal)
    elif choice is KernelChoice.TRITON:
        output, lse, sums = triton.attend_rows(query, key, value, scale, is_causal)
    else:
        batch, heads, _, head_dim = query.shape
        if is_causal:  # the query sees the first key alone
            key, value = key[:, :, :1], value[:, :, :1]
        rows = _heads_as_rows(query, key)
        output, lse, sums = triton.attend_rows(rows, key, value, scale, False, cut=_decoding_tiles(rows))
        output, lse = output.view(batch, heads, 1, head_dim), lse.view(batch, heads, 1)
        sums = sums.view(-1, batch, heads, 1)
    return Attended(output, lse, triton.finish_rows(sums, kv_len, is_causal))


def _heads_as_rows(query: Tensor, key: Tensor) -> Tensor:
    """Return one query of each head as rows: the heads that share a key head see the same keys."""
    batch, heads, _, head_dim = query.shape
    return query.reshape(batch, key.shape[1], heads // key.shape[1], head_dim)


def _decoding_tiles(query: Tensor) -> Any:
    from attnscale.measure.cuda import triton

    return triton.decoding_tiles(query.shape[-1], query.dtype, triton.capability(query.device.index))


def _over_spans(query: Tensor, key: Tensor, scale: float, sinks: Tensor | None = None) -> SampledRows:
    """Measure one query of few heads over spans of keys that fill a GPU."""
    from attnscale.measure.cuda import triton

    position, weight = _first_row(len(query), query.device)
    span, kv_len = key_span(query, key), key.shape[2]
    sums, norms = triton.sample_rows(query, key, position, scale, False, True, span)
    table = triton.finish_sampled(sums, norms, position, weight, 1, kv_len, span, scale, False, sinks)
    table[:, 4].copy_(table[:, 3])  # every row was looked at: the largest score is known
    return SampledRows(Sample(position, position[0], position[0] + 1), sums, table, span, kv_len, False, sinks)


@cache
def _first_row(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first position of every entry, and its weight: it stands for itself."""
    return torch.zeros(batch, 1, dtype=torch.int32, device=device), torch.ones(1, dtype=torch.float64, device=device)


class _Attention(torch.autograd.Function):
    """The operator without its dispatch."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> Any:
        output, lse, table = _attended(query, key, value, scale, is_causal)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.mark_non_differentiable(table)
        ctx.scale, ctx.is_causal = scale, is_causal
        return output, table

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        gradients = attention_gradients(grad, query, key, value, output, lse, ctx.scale, ctx.is_causal)
        return *gradients, None, None


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
