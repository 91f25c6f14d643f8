"""The statistics of an attention as an operator: for graphs, and for transforms that map over batches."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.attending.call_op import SCORES, arguments_of, call_of
from attnscale.attending.gradients import gradients_of
from attnscale.attending.mapping import entry_by_entry
from attnscale.measure.cpu import attention as on_cpu
from attnscale.measure.cuda.backward import attention_rows_backward
from attnscale.measure.measuring import looks_at_all, measured
from attnscale.measure.pool import pool_rows
from attnscale.measure.pooled import SUMS, TABLE, Table
from attnscale.measure.stats import ScoreStats, table_of
from attnscale.measure.uncertainty import Uncertainty, packed_size
from attnscale.numerics import wide_dtype
from attnscale.torch_internals import unseen

Attended = tuple[Tensor, Tensor, Tensor]


def attends_unseen(call: Call) -> bool:
    """Whether one pass gives the output too, as far as a graph knows: a mask of numbers would be looked at.

    Where a mask of booleans learns nothing but its tensors do, SDPA has the faster backward.
    """
    seen = call.visibility
    if not unseen(call.query) or seen.bias is not None or not on_cpu.takes(call):
        return False
    return not on_cpu.learns(call) or call.softcap is not None or not seen.is_mask


def attend_unseen(call: Call) -> tuple[Tensor, ScoreStats]:
    """The output with its gradient, and the statistics of every row."""
    output, _, table = attended_rows(call.query, call.key, call.value, *arguments_of(call))
    return output, ScoreStats(call.query.shape[1], exact=True, pool=Table(table))


def measure_unseen(call: Call, rows: int | None, sinks: Tensor | None = None) -> ScoreStats:
    """The statistics of every row, or of about this many a head."""
    table, errors = measured_scores(call.query.detach(), call.key.detach(), *arguments_of(call), rows, sinks)
    exact = rows is None or looks_at_all(call, rows)
    known = Table(table, None if exact else partial(Uncertainty.unpacked, errors, len(SUMS)))
    return ScoreStats(call.query.shape[1], exact=exact, pool=known)


@torch.library.custom_op(
    "attnscale::measured_scores",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, {SCORES}, SymInt? rows, Tensor? sinks) -> (Tensor, Tensor)",
)
def measured_scores(query: Tensor, key: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """The table of the heads; how far it may be off where some rows stand for all."""
    *options, rows, sinks = given
    stats = measured(call_of(query, key, key, *options), rows, sinks=sinks)
    errors = stats.pooled.uncertainty
    width = packed_size(len(SUMS)) if rows is not None else 0
    nothing = stats.pooled.sums.new_zeros(stats.heads, width)
    return table_of(stats.pooled), nothing if errors is None else errors.packed()


@measured_scores.register_fake
def _measured_scores_fake(query: Tensor, key: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    widths = TABLE, packed_size(len(SUMS)) if given[-2] is not None else 0
    table, errors = (query.new_empty(query.shape[1], width, dtype=torch.float64) for width in widths)
    return table, errors


entry_by_entry(measured_scores)


@torch.library.custom_op(
    "attnscale::attended_rows",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {SCORES}) -> (Tensor, Tensor, Tensor)",
)
def attended_rows(*given: Any) -> Attended:
    """The output; the lse of each row, and the table of the heads."""
    output, rows = on_cpu.attended(call_of(*given))
    return output.contiguous(), rows.lse.contiguous(), table_of(pool_rows(rows))


@attended_rows.register_fake
def _attended_rows_fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Attended:
    table = query.new_empty(query.shape[1], TABLE, dtype=torch.float64)
    lse = query.new_empty(query.shape[:3], dtype=wide_dtype(query))
    return query.new_empty(*query.shape[:3], value.shape[-1]), lse, table


@torch.library.custom_op(
    "attnscale::attended_rows_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor query, Tensor key, Tensor value, {SCORES}) -> (Tensor, Tensor, Tensor)",
)
def attended_rows_backward(grad: Tensor, *given: Any) -> Attended:
    """The gradients of query, key and value, from weights that are formed again."""
    found = gradients_of(call_of(*given), grad, None)
    of_query, of_key, of_value = (each.contiguous() for each in found)
    return of_query, of_key, of_value


@attended_rows_backward.register_fake
def _attended_rows_backward_fake(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Attended:
    of_query, of_key, of_value = (tensor.new_empty(tensor.shape) for tensor in (query, key, value))
    return of_query, of_key, of_value


def _save(ctx: Any, inputs: tuple[Any, ...], output: Attended) -> None:
    result, lse, table = output
    ctx.mark_non_differentiable(lse, table)
    ctx.settings = inputs[6:]
    ctx.save_for_backward(*inputs[:6], result, lse)


def _backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, result, lse = ctx.saved_tensors
    query, key, value, *_ = inputs
    call = call_of(*inputs, *ctx.settings)
    if on_cpu.has_backward(call):
        found = attention_rows_backward(grad, query, key, value, result, lse, call.scale, call.visibility.is_causal)
    else:
        found = attended_rows_backward(grad, *inputs, *ctx.settings)
    return *found, *[None] * (len(inputs) - 3 + len(ctx.settings))


attended_rows.register_autograd(_backward, setup_context=_save)
entry_by_entry(attended_rows)
entry_by_entry(attended_rows_backward)
