"""attention with its statistics as a torch operator: one call to autograd, to torch.compile and to CUDA graphs.

An operator costs the host as much as the kernels behind it. Where nobody looks on, neither a compiler nor a mode, the
kernels are launched directly.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnscale.measure.cuda.attended import Attended, attended
from attnscale.measure.cuda.backward import attention_gradients, attention_rows_backward
from attnscale.measure.cuda.row_ops import empty_wide, measured_rows, table_of_rows
from attnscale.measure.cuda.watched import looked_on
from attnscale.measure.cuda.ways import Way
from attnscale.measure.pooled import TABLE
from attnscale.numerics import wide_dtype


def attend_stats(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    """softmax(scale · QKᵀ) V with its gradient, and the table of its statistics."""
    if looked_on(query, key, value):
        output, _, table = attention_rows(query, key, value, scale, is_causal)
        return output, table
    return attend_directly(query, key, value, scale, is_causal)


def attend_directly(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool, way: Way | None = None
) -> tuple[Tensor, Tensor]:
    """The same, past the operator; the way is that of tensors laid out like these."""
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        output, table = _Attention.apply(query, key, value, scale, is_causal)  # type: ignore[no-untyped-call]
        return output, table
    output, _, table = attended(query, key, value, scale, is_causal, way)
    return output, table


class _Attention(torch.autograd.Function):
    """The operator without its dispatch."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> Any:
        output, lse, table = attended(query, key, value, scale, is_causal)
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
def attention_rows(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> Attended:
    """softmax(scale · QKᵀ) V; without gradient the lse of each row, and the table of the heads."""
    return attended(query, key, value, scale, is_causal)


@attention_rows.register_kernel("cpu")
def _attention_rows_cpu(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> Attended:
    rows = measured_rows(query, key, None, scale, is_causal)
    output = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=True)
    return output.contiguous(), rows.lse.to(wide_dtype(query)).contiguous(), table_of_rows(rows)


@attention_rows.register_fake
def _attention_rows_fake(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> Attended:
    table = query.new_empty((query.shape[1], TABLE), dtype=torch.float64)
    return query.new_empty(query.shape), empty_wide(query, *query.shape[:3]), table


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float, bool], output: Attended) -> None:
    query, key, value, ctx.scale, ctx.is_causal = inputs
    result, lse, table = output
    ctx.mark_non_differentiable(lse, table)
    ctx.save_for_backward(query, key, value, result, lse)


def _backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    return *attention_rows_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.is_causal), None, None


attention_rows.register_autograd(_backward, setup_context=_save)
