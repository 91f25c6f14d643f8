"""Measurement of one attention: every row or a sample, by a kernel or in blocks of rows, with or without its output."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.errors import SettingError
from attnscale.inputs import refuse_vmap
from attnscale.measure.cuda import sampled
from attnscale.measure.cuda.launch import capturing, is_intercepted
from attnscale.measure.lengths import max_bound
from attnscale.measure.moments import ScoreMoments, linear_moments
from attnscale.measure.pooled import SUMS, TABLE, Table, pack, pool_rows, unpack
from attnscale.measure.row_blocks import measure_rows
from attnscale.measure.row_sums import RowSums
from attnscale.measure.sampling import LEAST_POSITIONS, Sample, design, foreseen_variance, sample_rows
from attnscale.measure.stats import ScoreStats
from attnscale.measure.uncertainty import packed_size
from attnscale.torch_internals import has_mode, unseen
from attnscale.visibility import Visibility


def check_rows(rows: int | None) -> None:
    """Raise SettingError unless `rows` is None or a whole number of at least 1."""
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise SettingError(f"Expected rows as a whole number of at least 1, or None for every row, got {rows!r}.")


def measure(call: Call, rows: int | None) -> ScoreStats:
    """Measure every row, or about `rows` rows per head; as one custom op if a mode or compiler is active."""
    by_op = unseen(call.query) or has_mode() or (call.query.is_cuda and is_intercepted(call.query, call.key))
    return _measure_by_op(call, rows) if by_op else measured(call, rows)


def measured(call: Call, rows: int | None, lse: Tensor | None = None) -> ScoreStats:
    """Measure every row, or about `rows` rows per head; `lse` is the log-sum-exp of every row, if known."""
    call = _with_infinite_mask(call)
    if sampled.measures(call):
        return sampled.measure(call, rows)
    sample = None if rows is None else _sample(call, rows)
    if sample is None:
        pool = partial(pool_rows, _with_sinks(call, measure_rows(call)))
    else:
        entries = sample.entries if len(call.query) > 1 else None  # not needed for a batch of one
        positions = sample.positions.to(call.query.device, non_blocking=True)
        found = _with_sinks(call, measure_rows(call, positions, entries=entries))
        pool = partial(pool_rows, found, max_bound(call, lse), sample)
    refreshed = call.query.is_cuda and capturing()
    return ScoreStats(call.query.shape[1], exact=sample is None, pool=pool, refreshed=refreshed)


def moments_of(call: Call) -> ScoreMoments:
    """Return the moments of all scores: in linear time if possible, otherwise from every score."""
    if call.visibility.is_plain and call.softcap is None:
        moments = linear_moments(call.query, call.key, call.scale, call.visibility.is_causal)
        if call.query.device.type != "cpu" or bool(moments.variance.isfinite().all()):
            return moments
        return linear_moments(call.query.double(), call.key.double(), call.scale, call.visibility.is_causal)
    stats = measure(call, None)
    obstacle = "a soft-cap is not linear in q·k" if call.softcap else "a mask or bias is not a product of q and k"
    method = f"a pass over the scores: {obstacle}"
    return ScoreMoments(stats.count, stats.mean, stats.variance, stats.variance_within_rows, method)


def _with_infinite_mask(call: Call) -> Call:
    if call.visibility.bias is None:
        return call
    return replace(call, visibility=call.visibility.with_infinite_mask())


def _with_sinks(call: Call, rows: RowSums) -> RowSums:
    return rows if call.sinks is None else rows.with_sinks(call.sinks)


def _sample(call: Call, rows: int) -> Sample | None:
    """Draw rows from all batch entries together on a CPU; on a GPU, draw equally many from each, ahead of time."""
    (batch, _, length, _), device, uneven = call.query.shape, call.query.device, not call.visibility.is_full
    if device.type == "cpu":
        foreseen = foreseen_variance(call) if 0 < rows < batch * length else None
        return sample_rows(rows, batch, length, uneven, foreseen)
    planned = design(rows, length, batch, uneven)
    if planned is None:
        return None
    if device.type == "cuda":
        return sampled.drawn_ahead(planned, batch, device).next()
    return planned.sample(torch.from_numpy(planned.draws(batch)).long())


def options_of(call: Call) -> tuple[Any, ...]:
    """Return the arguments that custom ops pass to call_of(), except the tensors of the attention and the scale."""
    seen = call.visibility
    mask = None if seen.mask is None else seen.mask.detach()
    return mask, *(seen.documents or (None, None)), seen.last, seen.first, call.softcap, call.sinks


def call_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None,
    documents_q: Tensor | None,
    documents_k: Tensor | None,
    last: int | None,
    first: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Call:
    """Return the attention that options_of() described."""
    documents = None if documents_q is None or documents_k is None else (documents_q, documents_k)
    return Call(query, key, value, Visibility(last, first, mask, documents), 0.0, scale, softcap, sinks)


def _measure_by_op(call: Call, rows: int | None) -> ScoreStats:
    if not torch.compiler.is_compiling():
        refuse_vmap(call.query, call.key)
    table = unpack(measured_scores(call.query.detach(), call.key.detach(), call.scale, *options_of(call), rows))
    exact = rows is None or _takes_all(call, rows)
    return ScoreStats(call.query.shape[1], exact=exact, pool=Table(table.columns) if exact else table)


def _takes_all(call: Call, rows: int) -> bool:
    batch, length, on_cpu = call.query.shape[0], call.query.shape[2], call.query.device.type == "cpu"
    wanted = max(LEAST_POSITIONS, rows if on_cpu else -(-rows // max(batch, 1)))
    if wanted >= (batch * length if on_cpu else length):  # noqa: SIM103  # the branch turns a symbolic boolean into a plain one
        return True
    return False


@torch.library.custom_op("attnscale::measured_scores", mutates_args=())
def measured_scores(
    query: Tensor,
    key: Tensor,
    scale: float,
    mask: Tensor | None,
    documents_q: Tensor | None,
    documents_k: Tensor | None,
    last: int | None,
    first: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    rows: int | None,
) -> Tensor:
    """Return the table of the heads, followed by its uncertainty if rows were sampled."""
    call = call_of(query, key, key, scale, mask, documents_q, documents_k, last, first, softcap, sinks)
    return pack(measured(call, rows).pooled, errors=rows is not None)


@measured_scores.register_fake
def _measured_scores_fake(query: Tensor, key: Tensor, *given: Any) -> Tensor:
    width = TABLE + (packed_size(len(SUMS)) if given[-1] is not None else 0)
    return query.new_empty(query.shape[1], width, dtype=torch.float64)
