"""Measurement of one attention: every row or a sample, by a kernel or in blocks of rows, with or without its output."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.attending.running import run
from attnscale.errors import SettingError
from attnscale.inputs import refuse_vmap
from attnscale.measure.cuda import sampled
from attnscale.measure.cuda.launch import capturing, is_intercepted
from attnscale.measure.lengths import max_bound
from attnscale.measure.moments import ScoreMoments, linear_moments
from attnscale.measure.pooled import SUMS, TABLE, MeasuredRows, Table, pack, pool_rows, unpack
from attnscale.measure.row_blocks import measure_rows
from attnscale.measure.row_sums import ROW_FIELDS, RowSums
from attnscale.measure.sampling import LEAST_POSITIONS, Sample, design, foreseen_variance, sample_rows
from attnscale.measure.stats import ScoreStats
from attnscale.measure.uncertainty import packed_size
from attnscale.numerics import without_autocast
from attnscale.torch_internals import in_transform, looks_on, modes_in_place, sdpa_backward, unseen
from attnscale.visibility import Visibility

OPTIONS = (  # arguments of the custom ops, except query, key and value
    "Tensor? mask, Tensor? documents_q, Tensor? documents_k, SymInt? last, SymInt? first, float scale, float? softcap"
)
ROWS = ", ".join(f"Tensor {name}" for name in ROW_FIELDS)


def check_rows(rows: int | None) -> None:
    """Raise SettingError unless `rows` is None or a whole number of at least 1."""
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise SettingError(f"Expected rows as a whole number of at least 1, or None for every row, got {rows!r}.")


def measure(call: Call, rows: int | None) -> ScoreStats:
    """Measure every row, or about `rows` rows per head; as one custom op if a mode or compiler is active."""
    by_op = unseen(call.query) or looks_on() or (call.query.is_cuda and is_intercepted(call.query, call.key))
    return _measure_by_op(call, rows) if by_op else measured(call, rows)


def measured(call: Call, rows: int | None, lse: Tensor | None = None) -> ScoreStats:
    """Measure every row, or about `rows` rows per head; `lse` is the log-sum-exp of every row, if known."""
    call = _with_infinite_mask(call)
    if sampled.measures(call):
        return sampled.measure(call, rows)
    sample = None if rows is None else _sample(call, rows)
    if sample is None:
        pool = MeasuredRows(every_row(call))
    else:
        entries = sample.entries if len(call.query) > 1 else None  # not needed for a batch of one
        positions = sample.positions.to(call.query.device, non_blocking=True)
        found = _with_sinks(call, measure_rows(call, positions, entries=entries))
        pool = MeasuredRows(found, max_bound(call, lse), sample)
    refreshed = call.query.is_cuda and capturing()
    return ScoreStats(call.query.shape[1], exact=sample is None, pool=pool, refreshed=refreshed)


def attend_rows(call: Call) -> tuple[Tensor, RowSums]:
    """Return the output of an attention on a CPU and the sums of every row, from one pass if possible."""
    if not _takes_one_pass(call):
        output = run(call)
        with torch.no_grad(), without_autocast(call.query):
            return output, every_row(_with_infinite_mask(call))
    if not _learns(call):
        return _one_pass(call)
    found: list[RowSums] = []
    output = _Attention.apply(call.query, call.key, call.value, call, found)  # type: ignore[no-untyped-call]
    return output, found[0]


def attends_rows(call: Call) -> bool:
    """Return True if attend_rows() can run: on a CPU, outside compilers and transforms."""
    return call.query.device.type == "cpu" and not unseen(call.query) and not in_transform()


def moments_of(call: Call) -> ScoreMoments:
    """Return the moments of all scores: in linear time if possible, otherwise from every score."""
    if call.visibility.is_plain and call.softcap is None:
        moments = linear_moments(call.query, call.key, call.scale, call.visibility.is_causal)
        if call.query.device.type != "cpu" or bool(moments.variance.isfinite().all()):
            return moments
        return linear_moments(call.query.double(), call.key.double(), call.scale, call.visibility.is_causal)
    pooled = pool_rows(measure_rows(_with_infinite_mask(call)))
    squares, within = (pooled.sums[:, SUMS.index(name)] / pooled.count for name in ("squares", "within"))
    obstacle = "a soft-cap is not linear in q·k" if call.softcap else "a mask or bias is not a product of q and k"
    mean = torch.where(pooled.count > 0, pooled.mean, torch.nan)
    return ScoreMoments(pooled.count, mean, squares, within, f"a pass over the scores: {obstacle}")


def _with_infinite_mask(call: Call) -> Call:
    if call.visibility.bias is None:
        return call
    return replace(call, visibility=call.visibility.with_infinite_mask())


def every_row(call: Call) -> RowSums:
    """Return the sums of every row, in blocks of rows."""
    return _with_sinks(call, measure_rows(call))


def _with_sinks(call: Call, rows: RowSums) -> RowSums:
    return rows if call.sinks is None else rows.with_sinks(call.sinks)


def _sample(call: Call, rows: int) -> Sample | None:
    """Draw rows from all batch entries together on a CPU; on a GPU, draw equally many from each, ahead of time."""
    (batch, _, length, _), device, uneven = call.query.shape, call.query.device, not call.visibility.is_full
    if device.type == "cpu":
        foreseen = foreseen_variance(call) if 0 < rows < batch * length else None
        return sample_rows(rows, batch, length, uneven, foreseen)
    planned = design(rows, length, batch, uneven)
    if planned is None:
        return None
    if device.type == "cuda":
        return sampled.drawn_ahead(planned, batch, device).next()
    return planned.sample(torch.from_numpy(planned.draws(batch)).long())


def _takes_one_pass(call: Call) -> bool:
    query, key, value = call.query, call.key, call.value
    is_one_dtype = query.dtype == key.dtype == value.dtype and not torch.is_autocast_enabled("cpu")
    if not is_one_dtype or call.dropout_p > 0.0 or call.sinks is not None or call.visibility.hides_by_numbers:
        return False
    return not _learns(call) or (
        call.visibility.is_plain
        and call.softcap is None
        and min(query.numel(), value.numel()) > 0
        and query.shape[-1] == value.shape[-1]
        and sdpa_backward(None, "cpu") is not None
        and torch.backends.cuda.flash_sdp_enabled()  # users select SDPA's math backend for second derivatives
    )


def _learns(call: Call) -> bool:
    learns = call.query.requires_grad or call.key.requires_grad or call.value.requires_grad
    return torch.is_grad_enabled() and (learns or call.mask_learns)


def _one_pass(call: Call) -> tuple[Tensor, RowSums]:
    if not modes_in_place():
        return _output_and_rows(call)
    # A dispatch mode that watches a model recognises one custom op as attention, but not separate matrix products.
    output, *sums = one_pass(call.query, call.key, call.value, *_options_of(call))
    return output, RowSums(*sums)


def _output_and_rows(call: Call) -> tuple[Tensor, RowSums]:
    shape = (*call.query.shape[:-1], call.value.shape[-1])
    output = torch.empty(shape, dtype=torch.promote_types(call.query.dtype, torch.float32))
    rows = measure_rows(call, output=output)
    return output.to(call.query.dtype), rows


def _options_of(call: Call) -> tuple[Any, ...]:
    seen = call.visibility
    mask = None if seen.mask is None else seen.mask.detach()
    own, theirs = (None, None) if seen.documents is None else seen.documents
    return mask, own, theirs, seen.last, seen.first, call.scale, call.softcap


def _call_of(
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
    sinks: Tensor | None = None,
) -> Call:
    documents = None if documents_q is None or documents_k is None else (documents_q, documents_k)
    return Call(query, key, value, Visibility(last, first, mask, documents), 0.0, scale, softcap, sinks)


@torch.library.custom_op(
    "attnscale::one_pass",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {OPTIONS}) -> (Tensor output, {ROWS})",
)
def one_pass(*given: Any) -> tuple[Tensor, ...]:
    """Return the output and the fields of RowSums, in the order of ROW_FIELDS."""
    output, rows = _output_and_rows(_call_of(*given))
    return output, *(getattr(rows, name).clone() for name in ROW_FIELDS)


class _Attention(torch.autograd.Function):
    """Attention with our one-pass forward and torch's fused backward kernel, started from the lse of our pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call, found: list[RowSums]) -> Tensor:
        output, rows = _one_pass(call)
        found.append(rows)
        ctx.save_for_backward(query, key, value, output, rows.lse)
        ctx.scale, ctx.is_causal = call.scale, call.visibility.is_causal
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kernel = sdpa_backward(None, "cpu")
        assert kernel is not None  # checked by _takes_one_pass()
        gradients = kernel(grad.contiguous(), *ctx.saved_tensors, 0.0, ctx.is_causal, scale=ctx.scale)
        return *gradients, None, None


