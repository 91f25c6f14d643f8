"""Statistics behind masks, biases, windows, documents and soft-caps on a CUDA device, by a pass of their own."""

from functools import partial

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.bound import BOUND_SLACK, max_bound
from attnscale.measure.cuda.attention import capturing
from attnscale.measure.cuda.drawn import drawn_ahead
from attnscale.measure.cuda.sampled import weights_of
from attnscale.measure.cuda.spans import key_span
from attnscale.measure.cuda.taking import kernels_take
from attnscale.measure.cuda.watched import looked_on
from attnscale.measure.cuda.ways import kind_of, layout_of
from attnscale.measure.pool import Unpooled, uncertainty_of
from attnscale.measure.pooled import NUMBERS, Table
from attnscale.measure.row_sums import RowSums
from attnscale.measure.sampling import Sample, design
from attnscale.measure.stats import ScoreStats
from attnscale.measure.uncertainty import Uncertainty


def measures(call: Call) -> bool:
    """Whether the kernel takes this, and nobody looks on at operators, of which it is none."""
    return kernels_take(call) and not looked_on(call.query, call.key)


def measure(call: Call, rows: int | None) -> ScoreStats:
    """The statistics of every row, or of about this many a head; what the mask hides is False or −∞."""
    batch, _, q_len, _ = call.query.shape
    uneven = not call.visibility.is_full
    planned = None if rows is None else design(rows, q_len, batch, uneven)
    with torch.no_grad():
        if planned is None:
            return _every_row(call)
        sample = drawn_ahead(planned, batch, call.query.device).next()
        return _sampled(call, sample, weights_of(planned, call.query.device))


def _every_row(call: Call) -> ScoreStats:
    from attnscale.measure.cuda import triton

    kv_len = call.key.shape[2]
    sums = triton.shown_rows(call, None, kv_len, kind=("shown", kind_of(call)))[:, 0]
    table = triton.finish_scored(sums, kv_len, False, ("shown", sums.shape, sums.device.index))
    pool = Unpooled(partial(rows_of, sums), known=Table(table))
    return ScoreStats(call.query.shape[1], exact=True, pool=pool, refreshed=capturing())


def _sampled(call: Call, sample: Sample, weights: Tensor) -> ScoreStats:
    from attnscale.measure.cuda import triton

    (batch, heads, _, _), kv_len, span = call.query.shape, call.key.shape[2], key_span(call.query, call.key)
    drawn = layout_of(sample.positions)  # one of many draws in one tensor, aligned as it comes
    sums = triton.shown_rows(call, sample.positions, span, kind=("shown", kind_of(call), drawn))
    bound = max_bound(call).float().view(1, heads, 1).expand(batch, -1, -1)
    kind = "shown", sums.shape, sums.device.index, drawn
    table = triton.finish_sampled(
        sums, bound, sample.positions, weights, 1, kv_len, span, 1.0, False, BOUND_SLACK, kind
    )
    return stats_of_sample(sums, sample, table)


def stats_of_sample(sums: Tensor, sample: Sample, table: Tensor, refreshed: bool | None = None) -> ScoreStats:
    """The statistics that a pass over sampled rows left."""
    pool = Unpooled(
        partial(rows_of, sums),
        lambda: table[:, NUMBERS.index("max_bound")],
        sample,
        in_shards=True,
        known=Table(table, partial(_errors, sums, sample, table)),
    )
    return ScoreStats(sums.shape[3], exact=False, pool=pool, refreshed=capturing() if refreshed is None else refreshed)


def rows_of(sums: Tensor) -> RowSums:
    """What the pass has left of each row."""
    return RowSums(sums[6].long(), *sums[:6].double(), first=torch.full_like(sums[0], -torch.inf))


def _errors(sums: Tensor, sample: Sample, table: Tensor) -> Uncertainty:
    return uncertainty_of(rows_of(sums).over_shards(), sample, table[:, NUMBERS.index("mean")])
