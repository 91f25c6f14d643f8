"""A ragged batch with its statistics; as one operator in a graph, in which lengths are not known, and under vmap."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnscale.attending import sequences_op, varlen
from attnscale.attending.ragged import Ragged
from attnscale.attending.running import in_operator, run_sequences
from attnscale.attending.sequences_op import ARGUMENTS, arguments_of, attended, output_of, ragged_of
from attnscale.measure import sequences
from attnscale.measure.pool import with_sinks
from attnscale.measure.pooled import SUMS, TABLE, Table
from attnscale.measure.stats import ScoreStats, table_of
from attnscale.measure.uncertainty import Uncertainty, packed_size
from attnscale.numerics import without_autocast
from attnscale.torch_internals import in_transform, unseen

Measured = tuple[Tensor, Tensor, Tensor]


def attend_with_stats(ragged: Ragged, rows: int | None, sinks: Tensor | None = None) -> tuple[Tensor, ScoreStats]:
    """Return the output, and the statistics of every row or of about this many a head."""
    if sinks is not None:
        output = run_sequences(ragged.with_sinks(sinks))
        with torch.no_grad(), without_autocast(ragged.row.query):
            return output, with_sinks(measure(ragged, rows), sinks)
    if not unseen(ragged.rows.offsets):
        if not in_transform():
            return sequences.attend_sequences(ragged, rows)
        return run_sequences(ragged), _measure_unseen(ragged, rows)
    if varlen.serves(ragged):
        return run_sequences(ragged), _measure_unseen(ragged, rows)
    output, *found = measured_sequences(*arguments_of(ragged), rows, True)
    return output, _stats(ragged, rows, *found)


def measure(ragged: Ragged, rows: int | None) -> ScoreStats:
    """The statistics alone."""
    known = not unseen(ragged.rows.offsets) and not in_transform()
    return sequences.measured_sequences(ragged, rows) if known else _measure_unseen(ragged, rows)


def _measure_unseen(ragged: Ragged, rows: int | None) -> ScoreStats:
    with torch.no_grad():
        _, *found = measured_sequences(*arguments_of(ragged), rows, False)
    return _stats(ragged, rows, *found)


def _stats(ragged: Ragged, rows: int | None, table: Tensor, errors: Tensor) -> ScoreStats:
    exact = rows is None or rows >= ragged.row.query.shape[-2]
    known = Table(table, None if exact else partial(Uncertainty.unpacked, errors, len(SUMS)))
    return ScoreStats(ragged.row.query.shape[1], exact=exact, pool=known)


@torch.library.custom_op(
    "attnscale::measured_sequences",
    mutates_args=(),
    schema=f"({ARGUMENTS}, SymInt? rows, bool attends) -> (Tensor, Tensor, Tensor)",
)
def measured_sequences(*given: Any) -> Measured:
    """The output, or nothing; the table of the heads; how far it may be off where some rows stand for all."""
    *arguments, rows, attends = given
    ragged, dropped = ragged_of(*arguments)
    with in_operator():
        if attends and dropped is None:
            output, stats = sequences.attend_sequences(ragged, rows)
        else:
            stats = sequences.measured_sequences(ragged, rows)
            output = attended(ragged, dropped, run_sequences) if attends else ragged.row.query.new_empty(0)
    errors = stats.pooled.uncertainty
    nothing = stats.pooled.sums.new_zeros(stats.heads, packed_size(len(SUMS)) if rows is not None else 0)
    return output.contiguous(), table_of(stats.pooled), nothing if errors is None else errors.packed()


@measured_sequences.register_fake
def _measured_sequences_fake(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> Measured:
    *_, rows, attends = given
    output = output_of(query, value) if attends else query.new_empty(0)
    widths = TABLE, packed_size(len(SUMS)) if rows is not None else 0
    table, errors = (query.new_empty(query.shape[1], width, dtype=torch.float64) for width in widths)
    return output, table, errors


def _save(ctx: Any, inputs: tuple[Any, ...], output: Measured) -> None:
    ctx.mark_non_differentiable(*output[1:])
    sequences_op.save(ctx, inputs, output)


def _backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    return *sequences_op.backward(ctx, grad), None, None


measured_sequences.register_autograd(_backward, setup_context=_save)
