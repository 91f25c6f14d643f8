"""Statistics of ragged batches, nested or packed: the rows of all sequences are the rows of each head."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.attending.nested import nested_call
from attnscale.attending.ragged import NO_WINDOW, Ragged, Starts, Window, as_tokens, layouts, packed_call, window_of
from attnscale.attending.running import run, run_sequences
from attnscale.inputs import check_sinks, refuse_vmap
from attnscale.measure import one_pass as on_cpu
from attnscale.measure.cuda import attention as on_cuda
from attnscale.measure.cuda import sampled
from attnscale.measure.lengths import max_bound
from attnscale.measure.measuring import check_rows, measured, moments_of
from attnscale.measure.moments import ScoreMoments
from attnscale.measure.pool import Unpooled, with_sinks
from attnscale.measure.row_blocks import measure_rows
from attnscale.measure.row_sums import ROW_FIELDS, RowSums
from attnscale.measure.sampling import Sample, foreseen_variance, sample_rows
from attnscale.measure.stats import ScoreStats, merged_when_read
from attnscale.numerics import uncompiled, without_autocast
from attnscale.rules.apply import Scale
from attnscale.visibility import Mask


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

    `rows=N` looks at about N rows a head, or, on a GPU whose kernel has them all for less, at all: `exact` says which.
    torch.compile runs this outside its graph.

    >>> import torch
    >>> tokens = torch.zeros(7, 2, 4)
    >>> _, stats = attention_varlen_with_stats(tokens, tokens, tokens, torch.tensor([0, 3, 3, 7]))
    >>> stats.rows.tolist(), stats.count.tolist(), stats.entropy_ratio.tolist()
    ([7, 7], [25, 25], [1.0, 1.0])
    """
    check_rows(rows)
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, document_ids
    seen = window_of(window_size, is_causal)
    return uncompiled(_attend)(query, key, value, sequences, rows, sinks, seen, scale, enable_gqa, softcap, dropout_p)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, sequences: Starts, rows: int | None, sinks: Tensor | None, *options: Any
) -> tuple[Tensor, ScoreStats]:
    ragged = packed_call(query, key, value, *layouts(query, *sequences), *options)
    output, stats = attend_sequences(ragged, rows, sinks)
    return as_tokens(output), stats


def nested_attention_with_stats(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: int | None,
    sinks: Tensor | None,
    attn_mask: Mask,
    is_causal: bool,
    scale: Scale,
    enable_gqa: bool,
    softcap: float | None,
    dropout_p: float,
) -> tuple[Tensor, ScoreStats]:
    """Return the output, nested as the query is, and the statistics of its scores."""
    ragged, wrap = nested_call(query, key, value, attn_mask, is_causal, scale, enable_gqa, softcap, dropout_p)
    output, stats = attend_sequences(ragged, rows, sinks)
    return wrap(output), stats


def nested_score_stats(
    query: Tensor,
    key: Tensor,
    attn_mask: Mask,
    is_causal: bool,
    scale: Scale,
    enable_gqa: bool,
    softcap: float | None,
    rows: int | None,
    sinks: Tensor | None,
) -> ScoreStats:
    """Return the statistics of every sequence with itself."""
    with torch.no_grad(), without_autocast(query):
        ragged, _ = nested_call(query, key, key, attn_mask, is_causal, scale, enable_gqa, softcap)
        check_sinks(sinks, ragged.row.query)
        return measured_sequences(ragged, rows, sinks)


def nested_score_moments(
    query: Tensor,
    key: Tensor,
    attn_mask: Mask,
    is_causal: bool,
    scale: Scale,
    enable_gqa: bool,
    softcap: float | None,
) -> ScoreMoments:
    """Return the moments of every sequence with itself, in linear time where that can be."""
    with torch.no_grad(), without_autocast(query):
        ragged, _ = nested_call(query, key, key, attn_mask, is_causal, scale, enable_gqa, softcap)
        return moments_of_sequences(ragged, moments_of)


def attend_sequences(ragged: Ragged, rows: int | None, sinks: Tensor | None) -> tuple[Tensor, ScoreStats]:
    """Return the output of every sequence, (1, heads, total, value_dim), and their statistics.

    They are of all rows where a kernel has those for less than another takes for the output and some rows.
    """
    refuse_vmap(ragged.rows.offsets, ragged.row.query)
    if sinks is not None:
        output = run_sequences(ragged.with_sinks(sinks))
        with torch.no_grad(), without_autocast(ragged.row.query):
            return output, measured_sequences(ragged, rows, sinks)
    if on_cuda.attends_to_sequences(ragged) if rows is None else on_cuda.attends_to_sequences_for_less(ragged):
        return on_cuda.attend_to_sequences(ragged)
    calls = list(ragged.calls()) if rows is None and ragged.row.query.device.type == "cpu" else []
    if not any(map(on_cpu.serves, calls)):
        output = run_sequences(ragged)
        with torch.no_grad(), without_autocast(ragged.row.query):
            return output, measured_sequences(ragged, rows)
    both = [on_cpu.attend_rows(call) if on_cpu.serves(call) else _attend_apart(call) for call in calls]
    return ragged.joined([output for output, _ in both]), _stats(ragged, _joined([found for _, found in both]))


