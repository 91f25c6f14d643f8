"""The numbers of one attention call inside a training step, for as little of the host's time as can be.

A training run calls the same layouts again and again: what follows from the layouts is prepared once, and a call is
then a few allocations and launches.
"""
# mypy: disable-error-code="import-untyped"

from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.measure.bound import BOUND_SLACK
from attnscale.measure.cuda.layout import (
    SUMS,
    SUMS_AND_VISIBLE,
    Layout,
    capturing,
    kernels_take_as_they_are,
    layout_key,
    mask_strides,
    span_of,
)
from attnscale.measure.cuda.sampled import SampledRows, drawn_ahead, weights_of
from attnscale.measure.pooled import TABLE, Pooled, Table
from attnscale.measure.sampling import design
from attnscale.measure.stats import ScoreStats
from attnscale.measure.uncertainty import Uncertainty


class Probed(NamedTuple):
    """What measuring a call has left on its device."""

    found: SampledRows
    lengths: Tensor  # (4, heads): mean lengths of queries and of the key of each head, and the largest squares of both

    @property
    def stats(self) -> ScoreStats:
        """The statistics, on the device."""
        return self.found.stats(capturing())

    def on_host(self, table: Tensor) -> Pooled:
        """Return what a table says that was copied to the host; what tells errors is fetched when one is asked for."""
        return Table(table, partial(self._errors_on_host, table))()

    def _errors_on_host(self, table: Tensor) -> Uncertainty:
        sample = replace(self.found.sample, positions=self.found.sample.positions.cpu())
        found = self.found._replace(sample=sample, sums=self.found.sums.cpu(), table=table)
        errors = found.stats(refreshed=False).pooled.uncertainty
        assert errors is not None  # only some rows were looked at
        return errors


