"""Statistics of a few rows a head on a CUDA device, and of rows behind masks, by passes of their own."""

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cuda.layout import SUMS_AND_VISIBLE, capturing, is_intercepted, kernels_take, key_span
from attnscale.measure.lengths import max_bound
from attnscale.measure.pooled import NUMBERS, Table, uncertainty_of
from attnscale.measure.row_sums import RowSums
from attnscale.measure.sampling import Design, Sample, design
from attnscale.measure.stats import ScoreStats
from attnscale.measure.uncertainty import Uncertainty
from attnscale.torch_internals import current_stream
from attnscale.visibility import Visibility

DRAWS_AHEAD = 256  # at most


class SampledRows(NamedTuple):
    """Result of a pass over sampled rows: their sums over each span of keys, and the table of their heads."""

    sample: Sample
    sums: Tensor  # (7 or SUMS_AND_VISIBLE, spans, batch, heads, rows)
    table: Tensor
    span: int
    kv_len: int
    is_causal: bool
    sinks: Tensor | None = None  # learned logits, float64 (heads,), that the table has in the denominators

    def stats(self, refreshed: bool, exact: bool = False) -> ScoreStats:
        """Return the statistics; what standard errors need is computed from the sums when one is asked for."""
        table = Table(self.table, None if exact else self._errors)
        return ScoreStats(self.sums.shape[3], exact=exact, pool=table, refreshed=refreshed)

    def rows(self) -> RowSums:
        """Return the sums of each row over each span of keys."""
        if len(self.sums) == SUMS_AND_VISIBLE:
            return rows_of(self.sums)
        counts = Visibility.of(None, self.is_causal).counts_at(self.sample.positions.long(), self.kv_len).unsqueeze(1)
        begins = torch.arange(self.sums.shape[1], device=self.sums.device).mul_(self.span)
        visible = (counts - begins.view(-1, 1, 1, 1)).clamp(min=0, max=self.span)
        return RowSums(visible.expand_as(self.sums[0]), *self.sums.double())

    def _errors(self) -> Uncertainty:
        rows = self.rows().over_shards()
        rows = rows if self.sinks is None else rows.with_sinks(self.sinks)
        return uncertainty_of(rows, self.sample, self.table[:, NUMBERS.index("mean")])


def rows_of(sums: Tensor) -> RowSums:
    """Return sums with the number of visible keys as RowSums."""
    return RowSums(sums[7].long(), *sums[:7].double())


def measure_rows(call: Call, planned: Design, bounds: Tensor, table: Tensor | None = None) -> SampledRows:
    """Measure a draw of rows, whatever they see; what a mask hides is False or −∞.

    `bounds` are upper bounds of scores: the lse of every row, or one of each head. `table` is written to, if given.
    """
    from attnscale.measure.cuda import finish, masked_rows, sampled_rows  # not before: a CPU may have no triton

    query, key, is_causal = call.query, call.key, call.visibility.is_causal
    kv_len, span, device = key.shape[2], key_span(query, key), query.device
    sample = drawn_ahead(planned, len(query), device).next()
    if call.visibility.is_plain and call.softcap is None:
        sums = sampled_rows.sample_rows(query, key, sample.positions, call.scale, is_causal, span)
    else:
        is_causal = False  # the pass counts what each row sees
        sums = masked_rows.score_masked_rows(call, sample.positions, span)
    weights, sinks = weights_of(planned, device), own_logits(call.sinks)
    table = finish.finish_sampled(sums, bounds, sample.positions, weights, kv_len, span, is_causal, sinks, table)
    return SampledRows(sample, sums, table, span, kv_len, is_causal, sinks)


def measures_masked(call: Call) -> bool:
    """Return True if a kernel takes this call, whatever its rows see; it is no operator."""
    return kernels_take(call) and not is_intercepted(call.query, call.key)


def measure_masked(call: Call, rows: int | None) -> ScoreStats:
    """Measure every row, or about this many a head; what the mask hides is False or −∞."""
    from attnscale.measure.cuda import finish, masked_rows

    (batch, heads, q_len, _), kv_len = call.query.shape, call.key.shape[2]
    planned = None if rows is None else design(rows, q_len, batch, not call.visibility.is_full)
    with torch.no_grad():
        if planned is not None:
            return measure_rows(call, planned, max_bound(call)).stats(capturing())
        sums = masked_rows.score_masked_rows(call, None, kv_len)[:, 0]
        table = finish.finish_rows(sums, kv_len, False, own_logits(call.sinks))
    return ScoreStats(heads, exact=True, pool=Table(table), refreshed=capturing())


def own_logits(sinks: Tensor | None) -> Tensor | None:
    """Return a copy of learned sinks as the kernels take them."""
    return None if sinks is None else sinks.detach().to(torch.float64, copy=True)


@cache
def weights_of(planned: Design, device: torch.device) -> Tensor:
    """Return how many positions each sampled one stands for, on the device."""
    return planned.sample(planned.stratum).weights.double().to(device, non_blocking=True)


class DrawnAhead:
    """Draws of one design kept on a GPU: the next one costs no copy, which would also stop a graph capture."""

    def __init__(self, planned: Design, batch: int, device: torch.device) -> None:
        self.planned, self.batch, self.device = planned, batch, device
        self.stream, self.raw = torch.cuda.current_stream(device), current_stream(device.index)  # of the copies
        self.drawn: tuple[Tensor, ...] = ()
        self.used = 0

    def next(self) -> Sample:
        """Return the next draw; under graph capture, where nothing can be copied, one of those at hand again."""
        is_capturing = torch.cuda.is_current_stream_capturing()
        if self.used == len(self.drawn):
            if not is_capturing or not self.drawn:
                self._draw(min(max(1, 2 * len(self.drawn)), DRAWS_AHEAD))  # few for a length not seen again
            self.used = 0
        positions = self.drawn[self.used]
        self.used += 1
        if is_capturing:
            CAPTURED.append(positions)
        elif current_stream(self.device.index) != self.raw:  # a stream itself takes long to ask for
            stream = torch.cuda.current_stream(self.device)
            stream.wait_stream(self.stream)
            positions.record_stream(stream)
        return self.planned.sample(positions)

    def _draw(self, count: int) -> None:
        draws = torch.from_numpy(self.planned.draws(count * self.batch)).unflatten(0, (count, self.batch))
        self.drawn = draws.to(self.device, non_blocking=True).unbind()
        self.stream, self.raw = torch.cuda.current_stream(self.device), current_stream(self.device.index)


CAPTURED: list[Tensor] = []  # a graph reads its positions at every replay, for as long as it lives


@lru_cache(maxsize=64)
def drawn_ahead(planned: Design, batch: int, device: torch.device) -> DrawnAhead:
    """Return the draws of a design for each entry of a batch, on a device."""
    return DrawnAhead(planned, batch, device)
