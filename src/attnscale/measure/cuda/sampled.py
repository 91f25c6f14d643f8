"""Statistics without an output on a CUDA device, for every row or for sampled rows, with any mask.

A training step calls probe(), which measures a few rows of each call and writes to a buffer.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cuda.launch import SUMS, capturing, is_intercepted, kernels_take, key_span
from attnscale.measure.cuda.replay import Replay, replays
from attnscale.measure.lengths import add_lengths_, max_bound
from attnscale.measure.pooled import NUMBERS, Pooled, Table, uncertainty_of
from attnscale.measure.row_sums import RowSums
from attnscale.measure.sampling import Design, Sample, design
from attnscale.measure.stats import ScoreStats
from attnscale.measure.uncertainty import Uncertainty
from attnscale.numerics import KERNEL_DTYPES
from attnscale.torch_internals import current_stream
from attnscale.visibility import EVERYTHING, Visibility

DRAWS_AHEAD = 256  # most draws made at once


class SampledRows(NamedTuple):
    """Result of a pass over sampled rows: their sums over each span of keys, and the table of their heads."""

    sample: Sample
    sums: Tensor  # (SUMS, spans, batch, heads, rows)
    table: Tensor
    sinks: Tensor | None = None  # learned logits, float64 (heads,), included in the table's denominators

    @property
    def stats(self) -> ScoreStats:
        """Statistics; standard errors are computed from the sums when they are read."""
        return ScoreStats(self.sums.shape[3], exact=False, pool=Table(self.table, self.errors), refreshed=capturing())

    def on_host(self, table: Tensor) -> Pooled:
        """Return statistics from a table on the host; data for standard errors is copied when they are read."""
        return Table(table, lambda: self._copied(table).errors())()

    def _copied(self, table: Tensor) -> "SampledRows":
        sample = replace(self.sample, positions=self.sample.positions.cpu())
        return self._replace(sample=sample, sums=self.sums.cpu(), table=table)

    def errors(self) -> Uncertainty:
        """Return the uncertainty of the sums of all rows."""
        rows = RowSums(self.sums[7].long(), *self.sums[:7].double()).over_shards()
        rows = rows if self.sinks is None else rows.with_sinks(self.sinks)
        return uncertainty_of(rows, self.sample, self.table[:, NUMBERS.index("mean")])


def measures(call: Call) -> bool:
    """Return True if kernels support this call, with any mask; they are not operators."""
    return kernels_take(call) and not is_intercepted(call.query, call.key)


def measure(call: Call, rows: int | None) -> ScoreStats:
    """Measure every row, or about this many rows for each head; the mask has False or −∞ for hidden keys."""
    batch, _, q_len, _ = call.query.shape
    planned = None if rows is None else design(rows, q_len, batch, not call.visibility.is_full)
    if planned is None:
        return measure_every_row(call)
    with torch.no_grad():
        return measure_rows(call, planned, max_bound(call)).stats


def measure_every_row(call: Call, starts: Tensor | None = None) -> ScoreStats:
    """Measure every row; with the `starts` of packed sequences, each row over the keys of its own sequence."""
    from attnscale.measure.cuda import masked_rows, rows  # imported when needed: a CPU may have no triton
    from attnscale.measure.cuda.finish import finish

    query, key, seen, weights = call.query, call.key, call.visibility, None
    with torch.no_grad():
        if starts is None and (not seen.is_plain or call.softcap is not None):
            sums = masked_rows.score_masked_rows(call, None, key.shape[2])
        elif starts is None and query.shape[2] == 1:  # split the keys into spans that fill a GPU
            key = key[:, :, :1] if seen.is_causal else key
            alike = Call(heads_as_rows(query, key), key, key, EVERYTHING, 0.0, call.scale, None)
            sums = masked_rows.score_masked_rows(alike, None, key_span(alike.query, key))
            sums = sums.view(*sums.shape[:3], query.shape[1], 1)
            weights = torch.ones(1, dtype=torch.float64, device=query.device)
        else:
            sums = rows.score_rows(query, key, call.scale, seen.last == 0, starts).unsqueeze(1)
        table = finish(sums, weights, sinks=own_sinks(call))
    return ScoreStats(query.shape[1], exact=True, pool=Table(table), refreshed=capturing())


def heads_as_rows(query: Tensor, key: Tensor) -> Tensor:
    """Return one query of each head as rows, one tile for the heads that share a key head."""
    batch, heads, _, head_dim = query.shape
    return query.reshape(batch, key.shape[1], heads // key.shape[1], head_dim)


def probe(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    hidden_keys: Tensor | None,
    leaves_rows_out: bool,
    is_causal: bool,
    scale: float,
    rows: int,
    table: Tensor,
    lengths: Tensor,
) -> SampledRows | None:
    """Measure about `rows` rows for each head into a table; None if no kernel supports the call.

    The mask is boolean, (batch or 1, heads or 1, q_len or 1, kv_len). `hidden_keys`, (batch or 1, kv_len), do not
    count. With `leaves_rows_out`, the rows at their positions do not count either. `lengths` gets the sums of
    add_lengths_().
    """
    call = Call(query, key, key, Visibility(mask=mask), 0.0, scale, None)
    if len(query) != len(key) or not measures(call) or not replays(query, key, mask):
        return None
    is_uneven = is_causal or mask is not None
    planned = design(rows, query.shape[2], len(query), is_uneven)
    if planned is None:
        return None  # the sample would be every row
    from attnscale.measure.cuda.masked_rows import empty_sums  # imported when needed: a CPU may have no triton

    drawn = drawn_ahead(planned, len(query), query.device)
    sample = drawn.next()
    sums = empty_sums(query, key, len(planned.stratum), key_span(query, key))
    inputs, buffers = (query, key, mask, hidden_keys), (sample.positions, sums, table, lengths)
    launch_probe(inputs, buffers, leaves_rows_out, is_causal, scale, drawn.weights)
    return SampledRows(sample, sums, table)


@torch.no_grad()
def _launch_probe(
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    buffers: tuple[Tensor, Tensor, Tensor, Tensor],
    leaves_rows_out: bool,
    is_causal: bool,
    scale: float,
    weights: Tensor,
) -> None:
    from attnscale.measure.cuda import finish, masked_rows

    (query, key, mask, hidden_keys), (positions, sums, table, lengths) = inputs, buffers
    seen, padding = Visibility(last=0 if is_causal else None, mask=mask), None
    if leaves_rows_out and hidden_keys is not None:
        padding = hidden_keys.expand(len(query), -1)
        seen = seen.without_rows(padding)
    call = Call(query, key, key, seen, 0.0, scale, None)
    add_lengths_(lengths, query, key, padding, hidden_keys)
    masked_rows.score_masked_rows(call, positions, key_span(query, key), sums)
    finish.finish(sums, weights, table=table)


launch_probe = Replay(_launch_probe)


class WrittenScores(NamedTuple):
    """Scores of a hand-written attention, and the operands from which its scale is measured.

    A very low value in place of a score means that the key is hidden.
    """

    scores: Tensor  # (batch, heads, q_len, kv_len)
    query: Tensor  # (batch, heads, q_len, features); query and key are the operands of the product
    key: Tensor
    hidden_keys: Tensor | None  # keys hidden from every row, (batch or 1, kv_len)


def probe_scores(
    inputs: WrittenScores,
    leaves_rows_out: bool,
    highest: Tensor,
    scale: tuple[Tensor, Tensor, Tensor, float | None, float],
    planned: Design,
    table: Tensor,
    lengths: Tensor,
    scales: Tensor,
) -> SampledRows | None:
    """Measure the planned rows of each head into a table, the lengths of all vectors, and the scale of each head.

    With `leaves_rows_out`, rows at the positions of hidden keys do not count.
    `highest`, float32 (heads,), are the largest scores. `scale` holds the arguments of find_scales() from `rows` to
    `disagreement`. Return None if no kernel supports the scores.
    """
    scores, query, key, *_ = inputs
    call = Call(query, key, key, EVERYTHING, 0.0, 1.0, None)
    if scores.dtype not in KERNEL_DTYPES or not measures(call) or is_intercepted(scores):
        return None
    drawn = drawn_ahead(planned, len(scores), scores.device)
    sample = drawn.next()
    sums = torch.empty((SUMS, 1, *scores.shape[:2], sample.positions.shape[1]), device=scores.device)
    launch = launch_scores if replays(query, key, None) else _launch_scores
    launch(inputs, (sample.positions, highest, sums, table, lengths, scales), leaves_rows_out, *scale, drawn.weights)
    return SampledRows(sample, sums, table)


@torch.no_grad()
def _launch_scores(
    inputs: WrittenScores,
    buffers: tuple[Tensor, ...],
    leaves_rows_out: bool,
    rows: Tensor,
    multiplier: Tensor,
    stated: Tensor,
    softcap: float | None,
    disagreement: float,
    weights: Tensor,
) -> None:
    from attnscale.measure.cuda import finish, score_matrix  # imported when needed: a CPU may have no triton

    (scores, query, key, hidden_keys), (positions, highest, sums, table, lengths, scales) = inputs, buffers
    left_out = hidden_keys if leaves_rows_out else None
    score_matrix.sum_rows(scores, left_out, positions, sums)
    finish.finish(sums, weights, highest, table=table)
    add_lengths_(lengths, query, key, left_out, hidden_keys)
    score_matrix.find_scales(scores, query, key, rows, multiplier, stated, softcap, disagreement, scales)


launch_scores = Replay(_launch_scores)


def own_sinks(call: Call) -> Tensor | None:
    """Return a copy of the learned sinks of a call, (heads,), in float64."""
    return None if call.sinks is None else call.sinks.detach().to(torch.float64, copy=True)


def measure_rows(call: Call, planned: Design, bounds: Tensor) -> SampledRows:
    """Measure a draw of rows with any mask, which has False or −∞ for hidden keys.

    `bounds`, (heads,), are upper bounds of each head's scores.
    """
    from attnscale.measure.cuda import finish, masked_rows  # imported when needed: a CPU may have no triton

    drawn = drawn_ahead(planned, len(call.query), call.query.device)
    sample = drawn.next()
    sums = masked_rows.score_masked_rows(call, sample.positions, key_span(call.query, call.key))
    sinks = own_sinks(call)
    table = finish.finish(sums, drawn.weights, bounds, sinks)
    return SampledRows(sample, sums, table, sinks)


class DrawnAhead:
    """Draws of one design, made ahead on a GPU: a copy for each draw would cost time and break graph capture."""

    def __init__(self, planned: Design, batch: int, device: torch.device) -> None:
        self.planned, self.batch, self.device = planned, batch, device
        self.stream, self.raw = torch.cuda.current_stream(device), current_stream(device.index)  # stream of the copies
        weights = planned.sample(planned.stratum).weights  # number of positions that each sampled one represents
        self.weights = weights.double().to(device, non_blocking=True)
        self.drawn: tuple[Tensor, ...] = ()
        self.used = 0

    def next(self) -> Sample:
        """Return the next draw; reuse an earlier one during graph capture, which allows no copy."""
        is_capturing = torch.cuda.is_current_stream_capturing()
        if self.used == len(self.drawn):
            if not is_capturing or not self.drawn:
                self._draw(min(max(1, 2 * len(self.drawn)), DRAWS_AHEAD))  # few at first: a length may occur only once
            self.used = 0
        positions = self.drawn[self.used]
        self.used += 1
        if is_capturing:
            CAPTURED.extend((positions, self.weights))
        elif current_stream(self.device.index) != self.raw:  # the raw handle is cheaper to read than a Stream
            stream = torch.cuda.current_stream(self.device)
            stream.wait_stream(self.stream)
            positions.record_stream(stream)
        return self.planned.sample(positions)

    def _draw(self, count: int) -> None:
        draws = torch.from_numpy(self.planned.draws(count * self.batch)).unflatten(0, (count, self.batch))
        self.drawn = draws.to(self.device, non_blocking=True).unbind()
        self.stream, self.raw = torch.cuda.current_stream(self.device), current_stream(self.device.index)


CAPTURED: list[Tensor] = []  # read at every replay of a graph, so they are never freed


@lru_cache(maxsize=64)
def drawn_ahead(planned: Design, batch: int, device: torch.device) -> DrawnAhead:
    """Return the draws of a design for each entry of a batch, on a device."""
    return DrawnAhead(planned, batch, device)
