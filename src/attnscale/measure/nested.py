"""Nested tensors with statistics, or statistics alone."""

import torch
from torch import Tensor

from attnscale.attending.nested import nested_call
from attnscale.inputs import check_sinks
from attnscale.measure.measuring import moments_of
from attnscale.measure.moments import ScoreMoments
from attnscale.measure.pool import with_sinks
from attnscale.measure.sequences import attend_sequences, measured_sequences, moments_of_sequences
from attnscale.measure.stats import ScoreStats
from attnscale.numerics import without_autocast
from attnscale.rules.apply import Scale
from attnscale.visibility import Mask


def attention_with_stats(
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


def score_stats(
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
        return with_sinks(measured_sequences(ragged, rows), sinks)


def score_moments(
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
