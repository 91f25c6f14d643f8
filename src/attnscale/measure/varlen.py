"""Packed tokens with statistics."""

from typing import Any

from torch import Tensor

from attnscale.attending.ragged import NO_WINDOW, Starts, Window, as_tokens, layouts, packed_call, window_of
from attnscale.measure.measuring import check_rows
from attnscale.measure.sequences import attend_sequences
from attnscale.measure.stats import ScoreStats
from attnscale.numerics import uncompiled
from attnscale.rules.apply import Scale


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
