"""Torch's fused kernels, called so that a forward returns its lse and a backward can use it.

The lse of a row, ln Σ eˢ, is at least its largest score, and at most ln n above it. For rows that are not sampled, it
is a tighter bound of the maximum than any norm, at no cost.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from attnscale.attending.call import Call, padded
from attnscale.attending.ragged import as_one_row, as_tokens
from attnscale.attending.running import run
from attnscale.torch_internals import sdpa_backend, sdpa_backward, sdpa_forward, sequences_backward

ALIGNMENT = 8  # torch's CUDA kernels need head dimensions that are multiples of this
LSE_ALIGNMENT = 32  # the memory-efficient kernel pads the rows of its lse to a multiple of this
# Arguments of the forwards before dropout: no bias, and keep the lse.
FORWARDS: dict[SDPBackend | None, tuple[Any, ...]] = {
    SDPBackend.CUDNN_ATTENTION: (None, True),
    SDPBackend.FLASH_ATTENTION: (),
    SDPBackend.EFFICIENT_ATTENTION: (None, True),
}
Gradients = tuple[Tensor, Tensor, Tensor]
Kernel = Callable[..., Any]


def attend_with_lse(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return the bit-identical output of attention(), and the lse (batch, heads, q_len) or None."""
    backend = _choice(call) if _needs_no_change(call) else None
    kernel = sdpa_forward(backend) if backend in FORWARDS else None
    if kernel is None:
        return run(call), None
    options = *FORWARDS[backend], call.dropout_p, call.visibility.is_causal
    output, lse, *_ = kernel(call.query, call.key, call.value, *options, scale=call.scale)
    return output, lse.reshape(*lse.shape[:2], -1)[..., : call.query.shape[2]]  # the rest is padding


def has_one_dtype(call: Call) -> bool:
    """Return True if the tensors have one dtype and autocast would not cast them."""
    if not call.query.dtype == call.key.dtype == call.value.dtype:
        return False
    return not torch.is_autocast_enabled("cuda") or call.query.dtype == torch.get_autocast_dtype("cuda")


def _needs_no_change(call: Call) -> bool:
    return (
        call.visibility.is_plain
        and call.softcap is None
        and call.query.shape[-1] == call.value.shape[-1]
        and call.query.shape[-1] % ALIGNMENT == 0
        and has_one_dtype(call)
        and not torch.compiler.is_compiling()
    )


def _choice(call: Call) -> SDPBackend | None:
    return sdpa_backend(
        *(call.query, call.key, call.value, None, call.dropout_p, call.visibility.is_causal),
        scale=call.scale,
        enable_gqa=call.grouped,
    )


class Pass(NamedTuple):
    """Inputs of a backward pass."""

    grad: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    lse: Tensor
    scale: float
    is_causal: bool


@torch.library.custom_op("attnscale::attention_rows_backward", mutates_args=())
def attention_rows_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, scale: float, is_causal: bool
) -> Gradients:
    """Return the gradients of query, key and value."""
    return attention_gradients(Pass(grad, query, key, value, output, lse, scale, is_causal))


