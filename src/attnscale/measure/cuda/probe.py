"""The numbers of one attention call inside a training step, for as little of the host's time as can be.

A training run calls the same layouts again and again: what follows from the layouts is prepared once, and a call is
then a few allocations and launches.
"""
# mypy: disable-error-code="import-untyped"

import math
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.measure.bound import BOUND_SLACK
from attnscale.measure.cuda.attention import capturing
from attnscale.measure.cuda.drawn import drawn_ahead
from attnscale.measure.cuda.prepared import Launch, Layout, mask_strides, no_document, takes
from attnscale.measure.cuda.sampled import Sampled, weights_of
from attnscale.measure.cuda.shown import stats_of_sample
from attnscale.measure.cuda.spans import span_of
from attnscale.measure.cuda.ways import ALIGNMENT, layout_of
from attnscale.measure.pooled import TABLE, Pooled, Table
from attnscale.measure.sampling import Sample, design
from attnscale.measure.stats import ScoreStats
from attnscale.measure.uncertainty import Uncertainty

LOG2_E = math.log2(math.e)  # the kernels' exponentials are base 2
POOLED_AT_ONCE, BOUNDS_AT_ONCE = 64, 4096  # sampled rows of a head, and numbers that bound its maximum
PLAIN_PLANES, MASKED_PLANES = 6, 7  # sums of a row; behind a mask also how many keys it sees


class Probed(NamedTuple):
    """What measuring a call has left on its device."""

    sample: Sample
    sums: Tensor  # of each sampled row, over each span of keys
    table: Tensor  # (heads, TABLE)
    lengths: Tensor  # (4, heads): mean lengths of queries and of the key of each head, and the largest squares of both
    span: int
    kv_len: int
    is_causal: bool

    @property
    def stats(self) -> ScoreStats:
        """The statistics, on the device."""
        return self._stats(capturing())

    def on_host(self, table: Tensor) -> Pooled:
        """Return what a table says that was copied to the host; what tells errors is fetched when one is asked for."""
        return Table(table, partial(self._errors_on_host, table))()

    def _errors_on_host(self, table: Tensor) -> Uncertainty:
        sample = replace(self.sample, positions=self.sample.positions.cpu())
        found = self._replace(sample=sample, sums=self.sums.cpu(), table=table)._stats(refreshed=False)
        assert found.pooled.uncertainty is not None  # only some rows were looked at
        return found.pooled.uncertainty

    def _stats(self, refreshed: bool) -> ScoreStats:
        if len(self.sums) == MASKED_PLANES:
            return stats_of_sample(self.sums, self.sample, self.table, refreshed)
        return Sampled(self.sample, self.sums, self.table, self.span, self.kv_len, self.is_causal).stats(refreshed)


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
    if scale <= 0.0 or not takes(query, key, mask):
        return None
    given = (None if each is None else layout_of(each) for each in (mask, padding, hidden_keys))
    prepared = _prepared(layout_of(query), layout_of(key), *given, scale, is_causal, rows)
    return None if prepared is None else prepared.run(query, key, mask, padding, hidden_keys, table, lengths)


