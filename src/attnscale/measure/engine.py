"""Chooses how scores are measured: torch in blocks of rows, a kernel, or a few sampled rows."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.errors import SettingError
from attnscale.inputs import check_inputs
from attnscale.measure import plan
from attnscale.measure.bound import max_bound
from attnscale.measure.cpu import attention as on_cpu
from attnscale.measure.cpu.threads import alone
from attnscale.measure.cuda import attention as on_cuda
from attnscale.measure.cuda import sampled, shown
from attnscale.measure.cuda.drawn import drawn_ahead
from attnscale.measure.cuda.ways import way_of
from attnscale.measure.foreseen import foreseen_variance
from attnscale.measure.moments import ScoreMoments, linear_moments
from attnscale.measure.pool import Unpooled, pool_rows
from attnscale.measure.pooled import SUMS
from attnscale.measure.row_blocks import measure_rows
from attnscale.measure.row_sums import RowSums
from attnscale.measure.sampling import Sample, design, sample_rows
from attnscale.measure.stats import ScoreStats
from attnscale.numerics import without_autocast
from attnscale.operator import run, scaled_call
from attnscale.rules.apply import Scale
from attnscale.shapes import attention_shape
from attnscale.visibility import Mask, Visibility


def score_stats(
    query: Tensor,
    key: Tensor,
    *,
    scale: Scale = None,
    attn_mask: Mask = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    softcap: float | None = None,
    rows: int | None = None,
) -> ScoreStats:
    """Statistics of the scores that attention() would put into its softmax, one value a query head.

    `rows=None` looks at every row, `rows=N` at about N rows a head, spread over position, with standard errors.
    What a mask of floats puts far below everything else is hidden, whatever number it uses. Scores past 1e19 have a
    spread on a CPU; the kernels of a GPU sum their squares in float32, and say inf or NaN there.

    >>> stats = score_stats(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 7, 8))
    >>> stats.top1.tolist() == [1 / 7, 1 / 7], stats.std.tolist()
    (True, [0.0, 0.0])
    """
    check_inputs(query, key, None, attn_mask, is_causal, enable_gqa, softcap)
    _check_rows(rows)
    with torch.no_grad(), without_autocast(query):
        seen = Visibility.of(attn_mask, is_causal)
        return measured(scaled_call(query, key, key, seen, scale, enable_gqa, softcap), rows)


def score_moments(
    query: Tensor,
    key: Tensor,
    *,
    scale: Scale = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    attn_mask: Mask = None,
    softcap: float | None = None,
) -> ScoreMoments:
    """Count, mean, variance and variance within rows of scale · q·k, over all visible pairs, in O((n + m) d²).

    A mask, a bias or a soft-cap has no such identity: the scores are then passed over, and `method` says so.

    >>> moments = score_moments(torch.randn(1, 2, 100_000, 16), torch.randn(1, 2, 50_000, 16), scale="unscaled")
    >>> bool((moments.variance.sqrt() - 4).abs().max() < 0.05)
    True
    """
    check_inputs(query, key, None, attn_mask, is_causal, enable_gqa, softcap)
    with torch.no_grad(), without_autocast(query):
        call = scaled_call(query, key, key, Visibility.of(attn_mask, is_causal), scale, enable_gqa, softcap)
        if call.visibility.is_plain and softcap is None:
            return _linear(call)
        return _passed_over(call)


def _linear(call: Call) -> ScoreMoments:
    moments = linear_moments(call.query, call.key, call.scale, call.visibility.is_causal)
    if call.query.device.type != "cpu" or bool(moments.variance.isfinite().all()):
        return moments
    return linear_moments(call.query.double(), call.key.double(), call.scale, call.visibility.is_causal)


def _passed_over(call: Call) -> ScoreMoments:
    pooled = pool_rows(measure_rows(replace(call, visibility=call.visibility.with_infinite_mask())))
    squares, within = (pooled.sums[:, SUMS.index(name)] / pooled.count for name in ("squares", "within"))
    obstacle = "a soft-cap is not linear in q·k" if call.softcap else "a mask or bias is not a product of q and k"
    return ScoreMoments(pooled.count, pooled.mean, squares, within, f"a pass over the scores: {obstacle}")


def attention_with_stats(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Scale = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
    rows: int | None = None,
) -> tuple[Tensor, ScoreStats]:
    """attention() and score_stats() of the same scores; the output has gradients, the statistics have none."""
    kind = None
    if attn_mask is None and softcap is None:
        kind = plan.kind_of(query, key, value, scale, dropout_p, is_causal, enable_gqa, rows)
        planned = plan.PLANS.get(kind)
        if planned is not None:
            return planned(query, key, value)
    check_inputs(query, key, value, attn_mask, is_causal, enable_gqa, softcap, dropout_p)
    _check_rows(rows)
    shape = attention_shape(query, key, value, enable_gqa)
    call = scaled_call(query, key, value, Visibility.of(attn_mask, is_causal), scale, enable_gqa, softcap, dropout_p)
    way: plan.Planned | None = None
    if rows is None and on_cuda.attends(call):
        output, stats = on_cuda.attend(call)
        if kind is not None:
            chosen = way_of(call.query, call.key, call.value, call.scale, is_causal)
            way = partial(on_cuda.attend_planned, call.scale, is_causal, chosen)
    elif rows is not None and on_cuda.measures(call) and not torch.compiler.is_compiling():
        output, stats = sampled.attend_sampling(call, rows)
        way = partial(sampled.attend_planned, rows, dropout_p, call.scale, is_causal)
    elif rows is None and on_cpu.serves(call):
        output, found = on_cpu.attend_rows(call)
        stats = ScoreStats(call.query.shape[1], exact=True, pool=Unpooled(lambda: found))
    else:
        output = run(call)
        with torch.no_grad(), without_autocast(call.query):
            stats = measured(call, rows)
    if way is not None and kind is not None and call.query is query and call.key is key and call.value is value:
        plan.keep(kind, way)  # nothing was folded
    return output.reshape(shape), stats


def measured(call: Call, rows: int | None) -> ScoreStats:
    """The statistics of an attention that was not run, of every row or of about this many a head."""
    call = replace(call, visibility=call.visibility.with_infinite_mask())
    if on_cuda.measures(call):
        return sampled.measure(call, rows)
    if shown.measures(call):
        return shown.measure(call, rows)
    sample = None if rows is None else _sample(call, rows)
    found, bound = (measure_rows(call), None) if sample is None else _look(call, sample)
    pool = Unpooled(lambda: found, lambda: bound, sample)
    refreshed = call.query.is_cuda and on_cuda.capturing()
    return ScoreStats(call.query.shape[1], exact=sample is None, pool=pool, refreshed=refreshed)


def _sample(call: Call, rows: int) -> Sample | None:
    """On a CPU rows of all batch entries; on a GPU as many of each, drawn ahead."""
    (batch, _, length, _), device, uneven = call.query.shape, call.query.device, not call.visibility.is_full
    if device.type == "cpu":
        foreseen = foreseen_variance(call) if 0 < rows < batch * length else None
        return sample_rows(rows, batch, length, uneven, foreseen)
    planned = design(rows, length, batch, uneven)
    if planned is None:
        return None
    if device.type == "cuda":
        return drawn_ahead(planned, batch, device).next()
    return planned.sample(torch.tensor(planned.draw_each(batch)))


def _look(call: Call, sample: Sample) -> tuple[RowSums, Tensor]:
    def look() -> tuple[RowSums, Tensor]:
        with torch.no_grad():
            positions = sample.positions.to(call.query.device, non_blocking=True)
            return measure_rows(call, positions, entries=sample.entries), max_bound(call)

    return alone(look) if call.query.device.type == "cpu" else look()


def _check_rows(rows: int | None) -> None:
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise SettingError(f"Expected rows as a whole number of at least 1, or None for every row, got {rows!r}.")
