"""Statistics as one custom op, which graphs of torch.compile take whole; an attention as arguments of an op."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.inputs import refuse_vmap
from attnscale.measure.measuring import looks_at_all, measured
from attnscale.measure.pooled import SUMS, TABLE, Table
from attnscale.measure.stats import ScoreStats, table_of
from attnscale.measure.uncertainty import Uncertainty, packed_size
from attnscale.visibility import Visibility

SEEN = "Tensor? mask, Tensor? documents_q, Tensor? documents_k, SymInt? last, SymInt? first"
SCORES = f"{SEEN}, float scale, float? softcap"


def arguments_of(call: Call) -> tuple[Any, ...]:
    """Return the arguments of an op for an attention, but the tensors that are multiplied and dropout."""
    seen = call.visibility
    mask = None if seen.mask is None else seen.mask.detach()
    own, theirs = (None, None) if seen.documents is None else seen.documents
    return mask, own, theirs, seen.last, seen.first, call.scale, call.softcap


def call_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    documents_q: Tensor | None,
    documents_k: Tensor | None,
    last: int | None,
    first: int | None,
    scale: float,
    softcap: float | None,
) -> Call:
    """Return the attention of these arguments."""
    documents = None if documents_q is None or documents_k is None else (documents_q, documents_k)
    return Call(query, key, value, Visibility(last, first, mask, documents), 0.0, scale, softcap)


def measure_unseen(call: Call, rows: int | None, sinks: Tensor | None = None) -> ScoreStats:
    """Return the statistics of every row, or of about this many a head."""
    if not torch.compiler.is_compiling():
        refuse_vmap(call.query, call.key)
    table, errors = measured_scores(call.query.detach(), call.key.detach(), *arguments_of(call), rows, sinks)
    exact = rows is None or looks_at_all(call, rows)
    known = Table(table, None if exact else partial(Uncertainty.unpacked, errors, len(SUMS)))
    return ScoreStats(call.query.shape[1], exact=exact, pool=known)


@torch.library.custom_op(
    "attnscale::measured_scores",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, {SCORES}, SymInt? rows, Tensor? sinks) -> (Tensor, Tensor)",
)
def measured_scores(query: Tensor, key: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """Return the table of the heads, and its uncertainty where some rows stand for all."""
    *options, rows, sinks = given
    stats = measured(call_of(query, key, key, *options), rows, sinks=sinks)
    errors = stats.pooled.uncertainty
    width = packed_size(len(SUMS)) if rows is not None else 0
    nothing = stats.pooled.sums.new_zeros(stats.heads, width)
    return table_of(stats.pooled), nothing if errors is None else errors.packed()


@measured_scores.register_fake
def _measured_scores_fake(query: Tensor, key: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    widths = TABLE, packed_size(len(SUMS)) if given[-2] is not None else 0
    table, errors = (query.new_empty(query.shape[1], width, dtype=torch.float64) for width in widths)
    return table, errors
