"""Dispatch of an attention: to torch's fused kernels if possible, else to FlexAttention, else to blocks of rows."""

from dataclasses import replace

import torch
from torch import Tensor

from attnscale.attending import flex, row_blocks, sdpa
from attnscale.attending.call import WIDEST_HEAD, Call, aligned_width, padded
from attnscale.attending.ragged import Layout, Ragged, as_one_row, as_tokens
from attnscale.numerics import HALF_DTYPES, without_autocast
from attnscale.torch_internals import unseen


def run(call: Call) -> Tensor:
    """Return the output, (batch, heads, q_len, value_dim)."""
    is_short = call.query.shape[-2] <= row_blocks.BLOCK_ROWS  # the full matrix is one block
    if call.sinks is None and call.softcap is None and (not sdpa.materialises(call) or is_short):
        return sdpa.attend(call)
    call = as_autocast(call)
    with without_autocast(call.query):
        if call.softcap is not None and flex.serves(call):
            return flex.attend(call)
        if call.sinks is not None and sdpa.has_kernels(call):
            return sdpa.attend_by_kernels(call)
        return row_blocks.attend(call)


def run_sequences(ragged: Ragged) -> Tensor:
    """Return the output of every sequence, (1, heads, total, value_dim).

    A GPU runs all sequences at once, a CPU one after the other. In a graph, where lengths are unknown, a mask is used.
    """
    cast = replace(ragged, row=as_autocast(ragged.row))
    if serves_sequences(cast):
        with without_autocast(cast.row.query):
            return attend_sequences(cast)
    if unseen(ragged.rows.offsets):
        return run(ragged.as_masked())
    return ragged.joined([run(call) for call in ragged.calls()])


def as_autocast(call: Call) -> Call:
    """Cast the tensors of the call as autocast does for SDPA."""
    device = call.query.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return call
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    seen = call.visibility
    seen = seen if seen.mask is None else replace(seen, mask=cast(seen.mask))
    return replace(call, query=cast(call.query), key=cast(call.key), value=cast(call.value), visibility=seen)


def serves_sequences(ragged: Ragged) -> bool:
    """Return True if one kernel runs all sequences: on CUDA, in half precision, without soft-cap or sinks."""
    row = ragged.row
    widest = max(row.query.shape[-1], row.value.shape[-1])
    return (
        row.query.is_cuda
        and row.query.dtype in HALF_DTYPES
        and row.softcap is None
        and row.sinks is None
        and row.dropout_p == 0.0
        and widest <= WIDEST_HEAD
        and row.query.numel() > 0
        and row.key.numel() > 0
        and sdpa.enabled_kernels()[0]
        and kernel_window(ragged) is not None
    )


def attend_sequences(ragged: Ragged) -> Tensor:
    """Return softmax(scale · QKᵀ) V of every sequence, (1, heads, total, value_dim)."""
    from torch.nn.attention.varlen import varlen_attn  # imports torch's compiler

    row = ragged.row
    width = max(aligned_width(row.query), aligned_width(row.value))
    key, value = row.key, row.value
    if row.grouped:
        key, value = (tensor.repeat_interleave(row.group, dim=1) for tensor in (key, value))
    query, key, value = (as_tokens(padded(tensor, width)) for tensor in (row.query, key, value))
    window = kernel_window(ragged)
    assert window is not None
    (starts_q, longest_q), (starts_k, longest_k) = _starts(ragged.rows, query), _starts(ragged.keys, key)
    output = varlen_attn(
        *(query, key, value, starts_q, starts_k, longest_q, longest_k), scale=row.scale, window_size=window
    )
    assert isinstance(output, Tensor)  # a tuple only if the lse is requested
    return as_one_row(output)[..., : row.value.shape[-1]]


def _starts(layout: Layout, tokens: Tensor) -> tuple[Tensor, int]:
    # In a graph the lengths are unknown: use the number of tokens as the upper bound of the longest sequence.
    is_known = layout.known_longest is not None or not unseen(layout.offsets)
    return layout.offsets.to(torch.int32), layout.longest if is_known else tokens.shape[0]


def kernel_window(ragged: Ragged) -> tuple[int, int] | None:
    """Return the window (left, right) of the kernel, aligned to the last key; None if the kernel cannot express it."""
    seen = ragged.row.visibility
    if not seen.is_full and not seen.from_the_end and not ragged.rows.equals(ragged.keys):
        return None
    left, right = (0 if seen.first is None else -seen.first), (0 if seen.last is None else seen.last)
    if left < 0 or right < 0 or seen.mask is not None or seen.documents is not None:
        return None  # the kernel requires a window that includes the row's own position
    return -1 if seen.first is None else left, -1 if seen.last is None else right
