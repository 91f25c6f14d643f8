"""Torch's own fused forwards on CUDA, called so that the lse they find is not thrown away.

No score of a row lies above its lse, ln Σ eˢ, nor the lse above the largest score by more than ln n: of rows that are
not looked at, it tells the maximum better than any norm, and costs nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from attnscale.attending.call import Call
from attnscale.attending.choosing import run
from attnscale.torch_internals import sdpa_backend, sdpa_forward

Kernel = Callable[..., Any]
ALIGNMENT = 8  # other head dimensions are padded on the way to the kernels


def attend(call: Call) -> tuple[Tensor, Tensor | None]:
    """The output of attention(), bit for bit, and the lse (batch, heads, q_len); None where torch does not tell it."""
    backend = _choice(call) if _direct(call) else None
    forward, kernel = FORWARDS.get(backend), sdpa_forward(backend)
    return (run(call), None) if forward is None or kernel is None else forward(kernel, call)


def _direct(call: Call) -> bool:
    """Whether SDPA would hand these tensors to a kernel as they are."""
    return (
        call.visibility.is_plain
        and call.softcap is None
        and call.query.shape[-1] == call.value.shape[-1]
        and call.query.shape[-1] % ALIGNMENT == 0
        and call.query.dtype == call.key.dtype == call.value.dtype
        and not _casts(call)
        and not torch.compiler.is_compiling()
    )


def _casts(call: Call) -> bool:
    """Whether autocast would hand the kernel other tensors."""
    return torch.is_autocast_enabled("cuda") and call.query.dtype != torch.get_autocast_dtype("cuda")


def _choice(call: Call) -> SDPBackend | None:
    return sdpa_backend(
        *(call.query, call.key, call.value, None, call.dropout_p, call.visibility.is_causal),
        scale=call.scale,
        enable_gqa=call.grouped,
    )


def _cudnn(kernel: Kernel, call: Call) -> tuple[Tensor, Tensor]:
    output, lse, *_ = kernel(
        *(call.query, call.key, call.value, None, True, call.dropout_p, call.visibility.is_causal), scale=call.scale
    )
    return output, lse.reshape(call.query.shape[:3])


def _flash(kernel: Kernel, call: Call) -> tuple[Tensor, Tensor]:
    output, lse, *_ = kernel(
        *(call.query, call.key, call.value, call.dropout_p, call.visibility.is_causal), scale=call.scale
    )
    return output, lse


def _efficient(kernel: Kernel, call: Call) -> tuple[Tensor, Tensor]:
    output, lse, *_ = kernel(
        *(call.query, call.key, call.value, None, True, call.dropout_p, call.visibility.is_causal), scale=call.scale
    )
    return output, lse[..., : call.query.shape[2]]  # what is behind is padding


FORWARDS: dict[SDPBackend | None, Callable[[Kernel, Call], tuple[Tensor, Tensor]]] = {
    SDPBackend.CUDNN_ATTENTION: _cudnn,
    SDPBackend.FLASH_ATTENTION: _flash,
    SDPBackend.EFFICIENT_ATTENTION: _efficient,
}
