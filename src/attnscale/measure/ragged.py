"""Statistics of ragged batches, nested or packed, over the rows of all sequences."""

from typing import Any

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.attending.nested import nested_call
from attnscale.attending.ragged import (
    NO_WINDOW,
    Ragged,
    Starts,
    Window,
    as_one_row,
    as_tokens,
    packed_call,
    window_of,
)
from attnscale.attending.running import run_sequences
from attnscale.inputs import refuse_vmap
from attnscale.measure.attending import attend_directly, attend_for, attend_or_measure
from attnscale.measure.cuda import sampled
from attnscale.measure.cuda.launch import is_intercepted, kernels_take, layout_key, on_hopper
from attnscale.measure.cuda.sdpa import has_one_dtype
from attnscale.measure.measuring import check_rows, measured, moments_of
from attnscale.measure.moments import ScoreMoments
from attnscale.measure.stats import ScoreStats, merged_when_read
from attnscale.numerics import HALF_DTYPES, uncompiled, without_autocast
from attnscale.rules.apply import Scale
from attnscale.torch_internals import in_transform, sequences_backward, unseen, without_modes

BACKWARD_WIDTH = 8  # torch's backward of packed sequences needs head dimensions that are multiples of this


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
    row = ragged.row
    refuse_vmap(ragged.rows.offsets, row.query)
    if _attends_in_one_pass(ragged) and (rows is None or _attends_for_less(row)):
        longest = ragged.rows.longest if _learns(row) else 0
        given, is_causal = (row.query, row.key, row.value), row.visibility.last == 0
        attend = attend_for(row, in_sequences=True)
        output, stats = attend_directly(attend, row.scale, is_causal, *given, ragged.rows.offsets, longest)
        return as_one_row(output), stats
    if rows is None and row.query.device.type == "cpu" and not unseen(row.query) and not in_transform():
        both = [attend_or_measure(call, None) for call in ragged.calls()]
        return ragged.joined([output for output, _ in both]), _merged(ragged, [stats for _, stats in both])
    output = run_sequences(ragged)
    with torch.no_grad(), without_autocast(row.query), without_modes():
        return output, _measure(ragged, rows)


def _measure(ragged: Ragged, rows: int | None) -> ScoreStats:
    row = ragged.row
    refuse_vmap(ragged.rows.offsets, row.query)
    if rows is None and _kernels_take(ragged):
        return sampled.measure_every_row(row, ragged.rows.offsets)
    documents = None if rows is None and row.query.device.type == "cpu" else ragged.as_documents()
    if documents is not None and (documents.query.device.type == "cpu" or sampled.measures(documents)):
        return measured(documents, rows)
    total = max(1, row.query.shape[-2])
    shares = [None if rows is None else max(2, -(-rows * length // total)) for length in ragged.rows.lengths]
    return _merged(ragged, [measured(call, share) for call, share in zip(ragged.calls(), shares, strict=True)])


def _merged(ragged: Ragged, parts: list[ScoreStats]) -> ScoreStats:
    return merged_when_read(parts or [measured(ragged.row, None)])


def _kernels_take(ragged: Ragged) -> bool:
    """Return True if the kernels support this batch: queries and keys at the same positions, at most a causal mask."""
    row, seen = ragged.row, ragged.row.visibility
    plain = seen.mask is None and seen.documents is None and seen.first is None and seen.last in (None, 0)
    if not plain or row.softcap is not None or not kernels_take(row) or is_intercepted(row.query, row.key, row.value):
        return False
    return ragged.rows.count > 0 and ragged.rows.equals(ragged.keys)


def _attends_in_one_pass(ragged: Ragged) -> bool:
    """Return True if one kernel computes the output too, and torch has a backward for it."""
    row, head_dim = ragged.row, ragged.row.query.shape[-1]
    is_whole = row.dropout_p == 0.0 and row.sinks is None and row.value.shape[-1] == head_dim
    if not is_whole or not has_one_dtype(row) or not _kernels_take(ragged):
        return False
    has_backward = row.query.dtype in HALF_DTYPES and head_dim % BACKWARD_WIDTH == 0
    return not _learns(row) or (has_backward and sequences_backward() is not None)


def _attends_for_less(row: Call) -> bool:
    """Return True on Hopper, where exact statistics with the output cost less than torch's kernel plus sampling."""
    if not on_hopper(row.query.device.index):
        return False
    from attnscale.measure.cuda import hopper  # imported when needed: a CPU may have no triton

    return hopper.takes(*map(layout_key, (row.query, row.key, row.value)))


def _learns(row: Call) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (row.query, row.key, row.value))
