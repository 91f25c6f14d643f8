"""Attention and the sums of its rows from one pass on a CPU, with the gradients of SDPA."""

from typing import Any

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cuda.sdpa import attention_rows_backward
from attnscale.measure.graph_op import SCORES, arguments_of, call_of
from attnscale.measure.row_blocks import measure_rows
from attnscale.measure.row_sums import ROW_FIELDS, RowSums
from attnscale.measure.threads import usable
from attnscale.torch_internals import modes_in_place

FOUND = ", ".join(f"Tensor {name}" for name in ("output", *ROW_FIELDS))


def serves(call: Call) -> bool:
    """Return True if one pass gives this output too, and torch has its backward where a gradient is wanted."""
    query, key, value = call.query, call.key, call.value
    is_plain = query.device.type == "cpu" and query.dtype == key.dtype == value.dtype and call.dropout_p == 0.0
    if not is_plain or not min(query.numel(), value.numel()) or torch.is_autocast_enabled("cpu") or not usable():
        return False
    if call.visibility.hides_by_numbers:
        return False
    return not _learns(call) or (
        call.visibility.is_plain
        and call.softcap is None
        and query.shape[-1] == value.shape[-1]
        and torch.backends.cuda.flash_sdp_enabled()  # who asks for SDPA's math wants second derivatives
    )


def _learns(call: Call) -> bool:
    wanted = any(tensor.requires_grad for tensor in (call.query, call.key, call.value))
    return torch.is_grad_enabled() and (wanted or call.mask_learns)


def attend_rows(call: Call) -> tuple[Tensor, RowSums]:
    """Return softmax(scores) V, with gradients where they are wanted, and the sums of every row."""
    if not _learns(call):
        return _attended(call)
    kept: list[RowSums] = []
    output: Tensor = _Attention.apply(call.query, call.key, call.value, call, kept)  # type: ignore[no-untyped-call]
    return output, kept[0]


def _attended(call: Call) -> tuple[Tensor, RowSums]:
    if not modes_in_place():
        return _passed_over(call)
    # products and exponentials would be no attention to a mode that watches a model: one op is
    output, *sums = one_pass(call.query, call.key, call.value, *arguments_of(call))
    return output, RowSums(*sums)


def _passed_over(call: Call) -> tuple[Tensor, RowSums]:
    shape = (*call.query.shape[:-1], call.value.shape[-1])
    output = torch.empty(shape, dtype=torch.promote_types(call.query.dtype, torch.float32))
    rows = measure_rows(call, output=output)
    return output.to(call.query.dtype), rows


@torch.library.custom_op(
    "attnscale::one_pass",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {SCORES}) -> ({FOUND})",
)
def one_pass(*given: Any) -> tuple[Tensor, ...]:
    """Return the output, and the sums of every row in their order."""
    output, rows = _passed_over(call_of(*given))
    return output, *(getattr(rows, name).clone() for name in ROW_FIELDS)


class _Attention(torch.autograd.Function):
    """Run the pass forward, and torch's own kernel backward, with the lse that the pass found."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call, kept: list[RowSums]) -> Tensor:
        output, rows = _attended(call)
        kept.append(rows)
        ctx.save_for_backward(query, key, value, output, rows.lse)
        ctx.scale, ctx.is_causal = call.scale, call.visibility.is_causal
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *attention_rows_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.is_causal), None, None
