"""Measuring on a CUDA device: the output and exact statistics from one kernel, or a few rows by another."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.errors import InputError
from attnscale.measure.cuda import forward, ops
from attnscale.measure.moments import linear_moments
from attnscale.measure.pool import Unpooled, pool_rows, with_moments
from attnscale.measure.row_sums import RowSums
from attnscale.measure.sampling import Design, Sample, design, drawn_ahead
from attnscale.measure.stats import Pooled, ScoreStats
from attnscale.numerics import without_autocast
from attnscale.operator import run

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST_HEAD = 256  # the Triton kernels hold a tile of whole heads
BOUND_SLACK = 1e-5  # the rounding of a float32 norm, with room to spare


def measures(call: Call) -> bool:
    """Whether the kernels take this: on CUDA, scores that are products of q and k alone."""
    query, key = call.query, call.key
    return (
        query.is_cuda
        and call.visibility.is_plain
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
    output, sums = ops.attention_rows(call.query, call.key, call.value, call.scale, call.visibility.is_causal)
    query, key = call.query.detach(), call.key.detach()  # without their graph
    pool = partial(_pool_attended, query, key, call.scale, call.visibility.is_causal, sums, _unwritten(query, key))
    return output, ScoreStats(query.shape[1], exact=True, pool=pool)


def attend_sampling(call: Call, rows: int) -> tuple[Tensor, ScoreStats]:
    """The output of attention(), bit for bit, and statistics of about this many rows a head."""
    planned = _design(call, rows)
    if planned is None:
        return attend(call) if attends(call) else (run(call), measure(call, None))
    output, lse = forward.attend(call)
    with torch.no_grad():
        sampled = _sample(call, planned, bounds=lse is None)
        return output, sampled.stats(None if lse is None else lse.detach())


def measure(call: Call, rows: int | None) -> ScoreStats:
    """The statistics alone, of every row or of about this many a head."""
    with torch.no_grad():
        planned = None if rows is None else _design(call, rows)
        if planned is not None:
            return _sample(call, planned, bounds=True).stats()
        query, key = call.query, call.key
        sums = ops.score_rows(query, key, None, None, call.scale, call.visibility.is_causal)
        visible = partial(_visible, query.shape[2], key.shape[2], call.visibility.is_causal, query.device)
        pool = Unpooled(lambda: RowSums(visible().expand_as(sums[0]), *sums))
        return ScoreStats(query.shape[1], exact=True, pool=pool)


def _design(call: Call, rows: int) -> Design | None:
    batch, _, q_len, _ = call.query.shape
    return design(rows, q_len, batch, call.visibility.is_causal)


def _sample(call: Call, planned: Design, bounds: bool) -> "Sampled":
    sample = drawn_ahead(planned, call.query.device).next()
    sums, norms = ops.sample_rows(call.query, call.key, sample.positions, call.scale, call.visibility.is_causal, bounds)
    span, kv_len = ops.key_span(call.query, call.key), call.key.shape[2]
    return Sampled(sample, sums, norms, span, kv_len, call.scale, call.visibility.is_causal)


class Sampled(NamedTuple):
    """What the pass over sampled rows left: their sums over each span of keys, and the longest query and key."""

    sample: Sample
    sums: Tensor  # (6, spans, batch, heads, rows)
    norms: Tensor  # (2, spans, batch, heads), or none
    span: int
    kv_len: int
    scale: float
    is_causal: bool

    def stats(self, lse: Tensor | None = None) -> ScoreStats:
        """The statistics; the maximum of rows not looked at is bounded by the lse of all rows, or by norms."""
        if lse is None:
            pool = Unpooled(self.rows, self.bound, self.sample, in_shards=True, source=self)
        else:
            pool = Unpooled(self.rows, partial(_bound_by_lse, lse), self.sample, in_shards=True)
        return ScoreStats(self.sums.shape[3], exact=False, pool=pool)

    @property
    def kind(self) -> tuple[object, ...]:
        """What passes that can be read at once have in common."""
        design = id(self.sample.stratum), id(self.sample.sizes)  # which a design makes once
        return self.sums.device, self.sums.shape, design, self.span, self.kv_len, self.scale, self.is_causal

    def together(self, others: Sequence["Sampled"]) -> "Sampled":
        """This pass and others of its kind, the heads of all side by side, each with positions of its own."""
        every = [self, *others]
        positions = torch.stack([each.sample.positions for each in every]).repeat_interleave(self.sums.shape[3], 0)
        return self._replace(
            sample=replace(self.sample, positions=positions),
            sums=torch.cat([each.sums for each in every], 3),
            norms=torch.cat([each.norms for each in every], 3),
        )

    def rows(self) -> RowSums:
        """What was found, over each span of keys."""
        begins = torch.arange(self.sums.shape[1], device=self.sums.device).mul_(self.span)
        shown = (self._visible() - begins.view(-1, 1, 1, 1)).clamp(min=0, max=self.span)
        return RowSums(shown.expand_as(self.sums[0]), *self.sums.double())

    def _visible(self) -> Tensor:
        if self.is_causal:
            return (self.sample.positions.long() + 1).clamp(max=self.kv_len)
        return torch.full_like(self.sample.positions, self.kv_len, dtype=torch.int64)

    def bound(self) -> Tensor:
        """Cauchy–Schwarz: no score of a head is above |a| · max‖q‖ · max‖k‖."""
        queries, keys = self.norms.amax(1).sqrt()
        bound: Tensor = abs(self.scale) * (1 + BOUND_SLACK) * queries * keys
        return bound.amax(0)


def _bound_by_lse(lse: Tensor) -> Tensor:
    """No score of a row is above its ln Σ eˢ."""
    highest: Tensor = lse.amax((0, 2))
    return highest + BOUND_SLACK * highest.abs().clamp(min=1.0)


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
        visible = _visible(query.shape[2], key.shape[2], is_causal, query.device).expand_as(largest)
        untaken = torch.zeros((), device=largest.device).expand_as(largest)
        pooled = pool_rows(RowSums(visible, largest, total, gap, participation, mean=untaken, deviation=untaken))
        return with_moments(pooled, linear_moments(query, key, scale, is_causal))


def _unwritten(*tensors: Tensor) -> Callable[[], bool]:
    """Whether the tensors are still what they are now."""
    versions = [tensor._version for tensor in tensors]
    return lambda: versions == [tensor._version for tensor in tensors]


def _visible(q_len: int, kv_len: int, is_causal: bool, device: torch.device) -> Tensor:
    """Visible keys of each row."""
    if is_causal:  # aligned to the upper left, as in SDPA
        return torch.arange(1, q_len + 1, device=device).clamp_(max=kv_len)
    return torch.full((q_len,), kv_len, device=device)
