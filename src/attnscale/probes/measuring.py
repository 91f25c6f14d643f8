"""Measure one attention call on the tensors of a step: a kernel's arguments, or scores that are written out."""

import numpy as np
import torch
from torch import Tensor

from attnscale.measure.cuda.sampled import probe
from attnscale.measure.lengths import add_lengths_
from attnscale.numerics import constant_on, wide_dtype
from attnscale.probes.calls import ProbedCall
from attnscale.probes.intercept import AttentionCall
from attnscale.visibility import NEVER_A_SCORE, Visibility
from attnscale.watching.kernels import KernelCall
from attnscale.watching.plan import PlannedCall
from attnscale.watching.rows import Rows, spread_positions
from attnscale.watching.watcher import Settings
from attnscale.watching.written_call import DISAGREEMENT, NORMED_ROWS, PROBED_ROWS, fit


def measure_by_kernel(call: ProbedCall, given: AttentionCall, settings: Settings) -> bool:
    """Measure a call by the fast path of a GPU, which writes to the buffer; return False where it cannot."""
    if not given.query.is_cuda or settings.rows is None:
        return False
    mask, hidden, padding, is_causal = given.mask, given.hidden_keys, None, given.is_causal
    if mask is not None:
        seen = Visibility.of(mask, is_causal)
        mask, is_causal = seen.mask, seen.last is not None
    if hidden is not None and given.attends_itself and hidden.shape[-1] == call.query_len:
        padding = hidden.expand(call.batch, -1)
    sizes = given.scale, is_causal, settings.rows
    found = probe(given.query, given.key, mask, padding, hidden, *sizes, call.buffer.table, call.buffer.lengths)
    if found is None:
        return False
    call.probed, call.padding, call.multiplier = found, padding, given.scale
    return True


def measure_by_rows(call: ProbedCall, given: AttentionCall, settings: Settings) -> None:
    """Measure a call of SDPA by its rows, as a trace would have."""
    seen = Visibility.of(given.mask, given.is_causal)
    kernel = KernelCall(
        "sdpa", given.query, given.key, given.scale, visibility=seen, hidden=given.hidden_keys,
        attends_itself=given.attends_itself,
    )  # fmt: skip
    call.stats, call.padding, call.multiplier = kernel.stats(settings.rows), kernel.padding, given.scale
    _add_lengths(call, given.query, given.key, kernel.padding, kernel.hidden_keys, settings)


def measure_by_scores(call: ProbedCall, given: AttentionCall, settings: Settings) -> None:
    """Measure an attention that is written out from its scores, without waiting for a GPU."""
    planned, rows = call.planned.written, settings.rows
    assert planned is not None  # or it is a call of SDPA
    assert given.scores is not None
    scores = planned.layout.scores_by_head(given.scores)
    query, key = planned.layout.operands(given.query, given.key)
    by_key = scores.amax(-2)  # of every score there is, read once
    hidden = by_key.amax(1) <= NEVER_A_SCORE
    padding = hidden if given.attends_itself and call.key_len == call.query_len else None

    def rows_at(positions: Tensor) -> tuple[Tensor, Tensor]:
        chosen = scores.index_select(-2, positions.to(scores.device, non_blocking=True))
        chosen = chosen.to(wide_dtype(chosen))
        shown = chosen > NEVER_A_SCORE
        kept = None if padding is None else ~padding[:, None, positions.to(padding.device, non_blocking=True), None]
        return chosen, shown if kept is None else shown & kept

    highest = by_key.amax((0, 2)).double()
    by_row = Rows(len(scores), call.heads, call.query_len, call.key_len, planned.is_uneven, rows_at)
    call.stats = by_row.measure(rows, lambda: highest)
    call.padding = padding
    call.buffer.scales.copy_(_scales(call.planned, scores, query, key))
    _add_lengths(call, query, key, padding, hidden, settings)


def _add_lengths(
    call: ProbedCall, query: Tensor, key: Tensor, padding: Tensor | None, hidden: Tensor | None, settings: Settings
) -> None:
    """Add lengths of all queries and keys, or of some that are spread evenly."""
    sides = []
    for vectors, left_out in ((query, padding), (key, hidden)):
        step = 1 if settings.rows is None else max(1, vectors.shape[-2] // NORMED_ROWS)
        sides.append((vectors.detach()[:, :, ::step], None if left_out is None else left_out[:, ::step]))
    (query, padding), (key, hidden) = sides
    add_lengths_(call.buffer.lengths, query, key, padding, hidden)


def _scales(planned: PlannedCall, scores: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the scale that the operations say, or the slope of scores on q·k where a constant was changed."""
    known, softcap = planned.written, planned.template.softcap
    assert known is not None
    factors = np.abs(planned.factors[0]) * np.abs(planned.factors[1])
    stated = constant_on(scores.device, known.multiplier * factors)
    probe = _spread(scores, PROBED_ROWS)
    of_product = _wide(query[0, :, probe]) @ _wide(key[0]).mT
    of_product = of_product * constant_on(of_product.device, known.multiplier).to(of_product.dtype)[:, None, None]
    found = _wide(scores[0, :, probe])
    shown = found > NEVER_A_SCORE
    if softcap is not None:
        found = softcap * torch.atanh((found / softcap).clamp(-1, 1))
        shown = shown & torch.isfinite(found)
        found = found.masked_fill(~shown, 0.0)
    slope, _ = fit(of_product, found, shown)
    return torch.where((slope - 1).abs() > (DISAGREEMENT if known.is_constant else 0.0), stated * slope, stated)


def _spread(vectors: Tensor, most: int) -> Tensor:
    """Return positions spread over the queries, or keys, on their device."""
    return constant_on(vectors.device, spread_positions(vectors.shape[-2], most).numpy())


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(wide_dtype(tensor))
