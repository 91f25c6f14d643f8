"""Statistics as one custom op: graphs of torch.compile take it whole."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.inputs import refuse_vmap
from attnscale.measure.call_op import SCORES, arguments_of, call_of
from attnscale.measure.measuring import looks_at_all, measured
from attnscale.measure.pooled import SUMS, TABLE, Table
from attnscale.measure.stats import ScoreStats, table_of
from attnscale.measure.uncertainty import Uncertainty, packed_size


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
    """The table of the heads; how far it may be off where some rows stand for all."""
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