def measure_gradients(query: Tensor, key: Tensor, lengths: Tensor) -> bool:
    """Write the lengths of what reaches each query head and the key that it has, (2, heads); False where no kernel can.

    Heads that share a key stand side by side.
    """
    if not takes(query, key, None) or query.shape[-1] != key.shape[-1]:
        return False
    _prepared_gradients(layout_of(query), layout_of(key)).run(query, key, lengths)
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
        from attnscale.measure.cuda.triton.launching import precision_of

        (self._batch, self._heads, self._q_len, self._head_dim), self._query_strides, dtype, index, _ = query
        (_, self._kv_heads, self._kv_len, _), self._key_strides, *_ = key
        self._device, self._scale, self._is_causal = torch.device("cuda", index), scale, is_causal
        self._is_masked = mask is not None or padding is not None
        planned = design(rows, self._q_len, self._batch, is_causal or self._is_masked)
        assert planned is not None  # or the call is not prepared
        self._draws = drawn_ahead(planned, self._batch, self._device)
        self._weights = weights_of(planned, self._device)
        self._count = planned.sample(planned.stratum).positions.shape[-1]
        self._span = span_of(self._batch, self._heads, self._kv_len)
        self._spans = -(-self._kv_len // self._span)
        self._precision = precision_of(dtype, index)
        if self._is_masked:
            self._sample = self._masked_launch(mask, padding, dtype, index)
        else:
            self._sample = self._plain_launch(dtype, index)
        self._finish = self._finish_launch()
        self._lengths = _Lengths(query, key, padding, hidden_keys, is_mean=True)

    def _plain_launch(self, dtype: torch.dtype, index: int) -> Launch:
        from attnscale.measure.cuda.triton.launch import LEAST_WIDTH
        from attnscale.measure.cuda.triton.launching import capability
        from attnscale.measure.cuda.triton.sample import sample_kernel
        from attnscale.measure.cuda.triton.tiles import padded_width, sample_tiles

        cut = sample_tiles(self._count, self._head_dim, dtype, capability(index))
        return Launch(
            sample_kernel,
            (self._spans, self._batch * self._heads, -(-self._count // cut.rows)),
            (
                *(*self._query_strides[:3], *self._key_strides[:3], self._heads, self._heads // self._kv_heads),
                *(self._count, self._q_len, self._kv_len, -(-self._q_len // self._spans), self._span),
                *(self._scale, self._scale * LOG2_E),
            ),
            (
                *(self._head_dim, padded_width(self._head_dim, LEAST_WIDTH), cut.rows, cut.keys, self._is_causal),
                *(False, self._precision),
            ),
            cut.warps,
            cut.stages,
        )

    def _masked_launch(self, mask: Layout | None, padding: Layout | None, dtype: torch.dtype, index: int) -> Launch:
        from attnscale.measure.cuda.triton.launch import LEAST_WIDTH
        from attnscale.measure.cuda.triton.launching import capability
        from attnscale.measure.cuda.triton.shown import BOOLEAN, NO_MASK, shown_kernel
        from attnscale.measure.cuda.triton.tiles import padded_width, shown_sample_tiles

        cut = shown_sample_tiles(self._count, self._head_dim, dtype, capability(index), False)
        strides = mask_strides(mask)
        return Launch(
            shown_kernel,
            (-(-self._count // cut.rows) * self._batch * self._heads, self._spans),
            (
                *(*self._query_strides[:3], *self._key_strides[:3], *strides),
                *((0, 0) if padding is None else padding[1]),
                *(0, 0, self._heads, self._heads // self._kv_heads, self._count, self._kv_len, self._span, 0, 0),
                *(self._scale, 1.0),
            ),
            (
                *(self._head_dim, padded_width(self._head_dim, LEAST_WIDTH), cut.rows, cut.keys, True),
                *((NO_MASK if mask is None else BOOLEAN).value, strides[2] != 0, False, self._is_causal),
                *(padding is not None, False, self._precision),
            ),
            cut.warps,
            cut.stages,
        )

    def _finish_launch(self) -> Launch:
        from attnscale.measure.cuda.triton.finish_sample import finish_sample_kernel

        return Launch(
            finish_sample_kernel,
            (self._heads,),
            (
                *(0, 1, 0, 1, self._heads, self._batch, self._heads, self._count, self._q_len),
                *(self._kv_len, self._spans, self._span, self._scale * (1 + BOUND_SLACK), BOUND_SLACK),
            ),
            (
                *(self._is_causal and not self._is_masked, self._is_masked, False),
                *(POOLED_AT_ONCE, BOUNDS_AT_ONCE),
            ),
            4,
            1,
        )

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
        sample = self._draws.next()
        alignment = sample.positions.data_ptr() % ALIGNMENT
        padding, hidden_keys = (None if each is None else each.view(torch.uint8) for each in (padding, hidden_keys))
        planes = MASKED_PLANES if self._is_masked else PLAIN_PLANES
        sums = self._empty(planes, self._spans, self._batch, self._heads, self._count)
        table = self._empty(self._heads, TABLE, dtype=torch.float64) if table is None else table
        lengths = self._empty(4, self._heads, dtype=torch.float64) if lengths is None else lengths
        if self._is_masked:
            visible = query if mask is None else mask.view(torch.uint8)
            own, others = (query, query) if padding is None else (padding, no_document(self._device))
            self._sample(query, key, sample.positions, visible, own, others, sums, alignment=alignment)
        else:
            self._sample(query, key, sample.positions, sums, sums, alignment=alignment)
        self._lengths.run(query, key, lengths, padding, hidden_keys)
        self._finish(sums, sample.positions, self._weights, lengths[2:], table, alignment=alignment)
        return Probed(sample, sums, table, lengths, self._span, self._kv_len, self._is_causal)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


class _Lengths:
    """Lengths of the queries and keys of each head, in one launch.

    Means come with the largest squared length of a query and of a key: no score of a head is above
    scale · max‖q‖ · max‖k‖ (Cauchy–Schwarz).
    """

    def __init__(
        self, query: Layout, key: Layout, padding: Layout | None, hidden_keys: Layout | None, is_mean: bool
    ) -> None:
        from attnscale.measure.cuda.triton.launch import LEAST_WIDTH
        from attnscale.measure.cuda.triton.lengths import PARTS, both_lengths_kernel, parts_of, rows_each
        from attnscale.measure.cuda.triton.tiles import padded_width

        (batch, heads, q_len, head_dim), query_strides, _, index, _ = query
        (key_batch, kv_heads, kv_len, _), key_strides, *_ = key
        self._device, self._programs = torch.device("cuda", index), heads + kv_heads
        rows, key_rows = batch * q_len, key_batch * kv_len
        width = padded_width(head_dim, LEAST_WIDTH)
        parts, tile = parts_of(self._programs, max(rows, key_rows), width)
        self._size = self._programs * parts * PARTS.value
        left_out = query_strides[:2] if not is_mean else (0, 0) if padding is None else padding[1]
        hidden = key_strides[:2] if not is_mean else (0, 0)
        if hidden_keys is not None:
            hidden = (0 if hidden_keys[0][0] == 1 else hidden_keys[1][0], hidden_keys[1][1])
        self._launch = Launch(
            both_lengths_kernel,
            (parts, self._programs),
            (
                *(*query_strides[:3], *key_strides[:3], *left_out, *hidden),
                *(heads, heads // kv_heads, rows, q_len, rows_each(rows, parts, tile)),
                *(key_rows, kv_len, rows_each(key_rows, parts, tile)),
            ),
            (head_dim, width, tile, padding is not None, hidden_keys is not None, is_mean, is_mean),
            4,
            1,
        )

    def run(
        self,
        query: Tensor,
        key: Tensor,
        lengths: Tensor,
        padding: Tensor | None = None,
        hidden_keys: Tensor | None = None,
    ) -> None:
        """Measure these tensors."""
        from attnscale.measure.cuda.triton.launching import counters

        partial_sums = torch.empty(self._size, dtype=torch.float64, device=self._device)
        left_out = query if padding is None else padding, key if hidden_keys is None else hidden_keys
        self._launch(query, key, *left_out, partial_sums, counters(self._device, self._programs), lengths)


@lru_cache(maxsize=256)
def _prepared_gradients(query: Layout, key: Layout) -> _Lengths:
    return _Lengths(query, key, None, None, is_mean=False)


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