def _measure_by_op(call: Call, rows: int | None) -> ScoreStats:
    if not torch.compiler.is_compiling():
        refuse_vmap(call.query, call.key)
    options = *_options_of(call), call.sinks, rows
    table = unpack(measured_scores(call.query.detach(), call.key.detach(), *options))
    exact = rows is None or _takes_all(call, rows)
    pool = Table(table.columns) if exact else table
    return ScoreStats(call.query.shape[1], exact=exact, pool=pool)


def _takes_all(call: Call, rows: int) -> bool:
    batch, length, on_cpu = call.query.shape[0], call.query.shape[2], call.query.device.type == "cpu"
    wanted = max(LEAST_POSITIONS, rows if on_cpu else -(-rows // max(batch, 1)))
    if wanted >= (batch * length if on_cpu else length):  # noqa: SIM103  # the branch turns a symbolic boolean into a plain one
        return True
    return False


@torch.library.custom_op(
    "attnscale::measured_scores",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, {OPTIONS}, Tensor? sinks, SymInt? rows) -> Tensor",
)
def measured_scores(query: Tensor, key: Tensor, *given: Any) -> Tensor:
    """Return the table of the heads, followed by its uncertainty if rows were sampled."""
    *options, rows = given
    return pack(measured(_call_of(query, key, key, *options), rows).pooled, errors=rows is not None)


@measured_scores.register_fake
def _measured_scores_fake(query: Tensor, key: Tensor, *given: Any) -> Tensor:
    width = TABLE + (packed_size(len(SUMS)) if given[-1] is not None else 0)
    return query.new_empty(query.shape[1], width, dtype=torch.float64)
