"""Measure scores without computing the attention output: by a kernel, in blocks of rows, or a few rows of it."""

from dataclasses import replace

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.errors import SettingError
from attnscale.measure.cuda import sampled
from attnscale.measure.cuda.launch import capturing
from attnscale.measure.lengths import max_bound
from attnscale.measure.moments import ScoreMoments, linear_moments
from attnscale.measure.pool import Unpooled, pool_rows, with_sinks
from attnscale.measure.pooled import SUMS
from attnscale.measure.row_blocks import measure_rows
from attnscale.measure.row_sums import RowSums
from attnscale.measure.sampling import LEAST_POSITIONS, Sample, design, foreseen_variance, sample_rows
from attnscale.measure.stats import ScoreStats


def check_rows(rows: int | None) -> None:
    """Refuse what is no number of rows."""
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise SettingError(f"Expected rows as a whole number of at least 1, or None for every row, got {rows!r}.")


def measured(call: Call, rows: int | None, lse: Tensor | None = None, sinks: Tensor | None = None) -> ScoreStats:
    """Measure every row of an attention, or about this many rows a head.

    `lse` is what a kernel left of all rows. `sinks`, (heads,), are learned logits that join the denominators.
    """
    if call.visibility.bias is not None:
        call = replace(call, visibility=call.visibility.with_infinite_mask())
    if sampled.measures(call):
        return sampled.measure(call, rows, sinks)
    return with_sinks(_measured(call, rows, lse), sinks)


def _measured(call: Call, rows: int | None, lse: Tensor | None) -> ScoreStats:
    sample = None if rows is None else _sample(call, rows)
    found, bound = (measure_rows(call), None) if sample is None else _look(call, sample, lse)
    pool = Unpooled(lambda: found, lambda: bound, sample)
    refreshed = call.query.is_cuda and capturing()
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
        return sampled.drawn_ahead(planned, batch, device).next()
    return planned.sample(torch.from_numpy(planned.draws(batch)).long())


def looks_at_all(call: Call, rows: int) -> bool:
    """Return True if so many rows a head are all there are."""
    batch, length = call.query.shape[0], call.query.shape[2]
    wanted = max(LEAST_POSITIONS, rows if call.query.device.type == "cpu" else -(-rows // max(batch, 1)))
    if wanted >= (batch * length if call.query.device.type == "cpu" else length):  # noqa: SIM103  # not a symbol
        return True
    return False


def _look(call: Call, sample: Sample, lse: Tensor | None) -> tuple[RowSums, Tensor]:
    with torch.no_grad():
        positions = sample.positions.to(call.query.device, non_blocking=True)
        entries = sample.entries if len(call.query) > 1 else None  # of one entry they are in its order
        return measure_rows(call, positions, entries=entries), max_bound(call, lse)


def moments_of(call: Call) -> ScoreMoments:
    """In linear time where that can be, else by a pass over the scores."""
    return _linear(call) if call.visibility.is_plain and call.softcap is None else _passed_over(call)


def _linear(call: Call) -> ScoreMoments:
    moments = linear_moments(call.query, call.key, call.scale, call.visibility.is_causal)
    if call.query.device.type != "cpu" or bool(moments.variance.isfinite().all()):
        return moments
    return linear_moments(call.query.double(), call.key.double(), call.scale, call.visibility.is_causal)


def _passed_over(call: Call) -> ScoreMoments:
    pooled = pool_rows(measure_rows(replace(call, visibility=call.visibility.with_infinite_mask())))
    squares, within = (pooled.sums[:, SUMS.index(name)] / pooled.count for name in ("squares", "within"))
    obstacle = "a soft-cap is not linear in q·k" if call.softcap else "a mask or bias is not a product of q and k"
    mean = torch.where(pooled.count > 0, pooled.mean, torch.nan)
    return ScoreMoments(pooled.count, mean, squares, within, f"a pass over the scores: {obstacle}")
