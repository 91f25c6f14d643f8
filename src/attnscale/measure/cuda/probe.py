"""The numbers of one attention call inside a training step, for as little of the host's time as can be.

A training run calls the same layouts again and again: what follows from the layouts is prepared once, and a call is
then a few allocations and launches.
"""
# mypy: disable-error-code="import-untyped"

import math
from functools import lru_cache
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
from attnscale.measure.pooled import TABLE
from attnscale.measure.sampling import Sample, design
from attnscale.measure.stats import ScoreStats

LOG2_E = math.log2(math.e)  # the kernels' exponentials are base 2
POOLED_AT_ONCE, BOUNDS_AT_ONCE = 64, 4096  # sampled rows of a head, and numbers that bound its maximum
PLAIN_PLANES, MASKED_PLANES = 6, 7  # sums of a row; behind a mask also how many keys it sees


class Probed(NamedTuple):
    """The statistics of a call, and the root mean square lengths of its queries and of the key of each head."""

    stats: ScoreStats
    lengths: Tensor  # (2, heads)


def probe(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    hidden_keys: Tensor | None,
    scale: float,
    is_causal: bool,
    rows: int,
) -> Probed | None:
    """Measure about `rows` rows a head; None where no kernel takes the call.

    The mask, (batch or 1, heads or 1, q_len or 1, kv_len), is of booleans. Rows of `padding`, (batch, q_len), and
    `hidden_keys`, (batch or 1, kv_len), do not count.
    """
    if scale <= 0.0 or not takes(query, key, mask):
        return None
    given = (None if each is None else layout_of(each) for each in (mask, padding, hidden_keys))
    prepared = _prepared(layout_of(query), layout_of(key), *given, scale, is_causal, rows)
    return None if prepared is None else prepared.run(query, key, mask, padding, hidden_keys)


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
        self._lengths, self._parts = self._lengths_launch(padding, hidden_keys)

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

    def _lengths_launch(self, padding: Layout | None, hidden_keys: Layout | None) -> tuple[Launch, int]:
        from attnscale.measure.cuda.triton.launch import LEAST_WIDTH
        from attnscale.measure.cuda.triton.lengths import both_lengths_kernel, parts_of, rows_each
        from attnscale.measure.cuda.triton.tiles import padded_width

        rows, key_rows = self._batch * self._q_len, self._batch * self._kv_len
        width = padded_width(self._head_dim, LEAST_WIDTH)
        parts, tile = parts_of(self._heads + self._kv_heads, max(rows, key_rows), width)
        hidden = (0, 0)
        if hidden_keys is not None:
            hidden = (0 if hidden_keys[0][0] == 1 else hidden_keys[1][0], hidden_keys[1][1])
        launch = Launch(
            both_lengths_kernel,
            (parts, self._heads + self._kv_heads),
            (
                *(*self._query_strides[:3], *self._key_strides[:3], *((0, 0) if padding is None else padding[1])),
                *(*hidden, self._heads, self._heads // self._kv_heads, rows, self._q_len, rows_each(rows, parts, tile)),
                *(key_rows, self._kv_len, rows_each(key_rows, parts, tile)),
            ),
            (self._head_dim, width, tile, padding is not None, hidden_keys is not None, True, True),
            4,
            1,
        )
        return launch, parts

    def run(
        self, query: Tensor, key: Tensor, mask: Tensor | None, padding: Tensor | None, hidden_keys: Tensor | None
    ) -> Probed:
        """Measure these tensors."""
        sample = self._draws.next()
        alignment = sample.positions.data_ptr() % ALIGNMENT
        padding, hidden_keys = (None if each is None else each.view(torch.uint8) for each in (padding, hidden_keys))
        planes = MASKED_PLANES if self._is_masked else PLAIN_PLANES
        sums = self._empty(planes, self._spans, self._batch, self._heads, self._count)
        table = self._empty(self._heads, TABLE, dtype=torch.float64)
        if self._is_masked:
            visible = query if mask is None else mask.view(torch.uint8)
            own, others = (query, query) if padding is None else (padding, no_document(self._device))
            self._sample(query, key, sample.positions, visible, own, others, sums, alignment=alignment)
        else:
            self._sample(query, key, sample.positions, sums, sums, alignment=alignment)
        lengths = self._measure_lengths(query, key, padding, hidden_keys)
        self._finish(sums, sample.positions, self._weights, lengths[2:], table, alignment=alignment)
        return Probed(self._stats(sample, sums, table), lengths[:2])

    def _measure_lengths(
        self, query: Tensor, key: Tensor, padding: Tensor | None, hidden_keys: Tensor | None
    ) -> Tensor:
        """(4, heads): mean lengths of queries and keys, and the largest squared length of each.

        No score of a head is above scale · max‖q‖ · max‖k‖ (Cauchy–Schwarz).
        """
        from attnscale.measure.cuda.triton.launching import counters
        from attnscale.measure.cuda.triton.lengths import PARTS

        programs = self._heads + self._kv_heads
        partial_sums = self._empty(programs * self._parts * PARTS.value, dtype=torch.float64)
        found = self._empty(4, self._heads, dtype=torch.float64)
        left_out = query if padding is None else padding, key if hidden_keys is None else hidden_keys
        self._lengths(query, key, *left_out, partial_sums, counters(self._device, programs), found)
        return found

    def _stats(self, sample: Sample, sums: Tensor, table: Tensor) -> ScoreStats:
        if self._is_masked:
            return stats_of_sample(sums, sample, table)
        return Sampled(sample, sums, table, self._span, self._kv_len, self._is_causal).stats(capturing())

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


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
