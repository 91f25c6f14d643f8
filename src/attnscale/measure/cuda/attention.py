"""Exact statistics on a CUDA device: with the output from one kernel, or alone; final when the call returns."""

from functools import partial

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cuda import attention_op, row_ops
from attnscale.measure.cuda.taking import kernels_take
from attnscale.measure.cuda.ways import Way
from attnscale.measure.pool import Unpooled
from attnscale.measure.pooled import Table
from attnscale.measure.row_sums import RowSums
from attnscale.measure.stats import ScoreStats
from attnscale.visibility import Visibility


def measures(call: Call) -> bool:
    """Whether kernels take this that know nothing of masks: on CUDA, scores that are products of q and k alone."""
    return call.visibility.is_plain and call.softcap is None and kernels_take(call)


def attends(call: Call) -> bool:
    """Whether one kernel gives the output too."""
    plain = call.dropout_p == 0.0 and call.value.shape[-1] == call.query.shape[-1]
    return plain and measures(call) and as_given(call)


def as_given(call: Call) -> bool:
    """Whether the kernels would get the tensors as they are: one dtype, and autocast has nothing to cast."""
    dtype = call.query.dtype
    cast = torch.is_autocast_enabled("cuda") and dtype != torch.get_autocast_dtype("cuda")
    return dtype == call.key.dtype == call.value.dtype and not cast


def attend(call: Call) -> tuple[Tensor, ScoreStats]:
    """The output with its gradient, and the exact statistics of every row."""
    output, table = attention_op.attend_stats(call.query, call.key, call.value, call.scale, call.visibility.is_causal)
    return output, ScoreStats(call.query.shape[1], exact=True, pool=Table(table))


def attend_planned(
    scale: float, is_causal: bool, way: Way, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ScoreStats]:
    """The same for tensors laid out like some that attends() has looked at."""
    output, table = attention_op.attend_directly(query, key, value, scale, is_causal, way)
    return output, ScoreStats(query.shape[1], exact=True, pool=Table(table))


def measure(call: Call) -> ScoreStats:
    """The statistics of every row alone; the rows stay at hand for who sees only some of the keys."""
    query, key = call.query, call.key
    sums, table = row_ops.score_stats(query, key, call.scale, call.visibility.is_causal)
    found = partial(_rows, sums, key.shape[2], call.visibility.is_causal)
    pool = Unpooled(found, known=Table(table))
    return ScoreStats(query.shape[1], exact=True, pool=pool, refreshed=capturing())


def capturing() -> bool:
    """Whether what is measured now will be refreshed, by the replays of a graph."""
    return not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


def _rows(sums: Tensor, kv_len: int, is_causal: bool) -> RowSums:
    every = torch.arange(sums.shape[-1], device=sums.device)
    visible = Visibility.of(None, is_causal).counts_at(every, kv_len)
    return RowSums(visible.expand_as(sums[0]), *sums, first=torch.full_like(sums[0], -torch.inf))
