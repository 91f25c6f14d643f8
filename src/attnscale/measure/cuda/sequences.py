"""Exact statistics of sequences laid end to end on a CUDA device, by kernels that look at each of them alone."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnscale.attending.ragged import Ragged
from attnscale.attending.sequences import as_one_row, as_tokens
from attnscale.measure.cuda.attention import as_given, capturing
from attnscale.measure.cuda.shown import rows_of
from attnscale.measure.cuda.taking import kernels_take
from attnscale.measure.cuda.watched import looked_on
from attnscale.measure.cuda.ways import ALIGNMENT, layout_of, on_hopper
from attnscale.measure.pool import Unpooled
from attnscale.measure.pooled import Table
from attnscale.measure.stats import ScoreStats
from attnscale.numerics import HALF_DTYPES
from attnscale.torch_internals import sequences_backward

BACKWARD_WIDTH = 8  # head dimensions that torch's backward takes are multiples of it
Attended = tuple[Tensor, Tensor, Tensor]


def measures(ragged: Ragged) -> bool:
    """Whether kernels take this: queries and keys of the same positions, all of a sequence seen or what is behind."""
    row, seen = ragged.row, ragged.row.visibility
    plain = seen.mask is None and seen.documents is None and seen.first is None and seen.last in (None, 0)
    if not plain or row.softcap is not None or not kernels_take(row) or looked_on(row.query, row.key, row.value):
        return False
    return ragged.rows.count > 0 and ragged.rows.equals(ragged.keys)


def attends(ragged: Ragged) -> bool:
    """Whether one kernel gives the output too, and torch has a backward for it."""
    row = ragged.row
    if row.dropout_p or row.value.shape[-1] != row.query.shape[-1] or not as_given(row) or not measures(ragged):
        return False
    return not _learns(ragged) or (
        row.query.dtype in HALF_DTYPES
        and row.query.shape[-1] % BACKWARD_WIDTH == 0
        and sequences_backward() is not None
    )


def attends_for_less(ragged: Ragged) -> bool:
    """Whether all rows with the output cost less than torch's kernel for sequences and a pass over some: on Hopper."""
    row = ragged.row
    return attends(ragged) and _has_hopper_kernel(row.query, row.key, row.value, row.scale)


def attend(ragged: Ragged) -> tuple[Tensor, ScoreStats]:
    """The output of every sequence, (1, heads, total, head_dim), with its gradient, and their statistics."""
    row, starts = ragged.row, ragged.rows.offsets
    given = row.query, row.key, row.value, starts, row.scale, row.visibility.last == 0
    if _learns(ragged):
        output, table = _Attention.apply(*given, ragged.rows.longest)  # type: ignore[no-untyped-call]
    else:
        output, _, table = _attended(*given)
    return as_one_row(output), ScoreStats(row.query.shape[1], exact=True, pool=Table(table))


def measure(ragged: Ragged) -> ScoreStats:
    """The statistics alone; the rows stay at hand."""
    from attnscale.measure.cuda import triton

    row, starts = ragged.row, ragged.rows.offsets
    is_causal = row.visibility.last == 0
    kind = "sequences", *_layouts(row.query, row.key), is_causal, row.scale > 0.0, row.scale == 0.0
    with torch.no_grad():
        _, _, sums = triton.sequence_rows(row.query, row.key, None, starts, row.scale, is_causal, kind=kind)
        pool = Unpooled(partial(rows_of, sums), known=Table(_table(sums)))
    return ScoreStats(row.query.shape[1], exact=True, pool=pool, refreshed=capturing())


def _learns(ragged: Ragged) -> bool:
    row = ragged.row
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (row.query, row.key, row.value))


def _attended(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float, is_causal: bool) -> Attended:
    """The output, (total, heads, head_dim), the lse, (1, heads, total), and the table of the heads."""
    from attnscale.measure.cuda import triton

    if _has_hopper_kernel(query, key, value, scale):
        from attnscale.measure.cuda import hopper

        output, lse, sums = hopper.sequence_rows(query, key, value, starts, scale, is_causal)
        return output, lse, _table(sums)
    kind = "attended", *_layouts(query, key, value), is_causal, scale > 0.0, scale == 0.0
    made, found, sums = triton.sequence_rows(query, key, value, starts, scale, is_causal, kind=kind)
    assert made is not None
    assert found is not None
    return made, found, _table(sums)


def _has_hopper_kernel(query: Tensor, key: Tensor, value: Tensor, scale: float) -> bool:
    if not on_hopper(query.device.index) or scale == 0.0:
        return False
    from attnscale.measure.cuda import hopper  # not before it is needed: a CPU may have no triton

    return hopper.supported(query, key, value)


def _layouts(*rows: Tensor) -> tuple[Any, ...]:
    """All that a kernel's compilation depends on of (1, heads, total, head_dim).

    Not how many tokens there are, but whether strides of what it writes are one, or aligned.
    """
    total = rows[0].shape[2]
    return *(layout_of(row[:, :, :1]) for row in rows), total == 1, total % ALIGNMENT


def _table(sums: Tensor) -> Tensor:
    from attnscale.measure.cuda import triton

    return triton.finish_scored(sums, 0, False, ("sequences", sums.device.index))


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
