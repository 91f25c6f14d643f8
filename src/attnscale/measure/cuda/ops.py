"""attention and its row statistics as torch operators: one call to autograd, to torch.compile and to CUDA graphs."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cuda.backward import attention_rows_backward
from attnscale.measure.row_blocks import measure_rows
from attnscale.numerics import wide_dtype
from attnscale.visibility import Visibility

HOPPER = (9, 0)  # the compute capability its kernel is written for
ATTENDED = ("max", "total", "gap", "participation", "lse")  # what attention_rows leaves of a row
SCORED = ("max", "total", "gap", "participation", "mean", "deviation")  # and score_rows, as RowSums names them
LEAST_SPAN = 128  # keys, of the spans a sampled row is cut into
PARTS = 264  # spans of all heads, two a multiprocessor of an H200: fewer leave it idle, more end before they are fast


@torch.library.custom_op("attnscale::attention_rows", mutates_args=(), device_types="cuda")
def attention_rows(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    """softmax(scale · QKᵀ) V, and ATTENDED of each row without gradient: (5, batch, heads, q_len)."""
    if _on_hopper(query.device.index) and scale != 0.0:
        from attnscale.measure.cuda import hopper  # not before it is needed: a CPU may have no triton

        if hopper.supported(query, key, value):
            return hopper.attend_rows(query, key, value, scale, is_causal)
    from attnscale.measure.cuda import triton

    return triton.attend_rows(query, key, value, scale, is_causal)


@cache
def _on_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == HOPPER


@attention_rows.register_kernel("cpu")
def _attention_rows_cpu(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, scale=scale
    )
    largest, total, gap, participation, _, _ = _measured(query, key, None, scale, is_causal)
    return output.contiguous(), torch.stack([largest, total, gap, participation, lse.to(largest.dtype)])


@attention_rows.register_fake
def _attention_rows_fake(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), _empty(query, len(ATTENDED), *query.shape[:3])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float, bool], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ctx.scale, ctx.is_causal = inputs
    attended, sums = output
    ctx.mark_non_differentiable(sums)
    ctx.save_for_backward(query, key, value, attended, sums)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, attended, sums = ctx.saved_tensors
    lse = sums[ATTENDED.index("lse")]
    return *attention_rows_backward(grad, query, key, value, attended, lse, ctx.scale, ctx.is_causal), None, None


attention_rows.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("attnscale::score_rows", mutates_args=(), device_types="cuda")
def score_rows(
    query: Tensor, key: Tensor, lse: Tensor | None, rows: Tensor | None, scale: float, is_causal: bool
) -> Tensor:
    """SCORED of the query rows at these positions (None: all), (6, batch, heads, rows).

    `lse`, (batch, heads, q_len), is what the forward of the same attention found; it only makes this faster.
    """
    from attnscale.measure.cuda import triton

    return triton.score_rows(query, key, lse, rows, scale, is_causal)


@score_rows.register_kernel("cpu")
def _score_rows_cpu(
    query: Tensor, key: Tensor, lse: Tensor | None, rows: Tensor | None, scale: float, is_causal: bool
) -> Tensor:
    return torch.stack(_measured(query, key, rows, scale, is_causal))


@score_rows.register_fake
def _score_rows_fake(
    query: Tensor, key: Tensor, lse: Tensor | None, rows: Tensor | None, scale: float, is_causal: bool
) -> Tensor:
    return _empty(query, len(SCORED), *query.shape[:2], query.shape[2] if rows is None else rows.shape[0])


@torch.library.custom_op("attnscale::sample_rows", mutates_args=(), device_types="cuda")
def sample_rows(
    query: Tensor, key: Tensor, rows: Tensor, scale: float, is_causal: bool, bounds: bool
) -> tuple[Tensor, Tensor]:
    """SCORED of the rows at these positions over every span of keys, (6, spans, batch, heads, rows).

    With `bounds`, also the largest ‖q‖² and ‖k‖² of as many parts of the queries and keys: (2, spans, batch, heads).
    """
    from attnscale.measure.cuda import triton

    return triton.sample_rows(query, key, rows, scale, is_causal, bounds, key_span(query, key))


@sample_rows.register_kernel("cpu")
def _sample_rows_cpu(
    query: Tensor, key: Tensor, rows: Tensor, scale: float, is_causal: bool, bounds: bool
) -> tuple[Tensor, Tensor]:
    sums = torch.stack(_measured(query, key, rows, scale, is_causal))
    if not bounds:
        return sums.unsqueeze(1), _empty(query, 0, 1, *query.shape[:2])
    wide = wide_dtype(query)
    longest = [tensor.to(wide).square().sum(-1).amax(-1) for tensor in (query, key)]
    longest[1] = longest[1].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return sums.unsqueeze(1), torch.stack(longest).unsqueeze(1)


@sample_rows.register_fake
def _sample_rows_fake(
    query: Tensor, key: Tensor, rows: Tensor, scale: float, is_causal: bool, bounds: bool
) -> tuple[Tensor, Tensor]:
    spans = -(-key.shape[2] // key_span(query, key))
    parts = spans, *query.shape[:2]
    return _empty(query, len(SCORED), *parts, rows.shape[0]), _empty(query, 2 if bounds else 0, *parts)


def key_span(query: Tensor, key: Tensor) -> int:
    """How many keys one program of the sampling kernel takes: as many as fill the GPU; on a CPU, all."""
    if query.device.type == "cpu":
        return key.shape[2]
    parts = max(1, PARTS // (query.shape[0] * query.shape[1]))
    return -(-key.shape[2] // (parts * LEAST_SPAN)) * LEAST_SPAN


def _no_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*([output] if isinstance(output, Tensor) else output))


score_rows.register_autograd(lambda ctx, *gradients: (None,) * 6, setup_context=_no_gradient)
sample_rows.register_autograd(lambda ctx, *gradients: (None,) * 6, setup_context=_no_gradient)


def _measured(query: Tensor, key: Tensor, rows: Tensor | None, scale: float, is_causal: bool) -> list[Tensor]:
    sums = measure_rows(Call(query, key, key, Visibility.of(None, is_causal), 0.0, scale, None), rows)
    return [getattr(sums, name) for name in SCORED]


def _empty(query: Tensor, *shape: int) -> Tensor:
    return query.new_empty(shape, dtype=wide_dtype(query))
