"""Chooses how scores are measured: torch in blocks of rows, a kernel, or a few sampled rows."""

import torch
from torch import Tensor

from attnscale.errors import SettingError
from attnscale.inputs import check_inputs
from attnscale.kernels.call import Call, fold
from attnscale.masks import visible_keys
from attnscale.measure.blocks import measure_rows
from attnscale.measure.moments import linear_moments
from attnscale.measure.pool import pool_rows
from attnscale.measure.sampling import sample_positions
from attnscale.measure.stats import ScoreStats
from attnscale.operator import attention
from attnscale.rules.apply import Scale, apply_scale

LINEAR = "moments in linear time"
BOUND_SLACK = 1e-5  # the rounding of a float32 norm, with room to spare


def score_stats(
    query: Tensor,
    key: Tensor,
    *,
    scale: Scale = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    softcap: float | None = None,
    rows: int | None = None,
) -> ScoreStats:
    """Statistics of the scores that attention() would put into its softmax, one value a query head.

    `rows=None` looks at every row, `rows=N` at about N rows a head, spread over position, with standard errors.

    >>> stats = score_stats(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 7, 8))
    >>> stats.top1.tolist() == [1 / 7, 1 / 7], stats.std.tolist()
    (True, [0.0, 0.0])
    """
    check_inputs(query, key, None, attn_mask, is_causal, enable_gqa, softcap)
    _check_rows(rows)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        query, key, factor = apply_scale(scale, query, key, lambda: visible_keys(query, key, attn_mask, is_causal))
        query, key, _, mask = fold(query, key, key, attn_mask, enable_gqa)
        return _measure(Call(query, key, key, mask, 0.0, is_causal, factor, softcap), rows)


def attention_with_stats(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Scale = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
    rows: int | None = None,
) -> tuple[Tensor, ScoreStats]:
    """attention() and score_stats() of the same scores; the output has gradients, the statistics have none."""
    _check_rows(rows)
    output = attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap=softcap)
    stats = score_stats(
        query,
        key,
        scale=scale,
        attn_mask=attn_mask,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        softcap=softcap,
        rows=rows,
    )
    return output, stats


def _measure(call: Call, rows: int | None) -> ScoreStats:
    obstacle = _obstacle(call)
    uneven = call.is_causal or call.attn_mask is not None
    sample = None if rows is None else sample_positions(rows, call.query.shape[-2], call.query.shape[0], uneven)
    linear = sample is None and obstacle is None
    sums = measure_rows(call, None if sample is None else sample.positions, moments=not linear)
    moments = linear_moments(call.query, call.key, call.scale, call.is_causal) if linear else None
    method = (
        LINEAR if linear else ("moments from the sampled rows" if sample else f"moments from the scores: {obstacle}")
    )
    return pool_rows(sums, _max_bound(call), method, sample, moments)


def _obstacle(call: Call) -> str | None:
    """What keeps the moments from linear time."""
    if call.softcap is not None:
        return "a soft-cap is not linear in q·k"
    return None if call.attn_mask is None else "a mask or bias is not a product of q and k"


def _max_bound(call: Call) -> Tensor:
    """Cauchy–Schwarz: no score of a head is above |a| · max‖q‖ · max‖k‖, plus the largest bias."""
    if not call.query.numel() or not call.key.numel():
        return call.query.new_full(call.query.shape[1:2], -torch.inf)
    norms = [torch.linalg.vector_norm(tensor.float(), dim=-1).amax(-1) for tensor in (call.query, call.key)]
    bound = abs(call.scale) * norms[0] * norms[1].repeat_interleave(call.group, dim=1)
    if call.softcap is not None:
        bound = call.softcap * torch.tanh(bound / call.softcap)
    if call.attn_mask is not None and call.attn_mask.is_floating_point():
        bound = bound + call.attn_mask.amax((-2, -1))
    highest: Tensor = (bound * (1 + BOUND_SLACK)).amax(0)
    return highest


def _check_rows(rows: int | None) -> None:
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise SettingError(f"Expected rows as a whole number of at least 1, or None for every row, got {rows!r}.")
