"""Measure one attention call on the tensors of a step: a kernel's arguments, or scores that are written out."""

import numpy as np
import torch
from torch import Tensor

from attnscale.measure.cuda.probe import probe
from attnscale.measure.lengths import mean_lengths
from attnscale.numerics import constant_on, wide_dtype
from attnscale.probes.calls import ProbedCall
from attnscale.probes.intercept import MODIFICATIONS, AttentionCall, WrittenScores
from attnscale.visibility import NEVER_A_SCORE, Visibility
from attnscale.watching.kernels import KernelCall
from attnscale.watching.kernels.kernel_call import KernelScores, measured_lengths
from attnscale.watching.kernels.sdpa import modification
from attnscale.watching.plan import PlannedCall
from attnscale.watching.rows import Rows, spread_positions
from attnscale.watching.watcher import Settings
from attnscale.watching.written_call import DISAGREEMENT, NORMED_ROWS, PROBED_ROWS, fit


def measure_by_kernel(call: ProbedCall, given: AttentionCall, settings: Settings) -> bool:
    """Measure a call by the fast path of a GPU, which writes to the buffer; return False where that does not take it.

    That a mask is causal was found out by the trace: reading it here would wait for the GPU.
    """
    if not given.query.is_cuda or settings.rows is None or given.modification is not None:
        return False
    mask, hidden, padding, is_causal = given.mask, given.hidden_keys, None, given.is_causal
    if mask is not None:
        seen = Visibility.of(mask, is_causal)
        mask, is_causal = seen.mask, seen.last is not None
    template = call.planned.template
    if hidden is not None and template.attends_itself and hidden.shape[-1] == call.query_len:
        padding = hidden.expand(call.batch, -1)
    sizes = given.scale, is_causal, settings.rows
    found = probe(given.query, given.key, mask, padding, hidden, *sizes, call.buffer.table, call.buffer.lengths)
    if found is None:
        return False
    call.probed, call.padding, call.multiplier = found, padding, given.scale
    call.causal = is_causal if mask is None else template.causal
    return True


def measure_by_rows(call: ProbedCall, given: AttentionCall, settings: Settings) -> None:
    """Measure a call by its rows, whatever it is, as a trace would have."""
    kernel, template = _kernel_call(given, call.planned.template.attends_itself), call.planned.template
    if kernel.score_mod is not None:
        found = kernel.modified(kernel.score_mod, settings.rows)
    else:  # that a mask is causal, and no bias, was found out by the trace: reading it here would wait for the device
        causal = kernel.is_causal if kernel.visibility.mask is None else template.causal
        bias = template.highest_bias if kernel.query.is_cuda else kernel.highest_bias()
        stats, hidden = kernel.stats(settings.rows), kernel.hidden_keys
        found = KernelScores(stats, kernel.scale, kernel.softcap, bias, causal, hidden, kernel.padding)
    call.causal, call.softcap, call.highest_bias = found.causal, found.softcap, max(0.0, found.bias or 0.0)
    call.stats, call.padding, call.multiplier = found.stats, found.padding, found.multiplier
    lengths = measured_lengths(kernel.query, kernel.key, (found.padding, found.hidden_keys), settings.rows is None)
    for row, found_lengths in zip(call.buffer.lengths, lengths, strict=False):
        row.copy_(found_lengths)
    if template.wiring.biased:  # FlexAttention; other biased calls are not planned
        call.buffer.cosine.copy_(kernel.cosine(found))
        call.has_cosine = True


def _kernel_call(given: AttentionCall, attends_itself: bool) -> KernelCall:
    if given.modification is None:
        seen = Visibility.of(given.mask, given.is_causal)
        return KernelCall(
            "sdpa", given.query, given.key, given.scale, visibility=seen, hidden=given.hidden_keys,
            attends_itself=attends_itself,
        )  # fmt: skip
    functions, score_buffers, mask_buffers = given.modification
    modify = modification(*MODIFICATIONS[functions], score_buffers, mask_buffers, is_traced=True)
    return KernelCall("flex", given.query, given.key, given.scale, score_mod=modify, attends_itself=attends_itself)


def measure_by_scores(call: ProbedCall, given: WrittenScores, settings: Settings) -> None:
    """Measure an attention that is written out from its scores, without waiting for a GPU."""
    planned, template, rows = call.planned.written, call.planned.template, settings.rows
    assert planned is not None
    scores = given.layout.scores_by_head(given.scores)
    query, key = given.layout.operands(given.left, given.right)
    by_key = scores.amax(-2)  # of every score there is, read once
    hidden = by_key.amax(1) <= NEVER_A_SCORE
    padding = hidden if template.attends_itself and call.key_len == call.query_len else None

    def rows_at(positions: Tensor) -> tuple[Tensor, Tensor]:
        chosen = scores.index_select(-2, positions.to(scores.device, non_blocking=True))
        chosen = chosen.to(wide_dtype(chosen))
        shown = chosen > NEVER_A_SCORE
        kept = None if padding is None else ~padding[:, None, positions.to(padding.device, non_blocking=True), None]
        return chosen, shown if kept is None else shown & kept

    highest = by_key.amax((0, 2)).double()
    by_row = Rows(len(scores), call.heads, call.query_len, call.key_len, planned.is_uneven, rows_at)
    call.stats = by_row.measure(rows, lambda: highest)
    call.padding, call.causal, call.softcap = padding, template.causal, template.softcap
    call.highest_bias = template.highest_bias
    call.buffer.scales.copy_(_scales(call.planned, scores, query, key))
    every = rows is None
    call.buffer.lengths[0].copy_(_norm(query, padding, every))
    call.buffer.lengths[1].copy_(_norm(key, hidden, every))


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


def _norm(vectors: Tensor, left_out: Tensor | None, every: bool) -> Tensor:
    at = _spread(vectors, vectors.shape[-2] if every else NORMED_ROWS)
    return mean_lengths(_wide(vectors[:, :, at]), None if left_out is None else left_out[:, at])


def _spread(vectors: Tensor, most: int) -> Tensor:
    """Return positions spread over the queries, or keys, on their device."""
    return constant_on(vectors.device, spread_positions(vectors.shape[-2], most).numpy())


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(wide_dtype(tensor))
