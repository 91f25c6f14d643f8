"""Torch's fused kernels: through SDPA, or called directly for sinks and second derivatives.

A sink is one logit per query head that joins the denominator of each row and has no value vector.
With L = ln Σ eˢ over the keys of a row, a sink b multiplies the output by σ(L − b). The kernel's own backward is
correct if it receives this output, for Σ dO·O, and ln(eᴸ + eᵇ), for the weights.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from attnscale.attending.call import WIDEST_HEAD, Call, aligned_width, padded
from attnscale.attending.row_blocks import blocks, row_weights
from attnscale.numerics import HALF_DTYPES, KERNEL_DTYPES, WIDE_DTYPES
from attnscale.torch_internals import (
    constant_in_graphs,
    in_transform,
    modes_in_place,
    sdpa_backward,
    sdpa_forward,
    sizes_vary,
)
from attnscale.visibility import Visibility

MASK_ROWS = 512
SDPA = F.scaled_dot_product_attention  # original function; watching() replaces the one in torch.nn.functional
FLASH_CAPABILITY = 8  # flash attention needs a GPU of this generation


def materialises(call: Call) -> bool:
    """Return True if torch has no fused kernel for this and would form the full matrix of scores."""
    if call.query.device.type == "cpu":
        return call.dropout_p > 0.0 or call.mask_learns
    return call.query.device.type == "cuda" and call.query.dtype == torch.float64


def attend(call: Call) -> Tensor:
    """Run SDPA with arguments that keep its kernels fused and its memory linear."""
    if _takes_whole(call):
        return _attend(call)
    outputs = [_attend(_rows(call, rows, keys)) for rows, keys in blocks(call, MASK_ROWS)]
    return torch.cat(outputs, dim=-2)


def _takes_whole(call: Call) -> bool:
    """Return True if no mask must be built, and torch copies no long boolean mask to floats."""
    seen, mask = call.visibility, call.visibility.mask
    if seen.is_plain or mask is None or mask.dtype != torch.bool:
        return seen.is_plain or seen.is_mask
    return seen.is_mask and (mask.shape[-2] <= MASK_ROWS or sizes_vary(mask.shape[-2]))


def _rows(call: Call, rows: slice, keys: slice) -> Call:
    seen = call.visibility
    query, key, value = call.query[..., rows, :], call.key[..., keys, :], call.value[..., keys, :]
    mask = seen.shown(rows, keys, query.device) if seen.bias is None else seen.added(rows, keys, query)
    return replace(call, query=query, key=key, value=value, visibility=Visibility(mask=mask))


def _attend(call: Call) -> Tensor:
    query, key, value = call.query, call.key, call.value
    grouped = call.grouped
    if grouped and not _takes_groups(query):
        key, value = (tensor.repeat_interleave(call.group, dim=1) for tensor in (key, value))
        grouped = False
    head_dim, value_dim = aligned_width(query), aligned_width(value)
    if query.device.type == "cpu":  # its kernel needs equal head dimensions
        head_dim = value_dim = max(head_dim, value_dim)
    bias = call.visibility.bias  # of float64 for float64 queries: the CPU kernel misreads a float32 mask
    mask = call.visibility.mask if bias is None or query.dtype != torch.float64 else bias.double()
    output = F.scaled_dot_product_attention(
        padded(query, head_dim),
        padded(key, head_dim),
        padded(value, value_dim),
        mask,
        call.dropout_p,
        call.visibility.is_causal,
        scale=call.scale,
        enable_gqa=grouped,
    )
    return output[..., : value.shape[-1]]


def _takes_groups(query: Tensor) -> bool:
    narrow = query.shape[-1] <= WIDEST_HEAD
    return query.device.type != "cuda" or (query.dtype in HALF_DTYPES and narrow)


def has_kernels(call: Call) -> bool:
    """Return True if torch has a fused forward kernel that returns an lse, and a backward kernel that accepts one."""
    backend = _backend(call)
    kernels = sdpa_forward(backend, call.query.device.type), sdpa_backward(backend, call.query.device.type)
    return (
        backend is not None
        and None not in kernels
        and call.softcap is None
        and call.dropout_p == 0.0
        and call.query.dtype == call.key.dtype == call.value.dtype
        and min(call.query.shape[:-1]) > 0
        and call.value.shape[-1] > 0
        and call.key.shape[-2] > 1  # with one key, the backward of some kernels returns NaN
        and (torch.compiler.is_compiling() or not in_transform())
    )


def differentiates_twice(query: Tensor, key: Tensor, value: Tensor, call: Call) -> bool:
    """Return True if SDPA on the original tensors has second derivatives that the fused kernel lacks.

    On a CPU, SDPA forms the full matrix for unusual shapes, and that has second derivatives. The folded call runs a
    fused kernel, which has none.
    """
    if call.query.device.type != "cpu" or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    axes = 1 if call.grouped else 2  # compare the batch, and heads unless they are grouped
    is_whole = query.dim() == key.dim() == value.dim() == 4 and query.shape[-1] == value.shape[-1]
    if is_whole and query.shape[:axes] == key.shape[:axes] == value.shape[:axes]:
        return False
    is_watched = modes_in_place() or F.scaled_dot_product_attention is not SDPA
    learns = any(x.requires_grad for x in (call.query, call.key, call.value))
    return learns and not is_watched and not torch.is_autocast_enabled("cpu") and has_kernels(call)


def _backend(call: Call) -> SDPBackend | None:
    flash, efficient = enabled_kernels()
    kind, dtype, seen = call.query.device.type, call.query.dtype, call.visibility
    if kind == "cpu":
        mask = seen.mask
        takes_mask = mask is not None and mask.dtype in (torch.bool, dtype) and seen.is_mask and not call.mask_learns
        is_taken = flash and dtype in (*HALF_DTYPES, *WIDE_DTYPES) and (seen.is_plain or takes_mask)
        return SDPBackend.FLASH_ATTENTION if is_taken else None
    width = max(call.query.shape[-1], call.value.shape[-1])
    if kind != "cuda" or dtype not in KERNEL_DTYPES or width > WIDEST_HEAD or not seen.is_plain:
        return None
    is_square = seen.is_full or call.query.shape[-2] == call.key.shape[-2]  # flash aligns causal masks to the last key
    if flash and dtype in HALF_DTYPES and is_square and torch.cuda.get_device_capability()[0] >= FLASH_CAPABILITY:
        return SDPBackend.FLASH_ATTENTION
    return SDPBackend.EFFICIENT_ATTENTION if efficient else None


@constant_in_graphs
def enabled_kernels() -> tuple[bool, bool]:
    """Return whether flash and memory-efficient kernels are enabled; users disable both for second derivatives."""
    return torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()


def attend_by_kernels(call: Call) -> Tensor:
    """Return the output, (batch, heads, q_len, value_dim), with gradients for query, key, value and sinks."""
    width = max(aligned_width(call.query), aligned_width(call.value))
    key, value = (x.repeat_interleave(call.group, dim=1) if call.grouped else x for x in (call.key, call.value))
    query, key, value = (_in_rows(padded(x, width)) for x in (call.query, key, value))
    mask = call.visibility.mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    mask = None if mask is None else _in_rows(mask)
    output: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        query, key, value, call.sinks, mask, call.visibility.is_causal, call.scale, _backend(call)
    )
    return output[..., : call.value.shape[-1]]


def _in_rows(tensor: Tensor) -> Tensor:
    """Return the tensor with contiguous rows; the kernels misread other layouts."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
        backend: SDPBackend | None,
    ) -> Tensor:
        kernel, q_len = sdpa_forward(backend, query.device.type), query.shape[-2]
        assert kernel is not None
        state: Sequence[Any] = ()
        if not query.is_cuda:
            output, lse = kernel(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)[:2]
        elif backend is SDPBackend.FLASH_ATTENTION:
            output, lse, _, _, _, _, *state = kernel(query, key, value, 0.0, is_causal, scale=scale)
        else:
            output, lse, *state = kernel(query, key, value, None, True, 0.0, is_causal, scale=scale)
            lse = lse[..., :q_len]  # remove padding
        if sinks is not None:
            above = lse - sinks.to(lse.dtype).unsqueeze(-1)
            output = (output * torch.sigmoid(above).unsqueeze(-1)).to(output.dtype)
            lse = lse + F.softplus(-above)  # ln(eᴸ + eᵇ)
        ctx.save_for_backward(query, key, value, sinks, mask, output, lse, *state[:2])
        ctx.is_causal, ctx.scale, ctx.backend = is_causal, scale, backend
        result: Tensor = output
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, mask, output, total, *state = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: second derivatives are needed
            seen = Visibility(0 if ctx.is_causal else None, mask=mask)
            return *_differentiable(grad, (query, key, value, sinks), seen, ctx.scale), None, None, None, None
        kernel, grad = sdpa_backward(ctx.backend, query.device.type), grad.contiguous()
        assert kernel is not None
        given = grad, query, key, value
        lengths = query.shape[-2], key.shape[-2]
        if not query.is_cuda:
            found = kernel(*given, output, total, 0.0, ctx.is_causal, attn_mask=mask, scale=ctx.scale)
        elif ctx.backend is SDPBackend.FLASH_ATTENTION:
            settings = *lengths, 0.0, ctx.is_causal, *state
            found = kernel(*given, output, total, None, None, *settings, scale=ctx.scale)
        else:
            rows = F.pad(total, (0, -total.shape[-1] % 32))  # this kernel reads blocks of 32
            wanted = [True, True, True, False]
            found = kernel(*given, None, output, rows, *state, 0.0, wanted, ctx.is_causal, scale=ctx.scale)[:3]
        if sinks is None:
            return *found, None, None, None, None, None
        weight = torch.exp(sinks.to(total.dtype).unsqueeze(-1) - total)  # weight of the sink in each row
        of_sinks = -(weight * (grad * output).sum(-1, dtype=weight.dtype)).sum((0, 2)).to(sinks.dtype)
        return *found, of_sinks, None, None, None, None


def _differentiable(
    grad: Tensor, tensors: tuple[Tensor, Tensor, Tensor, Tensor | None], seen: Visibility, scale: float
) -> list[Tensor | None]:
    query, key, value, sinks = tensors
    bias = seen.added(slice(0, query.shape[-2]), slice(0, key.shape[-2]), query)
    output = row_weights(query, key, bias, scale, None, sinks) @ value
    learning = [each for each in tensors if each is not None and each.requires_grad]
    found = iter(torch.autograd.grad(output, learning, grad, create_graph=True))
    return [next(found) if each is not None and each.requires_grad else None for each in tensors]
