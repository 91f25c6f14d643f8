"""The numbers of one attention call inside a training step, for as little of the host's time as can be.

A training run calls the same layouts again and again: what follows from the layouts is prepared once, and a call is
then a few allocations and launches.
"""
# mypy: disable-error-code="import-untyped"

from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.measure.bound import BOUND_SLACK
from attnscale.measure.cuda.layout import Layout, capturing, kernels_take_as_they_are, layout_key, mask_strides, span_of
from attnscale.measure.cuda.sampled import SUMS_AND_VISIBLE, SampledRows, drawn_ahead, weights_of
from attnscale.measure.pooled import TABLE
from attnscale.measure.sampling import Sample, design
from attnscale.measure.stats import ScoreStats


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
    if scale <= 0.0 or not kernels_take_as_they_are(query, key, mask):
        return None
    given = (None if each is None else layout_key(each) for each in (mask, padding, hidden_keys))
    prepared = _prepared(layout_key(query), layout_key(key), *given, scale, is_causal, rows)
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
        (self._batch, self._heads, self._q_len, self._head_dim), self._query_strides, _, index, _ = query
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
        self._planes = 6
        self._sample = (
            self._masked_launch(query, key, mask, padding) if self._is_masked else self._plain_launch(query, key)
        )
        self._finish = self._finish_launch()
        self._lengths = self._lengths_launch(query, key, padding, hidden_keys)

    def _plain_launch(self, query: Layout, key: Layout) -> Callable[..., None]:
        from attnscale.measure.cuda.triton.rows import LOG2_E
        from attnscale.measure.cuda.triton.sampled_rows import sample_launch

        launch = sample_launch(query, key, self._count, self._is_causal, False)
        return launch.bind(
            (self._spans, self._batch * self._heads, -(-self._count // launch.tiles.rows)),
            *(*self._query_strides[:3], *self._key_strides[:3], self._heads, self._heads // self._kv_heads),
            *(self._count, self._q_len, self._kv_len, -(-self._q_len // self._spans), self._span),
            *(self._scale, self._scale * LOG2_E),
        )

    def _masked_launch(
        self, query: Layout, key: Layout, mask: Layout | None, padding: Layout | None
    ) -> Callable[..., None]:
        from attnscale.measure.cuda.triton.masked_rows import masked_launch

        self._planes = SUMS_AND_VISIBLE
        flags = False, False, self._is_causal, False
        launch = masked_launch(query, key, mask, padding, padding, *flags, self._count, 0)
        return launch.bind(
            (-(-self._count // launch.tiles.rows) * self._batch * self._heads, self._spans),
            *(*self._query_strides[:3], *self._key_strides[:3], *mask_strides(mask)),
            *((0, 0) if padding is None else padding[1]),
            *(0, 0, self._heads, self._heads // self._kv_heads, self._count, self._kv_len, self._span, 0, 0),
            *(self._scale, 1.0),
        )

    def _finish_launch(self) -> Callable[..., None]:
        from attnscale.measure.cuda.triton.finish import finish_sample_launch

        shape = self._planes, self._spans, self._batch, self._heads, self._count
        bounds = (2, self._heads), (self._heads, 1), torch.float64, self._device.index, 0
        return finish_sample_launch(bounds, shape, self._is_causal and not self._is_masked).bind(
            (1, self._heads),
            *(0, 1, 0, 1, self._heads, self._batch, self._heads, self._count, self._q_len),
            *(self._kv_len, self._spans, self._span, self._batch * self._count, self._scale * (1 + BOUND_SLACK)),
        )

    def _lengths_launch(
        self, query: Layout, key: Layout, padding: Layout | None, hidden_keys: Layout | None
    ) -> Callable[..., None]:
        from attnscale.measure.cuda.triton.lengths import prepared_lengths

        if hidden_keys is not None and hidden_keys[0][0] == 1:
            shape, strides, *rest = hidden_keys
            hidden_keys = ((self._batch, *shape[1:]), (0, *strides[1:]), *rest)  # type: ignore[assignment]
        return prepared_lengths(query, key, padding, hidden_keys, is_mean=True, longest=True)

    def run(
        self, query: Tensor, key: Tensor, mask: Tensor | None, padding: Tensor | None, hidden_keys: Tensor | None
    ) -> Probed:
        """Measure these tensors."""
        sample = self._draws.next()
        sums = self._empty(self._planes, self._spans, self._batch, self._heads, self._count)
        table = self._empty(self._heads, TABLE, dtype=torch.float64)
        lengths = self._empty(4, self._heads, dtype=torch.float64)
        if self._is_masked:
            visible = query if mask is None else mask.view(torch.uint8)
            own, others = (query, query) if padding is None else (padding.view(torch.uint8), no_document(self._device))
            self._sample(query, key, sample.positions, visible, own, others, *(sums,) * 6)
        else:
            self._sample(query, key, sample.positions, sums, sums)
        self._lengths(query, key, padding, hidden_keys, lengths)
        self._finish(sums, sample.positions, self._weights, lengths[2:], sums, sums, table)
        return Probed(self._stats(sample, sums, table), lengths[:2])

    def _stats(self, sample: Sample, sums: Tensor, table: Tensor) -> ScoreStats:
        is_causal = self._is_causal and not self._is_masked
        return SampledRows(sample, sums, table, self._span, self._kv_len, is_causal).stats(capturing())

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


@cache
def no_document(device: torch.device) -> Tensor:
    """Return the document of every key, where that of a row says whether it is padding."""
    return torch.zeros(1, dtype=torch.uint8, device=device)