def probe(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    hidden_keys: Tensor | None,
    scale: float,
    is_causal: bool,
    rows: int,
    table: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Probed | None:
    """Measure about `rows` rows a head; None where no kernel takes the call.

    The mask, (batch or 1, heads or 1, q_len or 1, kv_len), is of booleans. Rows of `padding`, (batch, q_len), and
    `hidden_keys`, (batch or 1, kv_len), do not count. `table` and `lengths`, float64 as Probed has them, are written
    to; without them new ones are.
    """
    if scale <= 0.0 or not kernels_take_as_they_are(query, key, mask):
        return None
    hidden_keys = None if hidden_keys is None else hidden_keys.expand(len(key), -1)
    given = (None if each is None else layout_key(each) for each in (mask, padding, hidden_keys))
    prepared = _prepared(layout_key(query), layout_key(key), *given, scale, is_causal, rows)
    return None if prepared is None else prepared.run(query, key, mask, padding, hidden_keys, table, lengths)


def measure_gradients(query: Tensor, key: Tensor, lengths: Tensor) -> bool:
    """Write the lengths of what reaches each query head and the key that it has, (2, heads); False where no kernel can.

    Heads that share a key stand side by side.
    """
    if not kernels_take_as_they_are(query, key, None) or query.shape[-1] != key.shape[-1]:
        return False
    from attnscale.measure.cuda.triton.lengths import prepared_lengths

    measure = prepared_lengths(layout_key(query), layout_key(key), None, None, is_mean=False, longest=False)
    measure(query, key, None, None, lengths)
    return True


class _Prepared:
    """Everything about a call but its tensors."""

    def __init__(
        self,
        query: Layout,
        key: Layout,
        mask: Layout | None,
        padding: Layout | None,
        hidden_keys: Layout | None,
        scale: float,
        is_causal: bool,
        rows: int,
    ) -> None:
        from attnscale.measure.cuda.triton.finish import finish_sample_launch
        from attnscale.measure.cuda.triton.lengths import prepared_lengths
        from attnscale.measure.cuda.triton.masked_rows import masked_launch
        from attnscale.measure.cuda.triton.rows import LOG2_E
        from attnscale.measure.cuda.triton.sampled_rows import sample_launch

        (batch, heads, q_len, _), query_strides, _, index, _ = query
        (_, kv_heads, kv_len, _), key_strides, *_ = key
        assert index is not None  # a query on a GPU
        device = torch.device("cuda", index)
        self._is_masked = mask is not None or padding is not None
        planned = design(rows, q_len, batch, is_causal or self._is_masked)
        assert planned is not None  # or the call is not prepared
        self._draws, self._weights = drawn_ahead(planned, batch, device), weights_of(planned, device)
        count = planned.sample(planned.stratum).positions.shape[-1]
        span = span_of(batch, heads, kv_len)
        spans = -(-kv_len // span)
        strides = *query_strides[:3], *key_strides[:3]
        if self._is_masked:
            launch = masked_launch(query, key, mask, padding, padding, False, False, is_causal, False, count, 0)
            self._sample = launch.bind(
                (-(-count // launch.tiles.rows) * batch * heads, spans),
                *(*strides, *mask_strides(mask), *((0, 0) if padding is None else padding[1]), 0, 0),
                *(heads, heads // kv_heads, count, kv_len, span, 0, 0, scale, 1.0),
            )
        else:
            launch = sample_launch(query, key, count, is_causal, False)
            self._sample = launch.bind(
                (spans, batch * heads, -(-count // launch.tiles.rows)),
                *(*strides, heads, heads // kv_heads, count, q_len, kv_len, -(-q_len // spans), span),
                *(scale, scale * LOG2_E),
            )
        shape = SUMS_AND_VISIBLE if self._is_masked else SUMS, spans, batch, heads, count
        bounds = (2, heads), (heads, 1), torch.float64, index, 0
        position_counts = is_causal and not self._is_masked  # where the position of a row tells what it sees
        self._finish = finish_sample_launch(bounds, shape, position_counts).bind(
            (1, heads),
            *(0, 1, 0, 1, heads, batch, heads, count, q_len, kv_len, spans, span, batch * count),
            scale * (1 + BOUND_SLACK),
        )
        self._measure_lengths = prepared_lengths(query, key, padding, hidden_keys, is_mean=True, longest=True)
        self._empty_sums = partial(torch.empty, shape, dtype=torch.float32, device=device)
        self._empty_table = partial(torch.empty, (heads, TABLE), dtype=torch.float64, device=device)
        self._empty_lengths = partial(torch.empty, (4, heads), dtype=torch.float64, device=device)
        self._of = span, kv_len, position_counts

    def run(
        self,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        padding: Tensor | None,
        hidden_keys: Tensor | None,
        table: Tensor | None,
        lengths: Tensor | None,
    ) -> Probed:
        """Measure these tensors."""
        sample, sums = self._draws.next(), self._empty_sums()
        table = self._empty_table() if table is None else table
        lengths = self._empty_lengths() if lengths is None else lengths
        if self._is_masked:
            visible = query if mask is None else mask.view(torch.uint8)
            own, others = (query, query) if padding is None else (padding.view(torch.uint8), no_document(query.device))
            self._sample(query, key, sample.positions, visible, own, others, *(sums,) * 6)
        else:
            self._sample(query, key, sample.positions, sums, sums)
        self._measure_lengths(query, key, padding, hidden_keys, lengths)
        self._finish(sums, sample.positions, self._weights, lengths[2:], table, sums, sums, table)
        return Probed(SampledRows(sample, sums, table, *self._of), lengths)


@lru_cache(maxsize=256)
def _prepared(
    query: Layout,
    key: Layout,
    mask: Layout | None,
    padding: Layout | None,
    hidden_keys: Layout | None,
    scale: float,
    is_causal: bool,
    rows: int,
) -> _Prepared | None:
    """None where so many rows are all there are."""
    is_uneven = is_causal or mask is not None or padding is not None
    if design(rows, query[0][2], query[0][0], is_uneven) is None:
        return None
    return _Prepared(query, key, mask, padding, hidden_keys, scale, is_causal, rows)


@cache
def no_document(device: torch.device) -> Tensor:
    """Return the document of every key, where that of a row says whether it is padding."""
    return torch.zeros(1, dtype=torch.uint8, device=device)
