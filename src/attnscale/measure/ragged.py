"""Statistics of ragged batches, nested or packed, over the rows of all sequences."""

from typing import Any

import torch
from torch import Tensor

from attnscale.attending.nested import nested_call
from attnscale.attending.ragged import NO_WINDOW, Ragged, Starts, Window, as_tokens, packed_call, window_of
from attnscale.attending.running import run_sequences
from attnscale.inputs import refuse_vmap
from attnscale.measure.cuda import attention as on_cuda
from attnscale.measure.cuda import sampled
from attnscale.measure.measuring import attend_rows, attends_rows, check_rows, every_row, measured, moments_of
from attnscale.measure.moments import ScoreMoments
from attnscale.measure.pooled import MeasuredRows
from attnscale.measure.row_sums import RowSums, joined_rows
from attnscale.measure.stats import ScoreStats, merged_when_read
from attnscale.numerics import uncompiled, without_autocast
from attnscale.rules.apply import Scale
from attnscale.torch_internals import without_modes


def attention_varlen_with_stats(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Scale = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window_size: Window = NO_WINDOW,
    document_ids: Tensor | None = None,
    rows: int | None = None,
) -> tuple[Tensor, ScoreStats]:
    """Return attention_varlen() and the statistics of the same scores, each row over the keys of its own sequence.

    `rows=N` measures about N rows per head, or every row if that is cheaper; `exact` is True if every row was
    measured. torch.compile runs this function outside its graph.

    >>> import torch
    >>> tokens = torch.zeros(7, 2, 4)
    >>> _, stats = attention_varlen_with_stats(tokens, tokens, tokens, torch.tensor([0, 3, 3, 7]))
    >>> stats.rows.tolist(), stats.count.tolist(), stats.entropy_ratio.tolist()
    ([7, 7], [25, 25], [1.0, 1.0])
    """
    check_rows(rows)
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, document_ids
    seen = window_of(window_size, is_causal)
    options = seen, scale, enable_gqa, softcap, dropout_p, sinks
    return uncompiled(_attention_with_stats)(query, key, value, sequences, rows, *options)


def _attention_with_stats(
    query: Tensor, key: Tensor, value: Tensor, sequences: Starts, rows: int | None, *options: Any
) -> tuple[Tensor, ScoreStats]:
    output, stats = _attend(packed_call(query, key, value, sequences, *options), rows)
    return as_tokens(output), stats


def nested_attention_with_stats(
    query: Tensor, key: Tensor, value: Tensor, rows: int | None, *options: Any
) -> tuple[Tensor, ScoreStats]:
    """Return the output, nested like the query, and the statistics of its scores."""
    ragged, wrap = nested_call(query, key, value, *options)
    output, stats = _attend(ragged, rows)
    return wrap(output), stats


def nested_score_stats(query: Tensor, key: Tensor, rows: int | None, *options: Any) -> ScoreStats:
    """Return score statistics over all sequences of nested tensors."""
    with torch.no_grad(), without_autocast(query), without_modes():
        return _measure(nested_call(query, key, key, *options)[0], rows)


def nested_score_moments(query: Tensor, key: Tensor, *options: Any) -> ScoreMoments:
    """Return score moments over all sequences of nested tensors, in linear time if possible."""
    with torch.no_grad(), without_autocast(query):
        ragged, _ = nested_call(query, key, key, *options)
        found = [moments_of(call) for call in ragged.calls() if call.query.numel() and call.key.numel()]
        total = found[0] if found else moments_of(ragged.row)
        for each in found[1:]:
            total = total + each
        return total


def _attend(ragged: Ragged, rows: int | None) -> tuple[Tensor, ScoreStats]:
    """Return the output, (1, heads, total, value_dim), and statistics of every row or of about `rows` rows per head."""
    refuse_vmap(ragged.rows.offsets, ragged.row.query)
    if on_cuda.attends_to_sequences(ragged) if rows is None else on_cuda.attends_to_sequences_for_less(ragged):
        return on_cuda.attend_to_sequences(ragged)
    if rows is None and attends_rows(ragged.row):
        both = [attend_rows(call) for call in ragged.calls()]
        return ragged.joined([output for output, _ in both]), _joined(ragged, [found for _, found in both])
    output = run_sequences(ragged)
    with torch.no_grad(), without_autocast(ragged.row.query), without_modes():
        return output, _measure(ragged, rows)


def _measure(ragged: Ragged, rows: int | None) -> ScoreStats:
    refuse_vmap(ragged.rows.offsets, ragged.row.query)
    if ragged.row.query.device.type == "cpu" and rows is None:
        return _joined(ragged, [every_row(call) for call in ragged.calls()])
    if rows is None and on_cuda.measures_sequences(ragged):
        return on_cuda.measure_sequences(ragged)
    documents = ragged.as_documents()
    if documents is not None and (documents.query.device.type == "cpu" or sampled.measures(documents)):
        return measured(documents, rows)
    total = max(1, ragged.row.query.shape[-2])
    shares = [None if rows is None else max(2, -(-rows * length // total)) for length in ragged.rows.lengths]
    parts = [measured(call, share) for call, share in zip(ragged.calls(), shares, strict=True)]
    return merged_when_read(parts or [measured(ragged.row, None)])


def _joined(ragged: Ragged, parts: list[RowSums]) -> ScoreStats:
    found = joined_rows(parts or [every_row(ragged.row)])
    return ScoreStats(ragged.row.query.shape[1], exact=True, pool=MeasuredRows(found))
