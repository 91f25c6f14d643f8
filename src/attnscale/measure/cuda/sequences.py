"""Exact statistics of sequences laid end to end on a CUDA device, by kernels that look at each of them alone."""

import torch
from torch import Tensor

from attnscale.attending.ragged import Ragged, as_one_row
from attnscale.measure.cuda.attention import attend_directly, has_one_dtype, is_on_hopper, kernel_for
from attnscale.measure.cuda.launch import capturing, is_intercepted, kernels_take
from attnscale.measure.cuda.sampled import own_sinks
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
    is_whole = not row.dropout_p and row.sinks is None and row.value.shape[-1] == row.query.shape[-1]
    if not is_whole or not has_one_dtype(row) or not measures(ragged):
        return False
    return not _learns(ragged) or (
        row.query.dtype in HALF_DTYPES
        and row.query.shape[-1] % BACKWARD_WIDTH == 0
        and sequences_backward() is not None
    )


def attends_for_less(ragged: Ragged) -> bool:
    """Return True on Hopper, where all rows with the output cost less than torch's kernel and a pass over some."""
    row = ragged.row
    return attends(ragged) and is_on_hopper(row.query, row.key, row.value)


def attend(ragged: Ragged) -> tuple[Tensor, ScoreStats]:
    """Return the output of every sequence, (1, heads, total, head_dim), with its gradient, and their statistics."""
    row, longest = ragged.row, ragged.rows.longest if _learns(ragged) else 0
    given, is_causal = (row.query, row.key, row.value), row.visibility.last == 0
    kernel = kernel_for(*given, row.scale, is_causal, in_sequences=True)
    output, stats = attend_directly(kernel, row.scale, is_causal, *given, ragged.rows.offsets, longest)
    return as_one_row(output), stats


def measure(ragged: Ragged) -> ScoreStats:
    """Measure every row without the output."""
    from attnscale.measure.cuda import finish, rows  # not before it is needed: a CPU may have no triton

    row = ragged.row
    with torch.no_grad():
        sums = rows.score_rows(row.query, row.key, row.scale, row.visibility.last == 0, ragged.rows.offsets)
        table = finish.finish(sums.unsqueeze(1), sinks=own_sinks(row))
    return ScoreStats(row.query.shape[1], exact=True, pool=Table(table), refreshed=capturing())


def _learns(ragged: Ragged) -> bool:
    row = ragged.row
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (row.query, row.key, row.value))
