"""Measuring on a CUDA device: the output and exact statistics from one kernel, or a few rows by another."""

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor

from attnscale.errors import InputError
from attnscale.kernels.call import Call
from attnscale.measure import ops
from attnscale.measure.moments import linear_moments
from attnscale.measure.pool import pool_rows, with_moments
from attnscale.measure.rows import RowSums
from attnscale.measure.sampling import Sample, design, drawn_ahead
from attnscale.measure.stats import Pooled, ScoreStats
from attnscale.rules.rule import without_autocast

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST_HEAD = 256  # the Triton kernels hold a tile of whole heads
BOUND_SLACK = 1e-5  # the rounding of a float32 norm, with room to spare


def measures(call: Call) -> bool:
    """Whether the kernels take this: on CUDA, scores that are products of q and k alone."""
    query, key = call.query, call.key
    return (
        query.is_cuda
        and call.attn_mask is None
        and call.softcap is None
        and query.dtype == key.dtype
        and query.dtype in DTYPES
        and query.shape[-1] <= WIDEST_HEAD
        and query.numel() > 0
        and key.numel() > 0
        and _has_triton()
    )


def attends(call: Call) -> bool:
    """Whether one kernel gives the output too."""
    plain = call.dropout_p == 0.0 and call.value.shape[-1] == call.query.shape[-1]
    return plain and measures(call) and not torch.is_autocast_enabled("cuda")


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def attend(call: Call) -> tuple[Tensor, ScoreStats]:
    """The output with its gradient, and the exact statistics of every row.

    The moments of the scores are taken in linear time from query and key when a statistic is first read; both are
    kept until then.
    """
    output, sums = ops.attention_rows(call.query, call.key, call.value, call.scale, call.is_causal)
    query, key = call.query.detach(), call.key.detach()  # without their graph
    pool = partial(_pool_attended, query, key, call.scale, call.is_causal, sums, _unwritten(query, key))
    return output, ScoreStats(query.shape[1], exact=True, pool=pool)


def measure(call: Call, rows: int | None) -> ScoreStats:
    """The statistics alone, of every row or of about this many a head."""
    query, key = call.query, call.key
    batch, heads, q_len, _ = query.shape
    planned = None if rows is None else design(rows, q_len, batch, call.is_causal)
    if planned is None:
        sums = ops.score_rows(query, key, None, None, call.scale, call.is_causal)
        visible = partial(_visible, None, q_len, key.shape[2], call.is_causal, query.device)
        return ScoreStats(heads, exact=True, pool=partial(_pool_scored, sums, visible))
    sample = drawn_ahead(planned, query.device).next()
    sums, norms = ops.sample_rows(query, key, sample.positions, call.scale, call.is_causal)
    visible = partial(_visible, sample.positions, q_len, key.shape[2], call.is_causal, query.device)
    span = ops.key_span(query, key)
    pool = partial(_pool_sampled, sums, norms, visible, span, call.scale, sample)
    return ScoreStats(heads, exact=False, pool=pool)


def _pool_attended(
    query: Tensor, key: Tensor, scale: float, is_causal: bool, sums: Tensor, unwritten: Callable[[], bool]
) -> Pooled:
    if not unwritten():
        raise InputError(
            "Expected query and key as they were when attention_with_stats() saw them, but they were written to since; "
            "read a statistic before that, or measure with score_stats()."
        )
    with torch.no_grad(), without_autocast(query):
        largest, total, gap, participation, _ = sums
        visible = _visible(None, query.shape[2], key.shape[2], is_causal, query.device).expand_as(largest)
        untaken = torch.zeros((), device=largest.device).expand_as(largest)
        pooled = pool_rows(RowSums(visible, largest, total, gap, participation, mean=untaken, deviation=untaken))
        return with_moments(pooled, linear_moments(query, key, scale, is_causal))


def _unwritten(*tensors: Tensor) -> Callable[[], bool]:
    """Whether the tensors are still what they are now."""
    versions = [tensor._version for tensor in tensors]
    return lambda: versions == [tensor._version for tensor in tensors]


def _pool_scored(sums: Tensor, visible: Callable[[], Tensor]) -> Pooled:
    return pool_rows(RowSums(visible().expand_as(sums[0]), *sums))


def _pool_sampled(
    sums: Tensor, norms: Tensor, visible: Callable[[], Tensor], span: int, scale: float, sample: Sample
) -> Pooled:
    begins = torch.arange(sums.shape[1], device=sums.device).mul_(span)
    shown = (visible() - begins.view(-1, 1, 1, 1)).clamp(min=0, max=span)
    found = RowSums(shown.expand_as(sums[0]), *sums.double()).over_shards()
    # Cauchy–Schwarz: no score of a head is above |a| · max‖q‖ · max‖k‖
    queries, keys = norms.amax(1).sqrt()
    bound = (abs(scale) * (1 + BOUND_SLACK) * queries * keys).amax(0)
    return pool_rows(found, bound, sample)


def _visible(positions: Tensor | None, q_len: int, kv_len: int, is_causal: bool, device: torch.device) -> Tensor:
    """Visible keys of these rows, or of all."""
    if not is_causal:
        return torch.full((q_len if positions is None else positions.shape[0],), kv_len, device=device)
    last = torch.arange(q_len, device=device) if positions is None else positions.long()
    return (last + 1).clamp(max=kv_len)
