"""Public functions that measure attention scores."""

from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from attnscale.attending.nested import any_nested
from attnscale.inputs import check_inputs, check_sinks
from attnscale.measure import attending, ragged
from attnscale.measure.cuda.launch import is_intercepted, layout_key
from attnscale.measure.measuring import check_rows, measure, moments_of
from attnscale.measure.moments import ScoreMoments
from attnscale.measure.stats import ScoreStats
from attnscale.numerics import uncompiled, without_autocast
from attnscale.operator import scaled_call
from attnscale.rules.apply import Scale
from attnscale.shapes import attention_shape
from attnscale.visibility import Mask, Visibility

Planned = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ScoreStats]]


@lru_cache(maxsize=4096)
def _plans_for(layouts: Hashable) -> list[Planned]:
    """Return the plan for calls with these layouts; an empty list until one of them has passed the checks.

    For short sequences on a GPU, the time on the host dominates. If the scale is a number, the checks and the folding
    depend on layouts and flags only, so a repeated call goes directly to its kernels.
    """
    return []


def score_stats(
    query: Tensor,
    key: Tensor,
    *,
    scale: Scale = None,
    attn_mask: Mask = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    rows: int | None = None,
) -> ScoreStats:
    """Return statistics of the scores that attention() passes to softmax, one value per query head.

    `rows=None` measures every row. `rows=N` samples about N rows per head, spread over positions, and adds standard
    errors. `sinks`, (heads,), is one learned logit per head that joins the denominator of each row.
    A score that a float mask moves far below all others counts as hidden. Above 1e19, the spread of scores is exact on
    a CPU only: GPU kernels sum squares in float32 and return inf or NaN.

    >>> stats = score_stats(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 7, 8))
    >>> stats.top1.tolist() == [1 / 7, 1 / 7], stats.std.tolist()
    (True, [0.0, 0.0])
    """
    check_rows(rows)
    if any_nested(query, key):
        options = attn_mask, is_causal, scale, enable_gqa, softcap, 0.0, sinks
        return uncompiled(ragged.nested_score_stats)(query, key, rows, *options)
    check_inputs(query, key, None, attn_mask, is_causal, enable_gqa, softcap)
    with torch.no_grad(), without_autocast(query):
        seen = Visibility.of(attn_mask, is_causal)
        check_sinks(sinks, query)
        return measure(scaled_call(query, key, key, seen, scale, enable_gqa, softcap, 0.0, sinks), rows)


def score_moments(
    query: Tensor,
    key: Tensor,
    *,
    scale: Scale = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    attn_mask: Mask = None,
    softcap: float | None = None,
) -> ScoreMoments:
    """Return count, mean, variance and variance within rows of scale · q·k, over all visible pairs, in O((n + m) d²).

    With a mask, bias or soft-cap, linear time is impossible: every score is computed, and `method` says so.

    >>> moments = score_moments(torch.randn(1, 2, 100_000, 16), torch.randn(1, 2, 50_000, 16), scale="unscaled")
    >>> bool((moments.variance.sqrt() - 4).abs().max() < 0.05)
    True
    """
    if any_nested(query, key):
        return uncompiled(ragged.nested_score_moments)(query, key, attn_mask, is_causal, scale, enable_gqa, softcap)
    check_inputs(query, key, None, attn_mask, is_causal, enable_gqa, softcap)
    with torch.no_grad(), without_autocast(query):
        return moments_of(scaled_call(query, key, key, Visibility.of(attn_mask, is_causal), scale, enable_gqa, softcap))


def attention_with_stats(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Scale = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    rows: int | None = None,
) -> tuple[Tensor, ScoreStats]:
    """Return attention() and score_stats() of the same scores; only the output has gradients."""
    if any_nested(query, key, value):
        check_rows(rows)
        options = attn_mask, is_causal, scale, enable_gqa, softcap, dropout_p, sinks
        return uncompiled(ragged.nested_attention_with_stats)(query, key, value, rows, *options)
    plans: list[Planned] | None = None
    if attn_mask is None and softcap is None and sinks is None:
        layouts = _layouts_of(query, key, value, scale, dropout_p, is_causal, enable_gqa, rows)
        plans = None if layouts is None else _plans_for(layouts)
        if plans:
            return plans[0](query, key, value)
    check_inputs(query, key, value, attn_mask, is_causal, enable_gqa, softcap, dropout_p)
    check_rows(rows)
    shape = attention_shape(query, key, value, enable_gqa)
    check_sinks(sinks, query)
    seen = Visibility.of(attn_mask, is_causal)
    call = scaled_call(query, key, value, seen, scale, enable_gqa, softcap, dropout_p, sinks)
    plan: Planned | None = None
    if rows is not None and sinks is None and attending.takes_plain(call) and not is_intercepted(query, key):
        plan = partial(attending.attend_sampling, rows, dropout_p, call.scale, call.visibility.is_causal)
        output, stats = plan(call.query, call.key, call.value)
    else:
        output, stats = attending.attend_or_measure(call, rows)
        if plans is not None and rows is None and attending.attends(call):
            plan = partial(attending.attend_directly, attending.attend_for(call), call.scale, is_causal)
    is_as_passed = call.query is query and call.key is key and call.value is value
    if plan is not None and plans is not None and is_as_passed:
        plans.append(plan)
    return output.reshape(shape), stats


def _layouts_of(query: Tensor, key: Tensor, value: Tensor, scale: Any, *flags: Hashable) -> Hashable:
    if not isinstance(query, Tensor):
        return None  # the checks refuse it
    plain = query.is_cuda and key.is_cuda and value.is_cuda and query.dim() == key.dim() == value.dim() == 4
    if not plain or not (scale is None or type(scale) is float) or is_intercepted(query, key, value):
        return None
    cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return *layout_key(query), *layout_key(key), *layout_key(value), scale, cast, *flags
