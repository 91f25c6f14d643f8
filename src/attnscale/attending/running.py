"""Dispatch of an attention: to torch's fused kernels if possible, else to FlexAttention, else to blocks of rows."""

from dataclasses import replace

import torch
from torch import Tensor

from attnscale.attending import flex, row_blocks, sdpa, varlen
from attnscale.attending.call import Call
from attnscale.attending.ragged import Ragged
from attnscale.numerics import without_autocast
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
    if varlen.serves(cast):
        with without_autocast(cast.row.query):
            return varlen.attend(cast)
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