def measured_sequences(ragged: Ragged, rows: int | None, sinks: Tensor | None = None) -> ScoreStats:
    """Return the statistics of every row, or of about this many a head; `sinks` join the denominators."""
    refuse_vmap(ragged.rows.offsets, ragged.row.query)
    row = ragged.row
    if row.query.device.type != "cpu":
        return _on_device(ragged, rows, sinks)
    return with_sinks(_on_cpu(ragged, rows), sinks)


def _on_cpu(ragged: Ragged, rows: int | None) -> ScoreStats:
    row = ragged.row
    calls = list(ragged.calls()) or [row]
    sample = None if rows is None else _sample(ragged, rows)
    if sample is None:
        return _stats(ragged, _joined([measure_rows(call) for call in calls]))
    found, bound = _look(ragged, calls, sample), torch.stack([max_bound(call) for call in calls]).amax(0)
    return ScoreStats(row.query.shape[1], exact=False, pool=Unpooled(lambda: found, lambda: bound, sample))


def moments_of_sequences(ragged: Ragged, moments: Callable[[Call], ScoreMoments]) -> ScoreMoments:
    """Return the moments of all sequences that have scores."""
    found = [moments(call) for call in ragged.calls() if call.query.numel() and call.key.numel()]
    total = found[0] if found else moments(ragged.row)
    for each in found[1:]:
        total = total + each
    return total


def _on_device(ragged: Ragged, rows: int | None, sinks: Tensor | None) -> ScoreStats:
    """Measure by one pass of a kernel, over sequences or documents; else sequence by sequence."""
    if rows is None and on_cuda.measures_sequences(ragged):
        return on_cuda.measure_sequences(ragged, sinks)
    documents = ragged.as_documents()
    if documents is not None and sampled.measures(documents):
        return sampled.measure(documents, rows, sinks)
    share = [None if rows is None else _share(rows, length, ragged) for length in ragged.rows.lengths]
    parts = [measured(call, some, sinks=sinks) for call, some in zip(ragged.calls(), share, strict=True)]
    return merged_when_read(parts or [measured(ragged.row, None, sinks=sinks)])


def _share(rows: int, length: int, ragged: Ragged) -> int:
    return max(2, -(-rows * length // max(1, ragged.row.query.shape[-2])))


def _attend_apart(call: Call) -> tuple[Tensor, RowSums]:
    with torch.no_grad(), without_autocast(call.query):
        found = measure_rows(call)
    return run(call), found


def _stats(ragged: Ragged, found: RowSums) -> ScoreStats:
    return ScoreStats(ragged.row.query.shape[1], exact=True, pool=Unpooled(lambda: found))


def _joined(parts: Sequence[RowSums]) -> RowSums:
    """Return the rows of all parts as those of one batch entry."""
    return RowSums(*(torch.cat([getattr(part, name) for part in parts], -1) for name in ROW_FIELDS))


def _sample(ragged: Ragged, rows: int) -> Sample | None:
    """Draw rows of all sequences, in strata of neighbouring positions; `positions` are of the one row."""
    total = ragged.row.query.shape[-2]
    if rows >= total:
        return None
    foreseen = foreseen_variance(ragged.row) if ragged.row.key.numel() else None  # as if keys of all were alike
    at = torch.cat([torch.arange(length) for length in ragged.rows.lengths])
    order = at.argsort(stable=True)
    drawn = sample_rows(rows, 1, total, True, None if foreseen is None else foreseen[..., order])
    if drawn is None:
        return None
    return Sample(order[drawn.positions], drawn.stratum, drawn.sizes, None, drawn.foreseen)


def _look(ragged: Ragged, calls: list[Call], sample: Sample) -> RowSums:
    """Return the sampled rows, in the sample's order; found sequence by sequence."""
    order = sample.positions.argsort()
    at = sample.positions[order]
    ends = torch.searchsorted(at, ragged.rows.offsets.to(at)).tolist()
    found = [
        measure_rows(call, at[start:stop] - int(begin))
        for call, (start, stop), begin in zip(calls, pairwise(ends), ragged.rows.offsets.tolist(), strict=False)
        if stop > start
    ]
    rows, back = _joined(found), order.argsort()
    return RowSums(*(getattr(rows, name)[..., back] for name in ROW_FIELDS))
