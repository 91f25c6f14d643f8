"""Statistics of a few rows a head on a CUDA device, beside torch's own attention or alone."""

from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.attending.choosing import run
from attnscale.measure.cuda import forward, row_ops
from attnscale.measure.cuda.attention import attend, attends, capturing
from attnscale.measure.cuda.attention import measure as measure_every_row
from attnscale.measure.cuda.drawn import drawn_ahead
from attnscale.measure.cuda.spans import key_span
from attnscale.measure.pool import Unpooled, uncertainty_of
from attnscale.measure.pooled import NUMBERS, Table
from attnscale.measure.row_sums import RowSums
from attnscale.measure.sampling import Design, Sample, design
from attnscale.measure.stats import ScoreStats
from attnscale.measure.uncertainty import Uncertainty
from attnscale.visibility import Visibility


def attend_sampling(call: Call, rows: int) -> tuple[Tensor, ScoreStats]:
    """The output of attention(), bit for bit, and statistics of about this many rows a head."""
    planned = _design(call, rows)
    if planned is None:
        return attend(call) if attends(call) else (run(call), measure(call, None))
    output, lse = forward.attend(call)
    with torch.no_grad():
        return output, _sample(call, planned, None if lse is None else lse.detach())


def attend_planned(
    rows: int, dropout_p: float, scale: float, is_causal: bool, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ScoreStats]:
    """The same for tensors laid out like some that were looked at."""
    return attend_sampling(Call(query, key, value, Visibility.of(None, is_causal), dropout_p, scale, None), rows)


def measure(call: Call, rows: int | None) -> ScoreStats:
    """The statistics alone, of every row or of about this many a head."""
    with torch.no_grad():
        planned = None if rows is None else _design(call, rows)
        return measure_every_row(call) if planned is None else _sample(call, planned, None)


def _design(call: Call, rows: int) -> Design | None:
    batch, _, q_len, _ = call.query.shape
    return design(rows, q_len, batch, call.visibility.is_causal)


def _sample(call: Call, planned: Design, lse: Tensor | None) -> ScoreStats:
    """Statistics of a draw; the maximum of rows not looked at is bounded by the lse of all rows, or by norms."""
    query, key = call.query, call.key
    sample = drawn_ahead(planned, len(query), query.device).next()
    weights = weights_of(planned, query.device)
    sums, table = row_ops.sample_stats(
        query, key, lse, sample.positions, weights, call.scale, call.visibility.is_causal
    )
    sampled = Sampled(sample, sums, table, key_span(query, key), key.shape[2], call.visibility.is_causal)
    return sampled.stats(capturing())


@cache
def weights_of(planned: Design, device: torch.device) -> Tensor:
    """How many positions each sampled one stands for, on the device."""
    return planned.sample(planned.stratum).weights.double().to(device, non_blocking=True)


class Sampled(NamedTuple):
    """What the pass over sampled rows left: their sums over each span of keys, and the table of their heads."""

    sample: Sample
    sums: Tensor  # (6, spans, batch, heads, rows)
    table: Tensor
    span: int
    kv_len: int
    is_causal: bool

    def stats(self, refreshed: bool) -> ScoreStats:
        """The statistics; what tells standard errors is formed from the sums when one is asked for."""
        known = Table(self.table, partial(_errors, self))
        pool = Unpooled(self.rows, self.bound, self.sample, in_shards=True, known=known)
        return ScoreStats(self.sums.shape[3], exact=False, pool=pool, refreshed=refreshed)

    def rows(self) -> RowSums:
        """What was found, over each span of keys."""
        begins = torch.arange(self.sums.shape[1], device=self.sums.device).mul_(self.span)
        shown = (self._visible() - begins.view(-1, 1, 1, 1)).clamp(min=0, max=self.span)
        return RowSums(
            shown.expand_as(self.sums[0]), *self.sums.double(), first=torch.full_like(self.sums[0], -torch.inf)
        )

    def _visible(self) -> Tensor:
        counts = Visibility.of(None, self.is_causal).counts_at(self.sample.positions.long(), self.kv_len)
        return counts.unsqueeze(1)

    def bound(self) -> Tensor:
        """No score of a head is above this."""
        return self.table[:, NUMBERS.index("max_bound")]


def _errors(sampled: Sampled) -> Uncertainty:
    return uncertainty_of(sampled.rows().over_shards(), sampled.sample, sampled.table[:, NUMBERS.index("mean")])