@attention_rows_backward.register_fake
def _backward_fake(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, scale: float, is_causal: bool
) -> Gradients:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def attention_gradients(back: Pass) -> Gradients:
    """Return the gradients, by the backward of the kernel that SDPA would choose."""
    back = back._replace(grad=back.grad.contiguous())
    given, (_, query, key, value, *_) = back, back
    if not query.is_cuda:
        kernel = sdpa_backward(None, "cpu")
        found = None if kernel is None else kernel(*back[:6], 0.0, back.is_causal, scale=back.scale)
        return _like_inputs(found or _recomputed(back), back)
    if key.shape[2] == 1:  # the weight of a single key is always 1; torch returns NaN for some such shapes
        of_value = back.grad.sum(2, keepdim=True).unflatten(1, (value.shape[1], -1)).sum(2)
        return torch.zeros_like(query), torch.zeros_like(key), _like(of_value, value)
    width = -(-query.shape[-1] // ALIGNMENT) * ALIGNMENT
    if width != query.shape[-1]:
        back = Pass(*(padded(x, width) for x in back[:5]), *back[5:])  # type: ignore[arg-type, call-arg]
    backend = _sdpa_backend(back)
    backend = backend if backend in BACKWARDS else SDPBackend.EFFICIENT_ATTENTION
    kernel = sdpa_backward(backend, "cuda")
    return _like_inputs(_recomputed(back) if kernel is None else BACKWARDS[backend](kernel, back), given)


def packed_gradients(back: Pass, starts: Tensor, longest: int) -> Gradients:
    """Return the gradients of packed sequences, (1, heads, total, head_dim), by torch's kernel for them."""
    kernel, starts = sequences_backward(), starts.to(torch.int32)
    assert kernel is not None  # tensors with gradients always have one
    state, unused = (torch.empty(size, dtype=torch.uint64, device=back.grad.device) for size in ((2,), ()))
    of_query, of_key, of_value = kernel(
        *(back.grad.contiguous(), *map(as_tokens, back[1:4]), back.output, back.lse.squeeze(0), starts, starts),
        *(longest, longest, 0.0, back.is_causal, state, unused),
        scale=back.scale,
    )
    return as_one_row(of_query), as_one_row(of_key), as_one_row(of_value)


def _sdpa_backend(back: Pass) -> SDPBackend | None:
    # the kernel that SDPA would choose in training, which depends on GPU, dtype and shape
    with torch.enable_grad():
        query, key, value = (x.detach().requires_grad_() for x in (back.query, back.key, back.value))
        grouped = query.shape[1] != key.shape[1]
        return sdpa_backend(query, key, value, is_causal=back.is_causal, scale=back.scale, enable_gqa=grouped)


def _recomputed(back: Pass) -> Gradients:
    # if torch has no such backward, recompute the attention
    with torch.enable_grad():
        query, key, value = (x.detach().requires_grad_() for x in (back.query, back.key, back.value))
        grouped = query.shape[1] != key.shape[1]
        output = F.scaled_dot_product_attention(
            query, key, value, is_causal=back.is_causal, scale=back.scale, enable_gqa=grouped
        )
        of_query, of_key, of_value = torch.autograd.grad(output, (query, key, value), back.grad)
    return of_query, of_key, of_value


def _cudnn_backward(kernel: Kernel, back: Pass) -> Gradients:
    unused = torch.empty((), dtype=torch.int64, device=back.query.device)  # the state of dropout's random numbers
    of_query, of_key, of_value = kernel(
        *(*back[:5], back.lse.unsqueeze(-1), unused, unused),
        *(None, None, None),  # no bias, no packed sequences
        *(back.query.shape[2], back.key.shape[2]),
        *(0.0, back.is_causal),
        scale=back.scale,
    )
    return of_query, of_key, of_value


def _flash_backward(kernel: Kernel, back: Pass) -> Gradients:
    state, unused = (torch.empty(size, dtype=torch.uint64, device=back.query.device) for size in ((2,), ()))
    of_query, of_key, of_value = kernel(
        *back[:6],
        *(None, None),  # no packed sequences
        *(back.query.shape[2], back.key.shape[2]),
        *(0.0, back.is_causal, state, unused),
        scale=back.scale,
    )
    return of_query, of_key, of_value


def _efficient_backward(kernel: Kernel, back: Pass) -> Gradients:
    # for float32 and causal attention of uneven lengths; it does not support groups, so keys are repeated
    group = back.query.shape[1] // back.key.shape[1]
    key, value = (x if group == 1 else x.repeat_interleave(group, 1) for x in (back.key, back.value))
    unused = torch.empty((), dtype=torch.int64, device=back.query.device)
    of_query, of_key, of_value, _ = kernel(
        *(back.grad, back.query, key, value, None, back.output),
        *(F.pad(back.lse, (0, -back.lse.shape[-1] % LSE_ALIGNMENT)), unused, unused),
        *(0.0, [True, True, True, False], back.is_causal),
        scale=back.scale,
    )
    if group > 1:
        of_key, of_value = (x.unflatten(1, (-1, group)).sum(2) for x in (of_key, of_value))
    return of_query, of_key, of_value


BACKWARDS: dict[SDPBackend | None, Callable[[Kernel, Pass], Gradients]] = {
    SDPBackend.CUDNN_ATTENTION: _cudnn_backward,
    SDPBackend.FLASH_ATTENTION: _flash_backward,
    SDPBackend.EFFICIENT_ATTENTION: _efficient_backward,
}


def _like_inputs(gradients: Gradients, back: Pass) -> Gradients:
    # remove padding and restore the memory layout of the inputs, which the fake declares
    of_query, of_key, of_value = map(_like, gradients, (back.query, back.key, back.value))
    return of_query, of_key, of_value


def _like(gradient: Tensor, tensor: Tensor) -> Tensor:
    if gradient.shape == tensor.shape and gradient.stride() == tensor.stride():
        return gradient
    gradient = gradient[..., : tensor.shape[-1]]
    wanted = torch.empty_like(tensor)
    return gradient if gradient.stride() == wanted.stride() else wanted.copy_(gradient)
