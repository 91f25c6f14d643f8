"""Attention and the sums of its rows from one pass on a CPU, with the gradients of SDPA."""

from typing import Any

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cpu.one_pass import passed_over, passed_over_in_sight
from attnscale.measure.cpu.threads import usable
from attnscale.measure.cuda.sdpa import attention_rows_backward
from attnscale.measure.row_sums import RowSums
from attnscale.torch_internals import modes_in_place


def serves(call: Call) -> bool:
    """Whether one pass gives this attention's output too, and torch has its backward where a gradient is wanted."""
    if not takes(call) or not usable() or (learns(call) and not (has_backward(call) and _may_flash())):
        return False
    return not call.visibility.hides_by_numbers


def _may_flash() -> bool:
    """Whether the kernel whose backward it is may be used: who asks for SDPA's math wants second derivatives of it."""
    return bool(torch.backends.cuda.flash_sdp_enabled())


def takes(call: Call) -> bool:
    """Whether one pass could give this attention's output, as far as it is told without looking at a mask."""
    return (
        call.query.device.type == "cpu"
        and call.dropout_p == 0.0
        and call.query.numel() > 0
        and call.value.numel() > 0
        and call.query.dtype == call.key.dtype == call.value.dtype
        and not torch.is_autocast_enabled("cpu")
    )


def attend_rows(call: Call) -> tuple[Tensor, RowSums]:
    """softmax(scores) V, with gradients where they are wanted, and the sums of every row."""
    if not learns(call):
        return attended(call)
    kept: list[RowSums] = []
    output: Tensor = _Attention.apply(call.query, call.key, call.value, call, kept)  # type: ignore[no-untyped-call]
    return output, kept[0]


def attended(call: Call) -> tuple[Tensor, RowSums]:
    """The same without gradients."""
    return passed_over_in_sight(call) if modes_in_place() else passed_over(call)


def learns(call: Call) -> bool:
    """Whether a gradient is wanted."""
    wanted = any(tensor.requires_grad for tensor in (call.query, call.key, call.value))
    return torch.is_grad_enabled() and (wanted or call.mask_learns)


def has_backward(call: Call) -> bool:
    """Whether torch has the backward of this, given the lse of each row."""
    return call.visibility.is_plain and call.softcap is None and call.query.shape[-1] == call.value.shape[-1]


class _Attention(torch.autograd.Function):
    """The pass forward; backward, torch's own kernel with the lse that the pass found."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call, kept: list[RowSums]) -> Tensor:
        output, rows = attended(call)
        kept.append(rows)
        ctx.save_for_backward(query, key, value, output, rows.lse)
        ctx.scale, ctx.is_causal = call.scale, call.visibility.is_causal
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *attention_rows_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.is_causal), None, None
