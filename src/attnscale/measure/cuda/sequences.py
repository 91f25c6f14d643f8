"""Exact statistics of sequences laid end to end on a CUDA device, by kernels that look at each of them alone."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnscale.attending.ragged import Ragged, as_one_row, as_tokens
from attnscale.measure.cuda.attention import takes_as_given
from attnscale.measure.cuda.layout import capturing, is_intercepted, kernels_take, layout_key, on_hopper
from attnscale.measure.cuda.sampled import rows_of
from attnscale.measure.pool import Unpooled
from attnscale.measure.pooled import Table
from attnscale.measure.stats import ScoreStats
from attnscale.numerics import HALF_DTYPES
from attnscale.torch_internals import sequences_backward

BACKWARD_WIDTH = 8  # head dimensions that torch's backward takes are multiples of it


def measures(ragged: Ragged) -> bool:
    """Return True if kernels take this: queries and keys of the same positions, and no mask but a causal one."""
    row, seen = ragged.row, ragged.row.visibility
    plain = seen.mask is None and seen.documents is None and seen.first is None and seen.last in (None, 0)
    if not plain or row.softcap is not None or not kernels_take(row) or is_intercepted(row.query, row.key, row.value):
        return False
    return ragged.rows.count > 0 and ragged.rows.equals(ragged.keys)


def attends(ragged: Ragged) -> bool:
    """Return True if one kernel gives the output too, and torch has a backward for it."""
    row = ragged.row
    if row.dropout_p or row.value.shape[-1] != row.query.shape[-1] or not takes_as_given(row) or not measures(ragged):
        return False
    return not _learns(ragged) or (
        row.query.dtype in HALF_DTYPES
        and row.query.shape[-1] % BACKWARD_WIDTH == 0
        and sequences_backward() is not None
    )


def attends_for_less(ragged: Ragged) -> bool:
    """Return True on Hopper, where all rows with the output cost less than torch's kernel and a pass over some."""
    row = ragged.row
    return attends(ragged) and _has_hopper_kernel(row.query, row.key, row.value)


def attend(ragged: Ragged) -> tuple[Tensor, ScoreStats]:
    """Return the output of every sequence, (1, heads, total, head_dim), with its gradient, and their statistics."""
    row, starts = ragged.row, ragged.rows.offsets
    given = row.query, row.key, row.value, starts, row.scale, row.visibility.last == 0
    if _learns(ragged):
        output, table = _Attention.apply(*given, ragged.rows.longest)  # type: ignore[no-untyped-call]
    else:
        output, _, table = _attended(*given)
    return as_one_row(output), ScoreStats(row.query.shape[1], exact=True, pool=Table(table))


def measure(ragged: Ragged) -> ScoreStats:
    """Measure every row alone; the sums of rows are kept."""
    from attnscale.measure.cuda import finish, rows  # not before it is needed: a CPU may have no triton

    row = ragged.row
    with torch.no_grad():
        sums = rows.score_rows(row.query, row.key, row.scale, row.visibility.last == 0, ragged.rows.offsets)
        pool = Unpooled(partial(rows_of, sums), known=Table(finish.finish_rows(sums, 0, False)))
    return ScoreStats(row.query.shape[1], exact=True, pool=pool, refreshed=capturing())


def _learns(ragged: Ragged) -> bool:
    row = ragged.row
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (row.query, row.key, row.value))


def _attended(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, (total, heads, head_dim), the lse, (1, heads, total), and the table of the heads."""
    from attnscale.measure.cuda import finish, rows  # not before it is needed: a CPU may have no triton

    if _has_hopper_kernel(query, key, value):
        from attnscale.measure.cuda import hopper

        output, lse, sums = hopper.attend_rows(query, key, value, scale, is_causal, starts)
    else:
        output, lse, sums = rows.attend_rows(query, key, value, scale, is_causal, starts)
    return output, lse, finish.finish_rows(sums, 0, False)


def _has_hopper_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    if not on_hopper(query.device.index):
        return False
    from attnscale.measure.cuda import hopper

    return hopper.takes(layout_key(query), layout_key(key), layout_key(value))


class _Attention(torch.autograd.Function):
    """Attention over sequences whose backward is torch's, from the lse that the forward left."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float, is_causal: bool, longest: int
    ) -> Any:
        output, lse, table = _attended(query, key, value, starts, scale, is_causal)
        ctx.save_for_backward(query, key, value, output, lse, starts)
        ctx.mark_non_differentiable(table)
        ctx.settings = longest, scale, is_causal
        return output, table

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, starts = ctx.saved_tensors
        longest, scale, is_causal = ctx.settings
        kernel, starts = sequences_backward(), starts.to(torch.int32)
        assert kernel is not None
        state, unused = (torch.empty(size, dtype=torch.uint64, device=grad.device) for size in ((2,), ()))
        gradients = kernel(
            *(grad.contiguous(), *map(as_tokens, (query, key, value)), output, lse.squeeze(0), starts, starts),
            *(longest, longest, 0.0, is_causal, state, unused),
            scale=scale,
        )
        return *map(as_one_row, gradients), None, None, None, None
