"""Attention with second derivatives where SDPA has them: what SDPA takes apart, for its shape, is fused here.

The fused kernel of a CPU has one backward, which cannot be differentiated. Where that is asked for, the backward is
formed from SDPA's own operations instead.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnscale.attending import sdpa
from attnscale.attending.call import Call, padded
from attnscale.torch_internals import in_transform, modes_in_place, sdpa_backward, sdpa_forward

SDPA = F.scaled_dot_product_attention  # that who looks at a model's calls puts something else in the place of


def serves(query: Tensor, key: Tensor, value: Tensor, call: Call) -> bool:
    """Whether SDPA would take these apart and ours fuses them, in a run that nobody traces, transforms or looks at."""
    if call.query.device.type != "cpu" or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    if _are_fused_by_sdpa(query, key, value, call.grouped):
        return False
    tensors = call.query, call.key, call.value
    return (
        any(each.requires_grad for each in tensors)
        and min(each.numel() for each in tensors) > 0
        and len({each.dtype for each in tensors}) == 1
        and call.dropout_p == 0.0
        and call.softcap is None
        and (call.visibility.is_plain or _takes_mask(call))
        and torch.backends.cuda.flash_sdp_enabled()
        and not (torch.is_autocast_enabled("cpu") or in_transform() or modes_in_place())
        and F.scaled_dot_product_attention is SDPA
        and sdpa_forward(None, "cpu") is not None
        and sdpa_backward(None, "cpu") is not None
    )


def _are_fused_by_sdpa(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> bool:
    """Whether nothing is to be broadcast, filled up or folded."""
    if not query.dim() == key.dim() == value.dim() == 4 or query.shape[-1] != value.shape[-1]:
        return False
    axes = 1 if grouped else 2  # batch, and heads where each has a key of its own
    return query.shape[:axes] == key.shape[:axes] == value.shape[:axes]


def _takes_mask(call: Call) -> bool:
    mask = call.visibility.mask
    is_of_kernel = mask is not None and mask.dtype in (torch.bool, call.query.dtype)
    return is_of_kernel and sdpa.takes_whole(call) and not call.mask_learns


def attend(call: Call) -> Tensor:
    """The output, (batch, heads, q_len, value_dim)."""
    width = max(call.query.shape[-1], call.value.shape[-1])
    shared = (each.repeat_interleave(call.group, dim=1) if call.group > 1 else each for each in (call.key, call.value))
    query, key, value = (_in_rows(padded(each, width)) for each in (call.query, *shared))
    mask = call.visibility.mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    is_causal = call.visibility.is_causal
    output: Tensor = _Attention.apply(query, key, value, mask, is_causal, call.scale)  # type: ignore[no-untyped-call]
    return output[..., : call.value.shape[-1]]


def _in_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _Attention(torch.autograd.Function):
    """SDPA's fused kernel and its backward, which is differentiable where autograd records it."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
    ) -> Tensor:
        kernel = sdpa_forward(None, "cpu")
        assert kernel is not None
        output: Tensor
        output, lse = kernel(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)[:2]
        ctx.save_for_backward(query, key, value, mask, output, lse)
        ctx.options = {"is_causal": is_causal, "scale": scale}
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, mask, output, lse = ctx.saved_tensors
        backward = _by_operations if torch.is_grad_enabled() else _by_kernel
        found = backward(grad, tensors, mask, (output, lse), ctx.options)
        return *found, None, None, None


def _by_kernel(
    grad: Tensor, tensors: list[Tensor], mask: Tensor | None, left: tuple[Tensor, Tensor], options: dict[str, Any]
) -> tuple[Tensor, ...]:
    kernel = sdpa_backward(None, "cpu")
    assert kernel is not None
    of_query, of_key, of_value = kernel(grad.contiguous(), *tensors, *left, 0.0, attn_mask=mask, **options)
    return of_query, of_key, of_value


def _by_operations(
    grad: Tensor, tensors: list[Tensor], mask: Tensor | None, left: tuple[Tensor, Tensor], options: dict[str, Any]
) -> tuple[Tensor | None, ...]:
    query, key, value = tensors
    with sdpa_kernel(SDPBackend.MATH):
        output = SDPA(query, key, value, mask, **options)
    learning = [each for each in tensors if each.requires_grad]
    found = iter(torch.autograd.grad(output, learning, grad, create_graph=True))
    return tuple(next(found) if each.requires_grad else None for each in tensors)
